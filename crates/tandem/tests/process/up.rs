//! A running process of the binary: `tandem up`, or one of the roles.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, ExitStatus, Stdio},
};

/// Returns a command that runs the binary without `TANDEM_` variables. It finds the clusters that other tests started, but none of the
/// user's.
pub fn tandem(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TANDEM_")) {
        command.env_remove(name);
    }
    command.env("XDG_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub struct Up {
    process: Child,
    /// The text that the process printed when it was ready.
    pub introduction: String,
}

impl Up {
    pub fn spawn(args: &[&str], stderr: impl Into<Stdio>) -> Self {
        let mut command = tandem(args);
        command.stderr(stderr);
        Self::of(&mut command)
    }

    pub fn of(command: &mut Command) -> Self {
        let mut process = command.spawn().expect("the binary runs");
        let mut stdout = BufReader::new(process.stdout.take().expect("stdout is piped"));
        let mut introduction = String::new();
        while !introduction.contains("Ctrl-C") {
            let read = stdout.read_line(&mut introduction).expect("the binary writes text");
            assert_ne!(read, 0, "the process ended early: {introduction}");
        }
        // The pipe stays open.
        process.stdout = Some(stdout.into_inner());
        Self { process, introduction }
    }

    /// Starts a process whose output the test does not read. If it is piped, the pipe is closed.
    pub fn unread(command: &mut Command, at: SocketAddr) -> Self {
        let mut process = command.spawn().expect("the binary runs");
        drop((process.stdout.take(), process.stderr.take()));
        Self { process, introduction: format!("http://{at}") }
    }

    /// Returns the address in the first URL of the introduction: that of the OpenAI API, or else that of the admin endpoint.
    pub fn address(&self) -> &str {
        self.introduction
            .split("http://")
            .nth(1)
            .and_then(|rest| rest.split_whitespace().next())
            .expect("the introduction has a URL")
    }

    pub fn get(&self, path: &str) -> String {
        let mut answer = String::new();
        let mut stream = TcpStream::connect(self.address()).expect("the server listens");
        write!(stream, "GET {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n", self.address())
            .expect("the process reads");
        stream.read_to_string(&mut answer).expect("the answer is UTF-8");
        answer
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn signal(&self, signal: &str) {
        let id = self.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().expect("kill runs").success());
    }

    /// Waits until the process has ended. Returns the exit status, and the text on stderr if stderr is a pipe.
    pub fn wait(mut self) -> (ExitStatus, String) {
        let status = self.process.wait().expect("the process is a child of this one");
        let mut errors = String::new();
        if let Some(mut stderr) = self.process.stderr.take() {
            stderr.read_to_string(&mut errors).expect("the output is UTF-8");
        }
        (status, errors)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // Killing fails if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
