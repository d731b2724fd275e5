//! Commands that name no server find the cluster that `tandem up` runs for the same user.

use crate::{
    cluster::until,
    up::{Up, tandem},
};
use std::{
    fs,
    io::Write,
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A user with a runtime folder and a state folder of its own.
struct User(tempfile::TempDir);

impl User {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("the system can create a temporary folder"))
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = tandem(args);
        command.env("XDG_RUNTIME_DIR", self.0.path().join("run")).env("XDG_STATE_HOME", self.0.path().join("state"));
        command
    }

    fn up(&self, args: &[&str]) -> Up {
        Up::of(
            self.command(&[&["up", "--engine", "sim", "--sim-speedup", "50", "--listen", "127.0.0.1:0"], args].concat())
                .stderr(Stdio::null()),
        )
    }

    /// Runs a command. Returns its exit code and its output.
    fn run(&self, args: &[&str]) -> (Option<i32>, String) {
        let output = self.command(args).output().expect("the binary runs");
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).expect("the output is UTF-8"))
    }

    fn top(&self, args: &[&str]) -> (Option<i32>, String) {
        self.run(&[&["top", "--once", "--interval", "0.1"], args].concat())
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.path().join("run/tandem")).expect("`up` has made the folder");
        entries.flatten().map(|entry| entry.path()).collect()
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("the file belongs to this user");
}

#[test]
fn commands_without_a_server_find_the_only_cluster_of_their_user() {
    let user = User::new();
    // Another user of this machine may run a cluster on the default port.
    if TcpStream::connect("127.0.0.1:8000").is_err() {
        let (code, nothing) = user.run(&["route", "explain", "--prompt", "x"]);
        assert!(
            code == Some(1) && nothing.contains("you run no `tandem up`") && nothing.contains("start `tandem up`, or name"),
            "{nothing}"
        );
    }

    let one = user.up(&[]);
    assert!(one.introduction.contains(&format!("\n  tandem top http://{}\n", one.address())), "{}", one.introduction);
    let (code, table) = user.top(&[]);
    assert!(code == Some(0) && table.starts_with("tandem serves sim: 3 of 3 workers"), "{table}");
    assert_eq!(user.run(&["ready"]), (Some(0), String::new()));
    let (code, explained) = user.run(&["route", "explain", "--prompt", "x"]);
    assert!(code == Some(0) && explained.contains("decode-0 does both"), "{explained}");
    let mut chat = user.command(&["chat", "--max-tokens", "5"]).stdin(Stdio::piped()).spawn().expect("the binary runs");
    chat.stdin.take().expect("stdin is piped").write_all(b"Hello\n").expect("the program reads its messages");
    let chat = chat.wait_with_output().expect("the program ends");
    assert!(chat.status.success() && String::from_utf8_lossy(&chat.stdout).contains(" tokens"), "{chat:?}");
    let trace = user.0.path().join("trace.jsonl");
    fs::write(&trace, r#"{"timestamp": 0, "input_length": 50, "output_length": 4, "hash_ids": [1]}"#)
        .expect("the folder is writable");
    let (code, report) = user.run(&["bench", "replay", trace.to_str().expect("the path is UTF-8")]);
    assert!(code == Some(0) && report.contains("1 answered"), "{report}");

    // With two clusters, the server has to be named; the key is found with it.
    let two = user.up(&[]);
    for command in [&["top"][..], &["ready"], &["chat"], &["why", "x"], &["route", "explain", "--prompt", "x"]] {
        let (code, error) = user.run(command);
        assert!(code == Some(1) && error.contains(one.address()) && error.contains(two.address()), "{command:?}: {error}");
        assert!(error.contains("name one, such as: tandem ") && error.lines().count() == 1, "{error}");
    }
    assert!(user.run(&["why", "x"]).1.contains("such as: tandem why REQUEST-ID http://"));
    let (code, error) = user.run(&["ready", &format!("http://{}/foo", one.address())]);
    assert!(code == Some(1) && error.contains("/foo is no path of the frontend"), "{error}");
    let router = one.introduction.lines().find_map(|line| line.trim().strip_prefix("router ")).expect("it is printed").trim();
    let localhost = one.address().replace("127.0.0.1", "localhost");
    for named in [one.address(), router, two.address(), &localhost] {
        let (code, table) = user.top(&[named]);
        assert!(code == Some(0) && table.contains("3 of 3 workers"), "{table}");
    }
    one.signal("-TERM");
    assert_eq!(one.wait().0.code(), Some(0));
    assert_eq!((user.top(&[]).0, user.files().len()), (Some(0), 1), "a process that ends removes its file");

    // Another user does not find it.
    let (code, error) = User::new().top(&[two.address()]);
    assert!(code == Some(1) && error.contains("is a frontend"), "{error}");
}

#[test]
fn cluster_on_all_addresses_is_found_by_any_address_of_its_host() {
    let user = User::new();
    let up = user.up(&["--listen", "0.0.0.0:0"]);
    let port = up.address().rsplit_once(':').expect("it has a port").1;
    // A documentation address (RFC 5737) belongs to no host.
    for (host, is_own) in [("0.0.0.0", true), ("127.0.0.7", true), ("192.0.2.1", false)] {
        let (code, table) = user.top(&[&format!("{host}:{port}")]);
        assert_eq!((code == Some(0) && table.contains("3 of 3 workers"), code == Some(1)), (is_own, !is_own), "{host}: {table}");
    }
}

#[test]
fn file_of_a_killed_cluster_is_removed_and_a_file_that_other_users_may_read_is_refused() {
    let user = User::new();
    let killed = user.up(&[]);
    killed.signal("-KILL");
    killed.wait();
    assert_eq!(user.files().len(), 1, "a killed process leaves its file");
    user.top(&[]);
    assert_eq!(user.files().len(), 0, "its lock is free, so the file is removed");

    let up = user.up(&[]);
    let [file] = &user.files()[..] else { panic!("there is one file") };
    set_mode(file, 0o644);
    let (code, error) = user.run(&["top"]);
    assert!(code == Some(1) && error.contains("other users have access"), "{error}");
    set_mode(file, 0o600);
    assert_eq!(user.top(&[]).0, Some(0));
    drop(up);

    // A folder that other users can read is not used: the state folder takes its place.
    let folder = user.0.path().join("run/tandem");
    set_mode(&folder, 0o755);
    let _up = user.up(&[]);
    assert_eq!(user.top(&[]).0, Some(0));
    assert!(user.0.path().join("state/tandem").exists());
}

#[test]
fn cluster_that_starts_is_found_and_waited_for() {
    let user = User::new();
    let args = ["up", "--engine", "llama-cpp", "--engine-url", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"];
    let mut up = user.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary runs");
    until("the cluster has its file", || user.0.path().join("run/tandem").exists() && user.files().len() == 1, |has| *has);
    let (code, error) = user.run(&["ready"]);
    assert!(code == Some(1) && error.contains("not ready: "), "{error}");
    up.kill().expect("the process runs");
    up.wait().expect("the process is a child of this one");
}
