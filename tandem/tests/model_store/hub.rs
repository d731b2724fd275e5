//! Models from the hub, which is a thread of the test.

use crate::{Machine, gguf, source};
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use tandem::model::{ModelError, Store, StoreArgs};
use tandem_node::retry::error_chain;
use tandem_model::revision;

/// What the hub's branch `main` and its tag `v1` are.
const COMMITS: [(&str, &str); 2] =
    [("main", "1111111111111111111111111111111111111111"), ("v1", "2222222222222222222222222222222222222222")];

/// A hub as hf-hub sees it: `/api/models/…`, and files that redirect to another address which knows ranges.
struct Hub {
    files: Vec<(&'static str, Vec<u8>)>,
    /// A file whose first byte is another than the hub's own hash says.
    forged: Option<&'static str>,
    /// A file that the hub names no hash of.
    unhashed: Option<&'static str>,
    /// So many answers with the file break off in the middle.
    torn: AtomicUsize,
    requests: AtomicUsize,
}

impl Hub {
    fn start(files: &[&'static str], model: Vec<u8>, torn: usize) -> (Machine, Arc<Self>) {
        Self::serve(files.iter().map(|file| (*file, model.clone())).collect(), torn)
    }

    fn serve(files: Vec<(&'static str, Vec<u8>)>, torn: usize) -> (Machine, Arc<Self>) {
        Self { files, torn: torn.into(), requests: 0.into(), forged: None, unhashed: None }.run()
    }

    fn run(self) -> (Machine, Arc<Self>) {
        let hub = Arc::new(self);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = format!("http://{}", listener.local_addr().expect("bound"));
        let (serving, at) = (Arc::clone(&hub), address.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                serving.answer(stream, &at);
            }
        });
        (Machine { hub: address, ..Machine::new() }, hub)
    }

    fn content(&self, file: &str) -> Option<&[u8]> {
        self.files.iter().find(|(known, _)| *known == file).map(|(_, content)| content.as_slice())
    }

    /// What the hub says about a file.
    fn listed(&self, file: &str, content: &[u8]) -> serde_json::Value {
        let mut listed = serde_json::json!({ "rfilename": file, "size": content.len() });
        if self.unhashed == Some(file) {
            return listed;
        }
        // Of a file in the large-file storage, git's name is that of a pointer to it.
        let large = file.ends_with(".gguf") || file.ends_with(".safetensors");
        let blob =
            if large { revision::git_blob_sha1(0, &b""[..]) } else { revision::git_blob_sha1(content.len() as u64, content) };
        listed["blobId"] = blob.expect("memory").into();
        if large {
            listed["lfs"] = serde_json::json!({ "sha256": revision::sha256(content).expect("memory") });
        }
        listed
    }

