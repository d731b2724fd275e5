//! `tandem key`: edits the file with the API keys of frontends.

use crate::text_table::text_table;
use anyhow::{Context, Result, anyhow, ensure};
use clap::{Args, Subcommand};
use std::{
    fs::{self, File},
    io::{IsTerminal, Write, stdout},
    num::NonZeroU32,
    os::unix::fs::{MetadataExt, fchown},
    path::{Path, PathBuf},
};
use tandem_frontend::{ApiKey, ApiKeyFile, KeyCache};

/// `tandem key`
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a key and add it to the file, which is created if there is none. The key is printed once; the file has only its hash
    Add(AddArgs),
    /// Print the names, accounts and limits of all keys
    List {
        /// The file with the API keys
        #[command(flatten)]
        file: KeyFile,
    },
    /// Remove a key from the file. Frontends refuse it within seconds; answers that have begun continue
    Revoke {
        /// The key's name
        name: String,
        /// The file with the API keys
        #[command(flatten)]
        file: KeyFile,
    },
}

/// The file that frontends read.
#[derive(Args, Clone, Debug)]
pub struct KeyFile {
    /// The file with the API keys, as in --api-keys-file of frontends
    #[arg(long = "api-keys-file", env = "TANDEM_API_KEYS_FILE", value_name = "FILE")]
    path: PathBuf,
}

/// The arguments of `tandem key add`.
#[derive(Args, Debug)]
pub struct AddArgs {
    /// A name of the key, for the audit log and for `tandem key revoke`
    name: String,
    #[command(flatten)]
    file: KeyFile,
    /// Account for which requests with the key are counted. Keys of one account share cached KV [default: the key's name]
    #[arg(long, value_name = "NAME")]
    account: Option<String>,
    /// How many requests a minute the key may send, on each frontend [default: no limit]
    #[arg(long, value_name = "N")]
    requests_per_minute: Option<NonZeroU32>,
    /// How many tokens of prompts and answers a minute the key may use, on each frontend [default: no limit]
    #[arg(long, value_name = "N")]
    tokens_per_minute: Option<NonZeroU32>,
    /// How many sequences (prompts × n) of the key may run at once, on each frontend [default: only the frontend's own limits]
    #[arg(long, value_name = "N")]
    max_sequences: Option<NonZeroU32>,
    /// Priority of the key's requests, and the best one for which they may ask. Lower values are served earlier, also among the requests of other
    /// keys and accounts [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    priority: Option<i32>,
    /// The models that the key may use, separated by commas [default: all]
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    models: Vec<String>,
    /// Give the key a prefix cache of its own, even if the frontend or the account shares one
    #[arg(long)]
    own_cache: bool,
}

/// Runs the command, and returns its output.
///
/// # Errors
/// The file cannot be read or written, or has a mistake; the name is in use, or unknown.
pub fn run(command: KeyCommand) -> Result<String> {
    match command {
        KeyCommand::Add(args) => {
            let path = args.file.path.clone();
            let secret = edit(&path, |file| add(file, args))?;
            if stdout().is_terminal() {
                return Ok(format!(
                    "{secret}\n\nThis is the only time that the key is shown: {} has only its hash.\n",
                    path.display()
                ));
            }
            Ok(secret + "\n")
        }
        KeyCommand::List { file } => Ok(list(&ApiKeyFile::read(&file.path)?)),
        KeyCommand::Revoke { name, file } => {
            // A file that does not exist would be created.
            ApiKeyFile::read(&file.path)?;
            edit(&file.path, |keys| {
                let before = keys.keys.len();
                keys.keys.retain(|key| key.name != name);
                let path = file.path.display();
                ensure!(
                    keys.keys.len() < before,
                    "there is no key with the name {name}; `tandem key list --api-keys-file {path}` prints the names"
                );
                Ok(())
            })?;
            Ok(format!("{name} is revoked\n"))
        }
    }
}

fn add(file: &mut ApiKeyFile, args: AddArgs) -> Result<String> {
    let is_new = file.keys.iter().all(|key| key.name != args.name);
    ensure!(
        is_new,
        "there is a key with the name {0} already; choose another name, or first run: tandem key revoke {0} --api-keys-file {1}",
        args.name,
        args.file.path.display()
    );
    let AddArgs { name, account, requests_per_minute, tokens_per_minute, max_sequences, priority, models, own_cache, file: _ } =
        args;
    let secret = file.add(|sha256| ApiKey {
        name,
        sha256,
        created: Some(jiff::Timestamp::now().strftime("%F").to_string()),
        account,
        requests_per_minute,
        tokens_per_minute,
        max_sequences,
        priority,
        models,
        cache: if own_cache { KeyCache::Key } else { KeyCache::Account },
    });
    let secret = secret.map_err(|problem| anyhow!("the key cannot be added: {problem}"))?;
    Ok(secret.expose())
}

fn list(file: &ApiKeyFile) -> String {
    let head = ["name", "account", "created", "requests/min", "tokens/min", "sequences", "priority", "cache", "models"];
    let mut rows: Vec<Vec<String>> = vec![head.map(str::to_owned).to_vec()];
    for key in &file.keys {
        let limit = |limit: Option<NonZeroU32>| limit.map_or("-".to_owned(), |limit| limit.to_string());
        let models = if key.models.is_empty() { "all".to_owned() } else { key.models.join(",") };
        let cache = match key.cache {
            KeyCache::Account => "account",
            KeyCache::Key => "own",
        };
        rows.push(vec![
            key.name.clone(),
            key.account().to_owned(),
            key.created.clone().unwrap_or_else(|| "-".to_owned()),
            limit(key.requests_per_minute),
            limit(key.tokens_per_minute),
            limit(key.max_sequences),
            key.priority.unwrap_or(0).to_string(),
            cache.to_owned(),
            models,
        ]);
    }
    text_table(rows, 9)
}

