//! Tests of models from the Hugging Face hub, which a thread of the tests serves.

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
use tandem_model::revision;
use tandem_model_store::{ModelStoreError, Store, StoreArgs};
use tandem_process::retry::error_chain;

const COMMITS: [(&str, &str); 2] =
    [("main", "1111111111111111111111111111111111111111"), ("v1", "2222222222222222222222222222222222222222")];

/// A server with those parts of the hub's API that downloads use: `/api/models/…`, and files that redirect to another address, which supports ranges.
struct Hub {
    files: Vec<(&'static str, Vec<u8>)>,
    /// The file that is delivered with a content that differs from the listed hash; `None` if all files are correct.
    corrupted: Option<&'static str>,
    /// The file for which the hub lists no hash; `None` if all files have a hash.
    unhashed: Option<&'static str>,
    /// The value of the headers `etag`, `x-linked-etag` and `x-repo-commit` of all files.
    tag: String,
    /// The commit that the hub lists instead of the right one.
    commit: Option<&'static str>,
    /// Whether every file's content is followed by bytes without end.
    is_endless: bool,
    interrupted: AtomicUsize,
    requests: AtomicUsize,
}

impl Hub {
    fn start(files: &[&'static str], model: Vec<u8>, interrupted: usize) -> (Machine, Arc<Self>) {
        Self::serve(files.iter().map(|file| (*file, model.clone())).collect(), interrupted)
    }

    fn serve(files: Vec<(&'static str, Vec<u8>)>, interrupted: usize) -> (Machine, Arc<Self>) {
        Self { interrupted: interrupted.into(), ..Self::of(files) }.run()
    }

    fn of(files: Vec<(&'static str, Vec<u8>)>) -> Self {
        Self {
            files,
            corrupted: None,
            unhashed: None,
            tag: "x".to_owned(),
            commit: None,
            is_endless: false,
            interrupted: 0.into(),
            requests: 0.into(),
        }
    }

    fn run(self) -> (Machine, Arc<Self>) {
        let hub = Arc::new(self);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = format!("http://{}", listener.local_addr().expect("the listener is bound"));
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

    fn listed(&self, file: &str, content: &[u8]) -> serde_json::Value {
        let mut listed = serde_json::json!({ "rfilename": file, "size": content.len() });
        if self.unhashed == Some(file) {
            return listed;
        }
        // For a file in the large-file storage, git's hash is that of a pointer to the file.
        let large = file.ends_with(".gguf") || file.ends_with(".safetensors");
        let blob =
            if large { revision::git_blob_sha1(0, &b""[..]) } else { revision::git_blob_sha1(content.len() as u64, content) };
        listed["blobId"] = blob.expect("reading from memory does not fail").into();
        if large {
            listed["lfs"] =
                serde_json::json!({ "sha256": revision::sha256(content).expect("reading from memory does not fail") });
        }
        listed
    }

    fn answer(&self, mut stream: TcpStream, address: &str) {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let lines: Vec<String> = BufReader::new(&stream).lines().map_while(Result::ok).take_while(|l| !l.is_empty()).collect();
        let path = lines[0].split(' ').nth(1).expect("the request line has a path");
        let range = lines.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
        let named =
            |path: &str| COMMITS.into_iter().find(|(name, commit)| [*name, *commit].contains(&path)).map(|(_, commit)| commit);
        let asked = path.strip_prefix("/api/models/org/name/revision/").and_then(|path| path.strip_suffix("?blobs=true"));
        let resolved = path.strip_prefix("/org/name/resolve/").and_then(|path| path.split_once('/'));
        // Files are requested by their commit. A branch or a tag may have changed meanwhile.
        let file = resolved.filter(|(commit, _)| COMMITS.iter().any(|known| known.1 == *commit)).map(|(_, file)| file);
        let (head, body) = if let Some(commit) = asked.and_then(named) {
            let files: Vec<_> = self.files.iter().map(|(file, content)| self.listed(file, content)).collect();
            (
                "200 OK\r\n".to_owned(),
                serde_json::json!({ "sha": self.commit.unwrap_or(commit), "siblings": files }).to_string().into_bytes(),
            )
        } else if let Some(file) = file.filter(|file| self.content(file).is_some()) {
            let tag = &self.tag;
            let headers = format!("etag: \"{tag}\"\r\nx-linked-etag: \"{tag}\"\r\nx-repo-commit: {tag}\r\n");
            (format!("302 Found\r\n{headers}location: {address}/cdn/{file}\r\n"), Vec::new())
        } else if let Some((name, content)) = path.strip_prefix("/cdn/").and_then(|file| Some((file, self.content(file)?))) {
            let start = range.as_deref().map_or(0, |range| {
                range.strip_suffix('-').and_then(|start| start.parse().ok()).expect("the range is a number and a hyphen")
            });
            let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
            let headers = format!("etag: \"{0}\"\r\nx-repo-commit: {0}\r\n", self.tag);
            let mut part = content[start..].to_vec();
            if self.corrupted == Some(name) && start == 0 {
                part[0] ^= 1;
            }
            (format!("{status}\r\n{headers}"), part)
        } else {
            ("404 Not Found\r\n".to_owned(), Vec::new())
        };
        let interrupted =
            body.len() > 1000 && self.interrupted.try_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
        // Without a content length, an interruption looks like the end of the file, so only the client's own check can detect it.
        let length = if interrupted || self.is_endless { String::new() } else { format!("content-length: {}\r\n", body.len()) };
        let body = if interrupted { &body[..body.len() / 2] } else { &body[..] };
        let mut answer = format!("HTTP/1.1 {head}{length}connection: close\r\n\r\n").into_bytes();
        answer.extend(body);
        // Writing fails if the client has disconnected, which is no error of the test.
        let _ = stream.write_all(&answer);
        while self.is_endless && path.starts_with("/cdn/") && stream.write_all(&[0; 1 << 16]).is_ok() {}
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read(&mut [0; 64]);
    }
}

#[test]
fn stored_file_is_found_without_the_hub() {
    let model = gguf(50_000);
    let (machine, hub) = Hub::start(&["README.md", "gguf/Tiny.Q4_0.gguf"], model.clone(), 0);
    let fetched = machine.bare_store().get(&source("hf:org/name")).expect("the hub serves the model");
    assert_eq!(fetched.id, "Tiny");
    assert_eq!(fs::read(&fetched.path).expect("the file is stored"), model);
    assert_eq!(machine.stored_files(), std::slice::from_ref(&fetched.path));
    let requests = hub.requests.load(Ordering::SeqCst);
    assert_eq!(machine.bare_store().get(&source("hf:org/name/gguf/Tiny.Q4_0.gguf")).expect("the model is stored"), fetched);
    assert_eq!(machine.bare_store().get(&source("hf:org/name")).expect("the model is stored"), fetched);
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
    let fetched = machine.bare_store().get(&source("hf:org/name")).expect("the hub serves the model");
    assert_eq!(fetched.id, "name");
    let wanted = &files[1..7];
    assert_eq!(fetched.bytes, wanted.iter().map(|(_, content)| content.len() as u64).sum::<u64>());
    for (name, content) in wanted {
        assert!(fs::read(fetched.path.join(name)).expect("the file is stored") == *content, "{name}");
    }
    assert_eq!(machine.stored_files().len(), wanted.len(), "{:?}", machine.stored_files());
    let requests = hub.requests.load(Ordering::SeqCst);
    assert_eq!(machine.bare_store().get(&source("hf:org/name")).expect("the model is stored"), fetched);
    assert_eq!(hub.requests.load(Ordering::SeqCst), requests);
    assert_eq!(machine.bare_store().list().expect("the store is readable"), [fetched]);
}

#[test]
fn incomplete_model_directory_is_not_stored() {
    let files = |index: &str| {
        vec![
            ("config.json", b"{}".to_vec()),
            ("tokenizer.json", b"{ }".to_vec()),
            ("model.safetensors.index.json", index.as_bytes().to_vec()),
        ]
    };
    for (index, expected) in [
        (r#"{"weight_map":{"a":"model-1-of-1.safetensors"}}"#, "has no file model-1-of-1.safetensors"),
        (r#"{"weight_map":{"a":"../../model.safetensors"}}"#, "the list of the weights"),
        ("{}", "the list of the weights"),
    ] {
        let (machine, _hub) = Hub::serve(files(index), 0);
        let error = machine.bare_store().get(&source("hf:org/name")).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(machine.stored_files(), [] as [PathBuf; 0]);
    }
    let (machine, _hub) = Hub::start(&["config.json", "tokenizer.json", "model.safetensors"], gguf(50_000), usize::MAX);
    machine.bare_store().get(&source("hf:org/name")).expect_err("every download is interrupted");
    assert_eq!(machine.stored_files(), [] as [PathBuf; 0]);
    assert_eq!(machine.bare_store().list().expect("the store is readable"), []);
}

#[test]
fn interrupted_download_is_not_stored() {
    let (machine, _hub) = Hub::start(&["a.gguf"], gguf(50_000), usize::MAX);
    let error = machine.bare_store().get(&source("hf:org/name/a.gguf")).expect_err("every download is interrupted");
    assert!(matches!(error, ModelStoreError::WrongSize { .. } | ModelStoreError::Hub { .. }), "{error:?}");
    assert_eq!(machine.stored_files(), [] as [PathBuf; 0]);
}

#[test]
fn interrupted_download_is_resumed_where_it_stopped() {
    let model = gguf(50_000);
    let (machine, hub) = Hub::start(&["a.gguf"], model.clone(), 2);
    let fetched = machine.bare_store().get(&source("hf:org/name/a.gguf")).expect("the third answer is complete");
    assert!(fs::read(&fetched.path).expect("the file is stored") == model);
    assert_eq!(hub.interrupted.load(Ordering::SeqCst), 0);
}

#[test]
fn headers_of_a_hostile_hub_do_not_determine_any_path() {
    let victim = tempfile::tempdir().expect("the system can create a temporary folder");
    let existing = victim.path().join("existing");
    fs::write(&existing, "mine").expect("the folder is writable");
    let absolute = existing.to_str().expect("the path is UTF-8").to_owned();
    let model = gguf(5_000);
    for tag in [absolute, "../../../../planted".to_owned(), String::new(), "..".to_owned(), "a\\b".to_owned()] {
        for corrupted in [None, Some("a.gguf")] {
            let (machine, _hub) = Hub { tag: tag.clone(), corrupted, ..Hub::of(vec![("a.gguf", model.clone())]) }.run();
            let stored = machine.bare_store().get(&source("hf:org/name")).map(|fetched| fetched.path);
            assert_eq!(stored.is_err(), corrupted.is_some(), "{tag}: {stored:?}");
            assert_eq!(machine.stored_files(), stored.into_iter().collect::<Vec<_>>(), "{tag}");
            let entries = fs::read_dir(machine.path("")).expect("the folder is readable");
            assert_eq!(entries.count(), 1, "{tag}: nothing is outside the folder of models");
            assert_eq!(fs::read_to_string(&existing).expect("the file is readable"), "mine", "{tag}");
        }
    }
}

#[test]
fn commit_that_is_a_path_is_refused() {
    for commit in [
        "../../../planted",
        "/planted",
        "",
        "11111111111111111111111111111111111111/.",
        "111111111111111111111111111111111111/../",
    ] {
        let (machine, _hub) = Hub { commit: Some(commit), ..Hub::of(vec![("a.gguf", gguf(10))]) }.run();
        let error = machine.bare_store().get(&source("hf:org/name")).expect_err(commit);
        assert!(matches!(error, ModelStoreError::WrongCommit { .. }), "{commit}: {error:?}");
        assert_eq!(machine.stored_files(), [] as [PathBuf; 0], "{commit}");
    }
}

#[test]
fn endless_file_is_refused_at_its_listed_size() {
    let (machine, hub) = Hub { is_endless: true, ..Hub::of(vec![("a.gguf", gguf(5_000))]) }.run();
    let error = machine.bare_store().get(&source("hf:org/name")).expect_err("the file has no end");
    assert!(matches!(error, ModelStoreError::TooLong { expected: 5_004, .. }), "{error:?}");
    assert_eq!(machine.stored_files(), [] as [PathBuf; 0]);
    assert_eq!(hub.requests.load(Ordering::SeqCst), 3, "the download is not tried again");
}

#[test]
fn file_that_the_hub_lacks_is_reported() {
    let (machine, _hub) = Hub::start(&["a.gguf", "b.gguf"], gguf(10), 0);
    for (name, expected) in [
        ("hf:org/name", "several .gguf files (a.gguf, b.gguf)"),
        ("hf:org/name/c.gguf", "hf:org/name/c.gguf has no file c.gguf"),
        ("hf:org/name@v2/a.gguf", "404"),
        ("hf:org/other", "404"),
    ] {
        let error = error_chain(&machine.bare_store().get(&source(name)).expect_err(name));
        assert!(error.contains(expected), "{error}");
    }
    let (machine, _hub) = Hub::start(&["model.safetensors"], Vec::new(), 0);
    let error =
        machine.bare_store().get(&source("hf:org/name")).expect_err("a repository without a GGUF file is refused").to_string();
    assert!(error.contains("hf:org/name holds no .gguf file"), "{error}");
}

#[test]
fn hub_revision_is_resolved_to_a_commit_and_stored_separately() {
    let (machine, hub) = Hub::start(&["a.gguf"], gguf(5_000), 0);
    let store = machine.bare_store();
    let [(_, main), (_, tagged)] = COMMITS;
    for (name, commit) in [("hf:org/name", main), ("hf:org/name@v1/a.gguf", tagged), (&format!("hf:org/name@{tagged}"), tagged)] {
        let fetched = store.get(&source(name)).expect("the hub serves the model");
        assert!(fetched.path.ends_with(Path::new(commit).join("a.gguf")), "{name}: {}", fetched.path.display());
        let requests = hub.requests.load(Ordering::SeqCst);
        assert_eq!(store.get(&source(name)).expect("the model is stored"), fetched);
        assert_eq!(hub.requests.load(Ordering::SeqCst), requests, "{name} is fetched once");
    }
    assert_eq!(machine.stored_files().len(), 3);
}

#[test]
fn file_that_differs_from_the_hubs_hash_is_not_kept() {
    let (weights, json) = (gguf(5_000), b"{}".to_vec());
    let directory =
        || vec![("config.json", json.clone()), ("tokenizer.json", b"{ }".to_vec()), ("model.safetensors", weights.clone())];
    for (files, corrupted) in
        [(vec![("a.gguf", weights.clone())], "a.gguf"), (directory(), "model.safetensors"), (directory(), "tokenizer.json")]
    {
        let hub = Hub { corrupted: Some(corrupted), ..Hub::of(files.clone()) };
        let (machine, _hub) = hub.run();
        let error = machine.bare_store().get(&source("hf:org/name")).expect_err(corrupted);
        assert!(matches!(&error, ModelStoreError::WrongHash { name, .. } if name == corrupted), "{error:?}");
        assert_eq!(machine.stored_files(), [] as [PathBuf; 0], "{corrupted}");

        let hub = Hub { unhashed: Some(corrupted), ..Hub::of(files) };
        let (machine, _hub) = hub.run();
        let error = machine.bare_store().get(&source("hf:org/name")).expect_err(corrupted);
        assert!(matches!(&error, ModelStoreError::NoHash { name, .. } if name == corrupted), "{error:?}");
        assert_eq!(machine.stored_files(), [] as [PathBuf; 0], "{corrupted}");
    }
}

#[test]
fn file_name_outside_the_store_is_refused() {
    let (machine, _hub) = Hub::start(&["../../../planted.gguf"], gguf(10), 0);
    let error = machine.bare_store().get(&source("hf:org/name")).expect_err("the store has no other model");
    assert!(matches!(error, ModelStoreError::NoModel(_)), "{error:?}");
    assert_eq!(machine.stored_files(), [] as [PathBuf; 0]);
}

#[test]
fn token_is_not_sent_over_an_unencrypted_connection() {
    let (machine, hub) = Hub::start(&["a.gguf"], gguf(10), 0);
    let mut settings = machine.settings();
    settings.hf_token = Some("hidden".to_owned().into());
    let error = Store::new(settings)
        .expect("the directory is set")
        .get(&source("hf:org/name"))
        .expect_err("a hub address with http is refused");
    assert!(matches!(error, ModelStoreError::TokenInClear(_)) && !error.to_string().contains("hidden"), "{error:?}");
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
    assert!(!machine.path("models").exists(), "an offline store creates no folder");
    let fetched = machine.bare_store().get(&source("hf:org/name")).expect("the hub serves the model");
    assert_eq!(offline().get(&source("hf:org/name")).expect("the model is stored"), fetched);
}