    fn answer(&self, mut stream: TcpStream, address: &str) {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let lines: Vec<String> = BufReader::new(&stream).lines().map_while(Result::ok).take_while(|l| !l.is_empty()).collect();
        let path = lines[0].split(' ').nth(1).expect("a request line");
        let range = lines.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
        let named =
            |path: &str| COMMITS.into_iter().find(|(name, commit)| [*name, *commit].contains(&path)).map(|(_, commit)| commit);
        let asked = path.strip_prefix("/api/models/org/name/revision/").and_then(|path| path.strip_suffix("?blobs=true"));
        let resolved = path.strip_prefix("/org/name/resolve/").and_then(|path| path.split_once('/'));
        // Files are asked for by their commit, never by a name that may have moved meanwhile.
        let file = resolved.filter(|(commit, _)| COMMITS.iter().any(|known| known.1 == *commit)).map(|(_, file)| file);
        let (head, body) = if let Some(commit) = asked.and_then(named) {
            let files: Vec<_> = self.files.iter().map(|(file, content)| self.listed(file, content)).collect();
            ("200 OK\r\n".to_owned(), serde_json::json!({ "sha": commit, "siblings": files }).to_string().into_bytes())
        } else if let Some(file) = file.filter(|file| self.content(file).is_some()) {
            // Names of contents, as of files that are the same.
            let etag = file.len();
            let commit = COMMITS[0].1;
            let headers = format!(
                "etag: \"x\"\r\nx-linked-etag: \"{etag}\"\r\nx-repo-commit: {commit}\r\nlocation: {address}/cdn/{file}\r\n"
            );
            (format!("302 Found\r\n{headers}"), Vec::new())
        } else if let Some((name, content)) = path.strip_prefix("/cdn/").and_then(|file| Some((file, self.content(file)?))) {
            let (start, end) = range.as_deref().and_then(|range| range.split_once('-')).expect("a range");
            let start: usize = start.parse().expect("a number");
            let end = end.parse().map_or(content.len(), |end: usize| end + 1);
            let range = format!("content-range: bytes {start}-{}/{}\r\n", end - 1, content.len());
            let mut part = content[start..end].to_vec();
            if self.forged == Some(name) && start == 0 {
                part[0] ^= 1;
            }
            (format!("206 Partial Content\r\n{range}"), part)
        } else {
            ("404 Not Found\r\n".to_owned(), Vec::new())
        };
        let torn = body.len() > 1000 && self.torn.try_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
        // Without a length, a break looks like the end: the client's own check must notice.
        let length = if torn { String::new() } else { format!("content-length: {}\r\n", body.len()) };
        let body = if torn { &body[..body.len() / 2] } else { &body[..] };
        let mut answer = format!("HTTP/1.1 {head}{length}connection: close\r\n\r\n").into_bytes();
        answer.extend(body);
        // The client may have gone.
        let _ = stream.write_all(&answer).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
        let _ = stream.read(&mut [0; 64]);
    }
}

#[test]
fn stored_file_is_found_without_the_hub() {
    let model = gguf(50_000);
    let (machine, hub) = Hub::start(&["README.md", "gguf/Tiny.Q4_0.gguf"], model.clone(), 0);
    let fetched = machine.bare_store().get(&source("hf:org/name")).expect("the hub works");
    assert_eq!(fetched.id, "Tiny");
    assert_eq!(fs::read(&fetched.path).expect("it is there"), model);
    assert_eq!(machine.left(), std::slice::from_ref(&fetched.path));
    let requests = hub.requests.load(Ordering::SeqCst);
    assert_eq!(machine.bare_store().get(&source("hf:org/name/gguf/Tiny.Q4_0.gguf")).expect("it is here"), fetched);
    assert_eq!(machine.bare_store().get(&source("hf:org/name")).expect("it is here"), fetched);
    assert_eq!(hub.requests.load(Ordering::SeqCst), requests);
}

#[test]
fn stored_safetensors_are_found_without_the_hub() {
    let index = br#"{"weight_map":{"a":"model-1-of-2.safetensors","b":"model-2-of-2.safetensors"}}"#.to_vec();
    let files = vec![
        ("README.md", b"not fetched".to_vec()),
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{\"a\":1}".to_vec()),
        ("generation_config.json", b"{\"b\":2}".to_vec()),
        ("model.safetensors.index.json", index),
        ("model-1-of-2.safetensors", gguf(20_000)),
        ("model-2-of-2.safetensors", gguf(30_000)),
        ("original/consolidated.safetensors", b"nor this".to_vec()),
    ];
    let (machine, hub) = Hub::serve(files.clone(), 0);
    let fetched = machine.bare_store().get(&source("hf:org/name")).expect("the hub works");
    assert_eq!(fetched.id, "name");
    let wanted = &files[1..7];
    assert_eq!(fetched.bytes, wanted.iter().map(|(_, content)| content.len() as u64).sum::<u64>());
    for (name, content) in wanted {
        assert!(fs::read(fetched.path.join(name)).expect("it is there") == *content, "{name}");
    }
    assert_eq!(machine.left().len(), wanted.len(), "{:?}", machine.left());
    let requests = hub.requests.load(Ordering::SeqCst);
    assert_eq!(machine.bare_store().get(&source("hf:org/name")).expect("it is here"), fetched);
    assert_eq!(hub.requests.load(Ordering::SeqCst), requests);
    assert_eq!(machine.bare_store().list().expect("readable"), [fetched]);
}

#[test]
fn incomplete_directory_is_never_used() {
    let files = |index: &str| {
        vec![
            ("config.json", b"{}".to_vec()),
            ("tokenizer.json", b"{ }".to_vec()),
            ("model.safetensors.index.json", index.as_bytes().to_vec()),
        ]
    };
    for (index, told) in [
        (r#"{"weight_map":{"a":"model-1-of-1.safetensors"}}"#, "has no file model-1-of-1.safetensors"),
        (r#"{"weight_map":{"a":"../../model.safetensors"}}"#, "names its weights"),
        ("{}", "names its weights"),
    ] {
        let (machine, _hub) = Hub::serve(files(index), 0);
        let error = machine.bare_store().get(&source("hf:org/name")).expect_err(told).to_string();
        assert!(error.contains(told), "{error}");
        assert_eq!(machine.left(), [] as [PathBuf; 0]);
    }
    let (machine, _hub) = Hub::start(&["config.json", "tokenizer.json", "model.safetensors"], gguf(50_000), usize::MAX);
    machine.bare_store().get(&source("hf:org/name")).expect_err("it always breaks");
    assert_eq!(machine.left(), [] as [PathBuf; 0]);
    assert_eq!(machine.bare_store().list().expect("readable"), []);
}

#[test]
fn interrupted_download_is_never_used() {
    let (machine, _hub) = Hub::start(&["a.gguf"], gguf(50_000), usize::MAX);
    let error = machine.bare_store().get(&source("hf:org/name/a.gguf")).expect_err("it always breaks");
    assert!(matches!(error, ModelError::WrongSize { .. } | ModelError::Hub { .. }), "{error:?}");
    assert_eq!(machine.left(), [] as [PathBuf; 0]);
}

#[test]
fn file_that_the_hub_lacks_is_reported() {
    let (machine, _hub) = Hub::start(&["a.gguf", "b.gguf"], gguf(10), 0);
    for (name, told) in [
        ("hf:org/name", "several .gguf files (a.gguf, b.gguf)"),
        ("hf:org/name/c.gguf", "hf:org/name/c.gguf has no file c.gguf"),
        ("hf:org/name@v2/a.gguf", "404"),
        ("hf:org/other", "404"),
    ] {
        let error = error_chain(&machine.bare_store().get(&source(name)).expect_err(name));
        assert!(error.contains(told), "{error}");
    }
    let (machine, _hub) = Hub::start(&["model.safetensors"], Vec::new(), 0);
    let error = machine.bare_store().get(&source("hf:org/name")).expect_err("no GGUF").to_string();
    assert!(error.contains("hf:org/name holds no .gguf file"), "{error}");
}

#[test]
fn revision_of_the_hub_is_resolved_to_its_commit_and_kept_apart() {
    let (machine, hub) = Hub::start(&["a.gguf"], gguf(5_000), 0);
    let store = machine.bare_store();
    let [(_, main), (_, tagged)] = COMMITS;
    for (name, commit) in [("hf:org/name", main), ("hf:org/name@v1/a.gguf", tagged), (&format!("hf:org/name@{tagged}"), tagged)] {
        let fetched = store.get(&source(name)).expect("the hub works");
        assert!(fetched.path.ends_with(Path::new(commit).join("a.gguf")), "{name}: {}", fetched.path.display());
        let requests = hub.requests.load(Ordering::SeqCst);
        assert_eq!(store.get(&source(name)).expect("it is here"), fetched);
        assert_eq!(hub.requests.load(Ordering::SeqCst), requests, "{name}: it is fetched once");
    }
    assert_eq!(machine.left().len(), 3);
}

#[test]
fn file_that_differs_from_the_hubs_hash_is_not_kept() {
    let (weights, json) = (gguf(5_000), b"{}".to_vec());
    let directory =
        || vec![("config.json", json.clone()), ("tokenizer.json", b"{ }".to_vec()), ("model.safetensors", weights.clone())];
    for (files, forged) in
        [(vec![("a.gguf", weights.clone())], "a.gguf"), (directory(), "model.safetensors"), (directory(), "tokenizer.json")]
    {
        let hub = Hub { files: files.clone(), forged: Some(forged), unhashed: None, torn: 0.into(), requests: 0.into() };
        let (machine, _hub) = hub.run();
        let error = machine.bare_store().get(&source("hf:org/name")).expect_err(forged);
        assert!(matches!(&error, ModelError::WrongHash { name, .. } if name == forged), "{error:?}");
        assert_eq!(machine.left(), [] as [PathBuf; 0], "{forged}");

        let hub = Hub { files, forged: None, unhashed: Some(forged), torn: 0.into(), requests: 0.into() };
        let (machine, _hub) = hub.run();
        let error = machine.bare_store().get(&source("hf:org/name")).expect_err(forged);
        assert!(matches!(&error, ModelError::NoHash { name, .. } if name == forged), "{error:?}");
        assert_eq!(machine.left(), [] as [PathBuf; 0], "{forged}");
    }
}

#[test]
fn file_name_outside_the_store_is_refused() {
    let (machine, _hub) = Hub::start(&["../../../planted.gguf"], gguf(10), 0);
    let error = machine.bare_store().get(&source("hf:org/name")).expect_err("there is no other model");
    assert!(matches!(error, ModelError::NoModel(_)), "{error:?}");
    assert_eq!(machine.left(), [] as [PathBuf; 0]);
}

#[test]
fn token_is_not_sent_over_an_unencrypted_connection() {
    let (machine, hub) = Hub::start(&["a.gguf"], gguf(10), 0);
    let mut settings = machine.settings();
    settings.hf_token = Some("hidden".to_owned().into());
    let error = Store::new(settings).expect("the directory is set").get(&source("hf:org/name")).expect_err("http");
    assert!(matches!(error, ModelError::TokenInClear(_)) && !error.to_string().contains("hidden"), "{error:?}");
    assert_eq!(hub.requests.load(Ordering::SeqCst), 0);
}

#[test]
fn offline_store_sends_no_request() {
    let (machine, hub) = Hub::start(&["a.gguf"], gguf(10), 0);
    let offline = || {
        let settings = StoreArgs { offline: true, ..machine.settings() };
        Store::new(settings).expect("the directory is set")
    };
    for name in ["hf:org/name", "pypi:small"] {
        let error = offline().get(&source(name)).expect_err(name).to_string();
        assert!(error.contains(&format!("{name} is not in the store, and --offline")), "{error}");
    }
    assert_eq!(hub.requests.load(Ordering::SeqCst), 0);
    assert!(!machine.path("models").exists(), "a store that must not fetch makes nothing");
    let fetched = machine.bare_store().get(&source("hf:org/name")).expect("the hub works");
    assert_eq!(offline().get(&source("hf:org/name")).expect("it is here"), fetched);
}