/// Reads the file, changes it, and replaces it atomically, so that a frontend reads the old or the new file. A missing file has no keys. The
/// folder is locked meanwhile, so that no change is lost if two programs edit the file at once.
fn edit<T>(path: &Path, change: impl FnOnce(&mut ApiKeyFile) -> Result<T>) -> Result<T> {
    // The file that a symbolic link names is replaced, not the link.
    let path = &path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let folder = match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => Path::new("/"),
    };
    let lock = File::open(folder).with_context(|| format!("the folder {} cannot be opened", folder.display()))?;
    lock.lock().with_context(|| format!("the folder {} cannot be locked", folder.display()))?;
    let exists = path.try_exists().with_context(|| format!("{} cannot be read", path.display()))?;
    let before = exists.then(|| fs::metadata(path)).transpose()?;
    let mut file = if exists { ApiKeyFile::read(path)? } else { ApiKeyFile::default() };
    let result = change(&mut file)?;
    write(folder, path, &file.to_toml(), before).with_context(|| format!("{} cannot be written", path.display()))?;
    Ok(result)
}

/// Replaces the file. A new file can be read only by its owner. An existing one keeps its owner and permissions, because a frontend of
/// another user that could not read it would not notice that a key is revoked.
fn write(folder: &Path, path: &Path, text: &str, before: Option<fs::Metadata>) -> Result<()> {
    const HEADING: &str = "# API keys of Tandem's frontends. `tandem key` edits this file; comments are not kept.\n\n";
    let mut new = tempfile::NamedTempFile::new_in(folder)?;
    write!(new, "{HEADING}{text}")?;
    if let Some(before) = before {
        let now = new.as_file().metadata()?;
        if (before.uid(), before.gid()) != (now.uid(), now.gid()) {
            fchown(new.as_file(), Some(before.uid()), Some(before.gid())).context("the owner of the file cannot be kept")?;
        }
        new.as_file().set_permissions(before.permissions())?;
    }
    new.as_file().sync_all()?;
    new.persist(path)?;
    File::open(folder)?.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use std::{ffi::OsString, os::unix::fs::PermissionsExt};

    fn key(path: &Path, args: &[&str]) -> Result<String> {
        let path = path.to_str().expect("the path is UTF-8");
        let args = [&["tandem", "key"], args, &["--api-keys-file", path]].concat();
        match Cli::read(args.iter().map(OsString::from).collect(), None)?.command {
            Command::Key { command } => run(command),
            other => unreachable!("the command is key: {other:?}"),
        }
    }

    #[test]
    fn keys_are_added_listed_and_revoked() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("keys.toml");
        let secret = key(&path, &["add", "alice"]).expect("the file is created");
        assert!(secret.starts_with("sk-tandem-") && secret.trim_end().len() == 74, "{secret}");
        let limits = "add bob --account acme --requests-per-minute 60 --tokens-per-minute 9000 --max-sequences 4 --priority -5 --models a,b --own-cache";
        key(&path, &limits.split(' ').collect::<Vec<_>>()).expect("the name is free");
        let text = fs::read_to_string(&path).expect("the file exists");
        assert!(!text.contains(&secret.trim()["sk-tandem-".len()..]), "{text}");
        let listed = key(&path, &["list"]).expect("the file is valid");
        let row = |name: &str| listed.lines().find(|line| line.starts_with(name)).map(|line| line.split_whitespace().collect());
        let bob: Vec<&str> = row("bob").expect("bob is listed");
        assert_eq!((&bob[..2], &bob[3..]), (&["bob", "acme"][..], &["60", "9000", "4", "-5", "own", "a,b"][..]), "{listed}");
        let alice: Vec<&str> = row("alice").expect("alice is listed");
        assert_eq!(
            (&alice[..2], &alice[3..]),
            (&["alice", "alice"][..], &["-", "-", "-", "0", "account", "all"][..]),
            "{listed}"
        );
        assert!(
            key(&path, &["add", "bob"]).is_err_and(|error| error.to_string().contains("tandem key revoke bob --api-keys-file /"))
        );
        key(&path, &["revoke", "alice"]).expect("alice is a key");
        assert!(key(&path, &["revoke", "alice"]).is_err_and(|error| error.to_string().contains("no key with the name alice")));
        assert!(!key(&path, &["list"]).expect("the file is valid").contains("alice"));
    }

    #[test]
    fn new_key_file_is_private_and_an_existing_file_keeps_its_permissions_and_its_link() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("keys.toml");
        let mode = || fs::metadata(&path).expect("the file exists").permissions().mode() & 0o777;
        key(&path, &["add", "a"]).expect("the file is created");
        assert_eq!(mode(), 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("the test owns the file");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("the folder is writable");
        key(&link, &["add", "b"]).expect("the file is writable");
        assert_eq!(mode(), 0o640);
        assert!(fs::symlink_metadata(&link).expect("the link exists").is_symlink());
        assert_eq!(ApiKeyFile::read(&path).expect("the file is valid").keys.len(), 2);
        assert_eq!(fs::read_dir(folder.path()).expect("the folder is readable").count(), 2, "no temporary file is left");
    }

    #[test]
    fn key_file_with_a_mistake_is_not_changed() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("keys.toml");
        fs::write(&path, "[[key]]\nname = 7\n").expect("the folder is writable");
        let error = key(&path, &["add", "a"]).expect_err("the file is invalid").to_string();
        assert!(error.contains("keys.toml") && error.contains("line 2"), "{error}");
        assert_eq!(fs::read_to_string(&path).expect("the file exists"), "[[key]]\nname = 7\n");
    }
}
