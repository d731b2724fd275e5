//! Logs that cannot be written: the process serves and drains as with logs.

use crate::{
    cluster::{address, until},
    up::tandem,
};
use std::{
    fs::File,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
};

struct Up(Child);

impl Drop for Up {
    fn drop(&mut self) {
        // Fails after `drains`, which is the end of the process.
        let _ = self.0.kill();
    }
}

fn up(at: SocketAddr, stdout: Stdio, stderr: Stdio) -> Up {
    let at = at.to_string();
    let mut up = tandem(&["up", "--engine", "sim", "--listen", &at, "--log", "debug"]);
    Up(up.stdout(stdout).stderr(stderr).spawn().expect("the binary runs"))
}

fn is_ready(at: SocketAddr) -> bool {
    let Ok(mut stream) = TcpStream::connect(at) else { return false };
    let mut answer = String::new();
    let asked = write!(stream, "GET /ready HTTP/1.1\r\nhost: {at}\r\nconnection: close\r\n\r\n");
    asked.and_then(|()| stream.read_to_string(&mut answer)).is_ok() && answer.starts_with("HTTP/1.1 200")
}

fn drains(mut up: Up) {
    assert!(Command::new("kill").args(["-TERM", &up.0.id().to_string()]).status().expect("kill runs").success());
    assert_eq!(up.0.wait().expect("the process is a child of this one").code(), Some(0));
}

#[cfg(target_os = "linux")]
#[test]
fn full_disk_of_the_logs_changes_nothing() {
    let full = || Stdio::from(File::options().write(true).open("/dev/full").expect("Linux has this device"));
    let at = address();
    let up = up(at, full(), full());
    until("the process is ready", || is_ready(at), |ready| *ready);
    drains(up);
}

#[test]
fn logs_without_a_reader_change_nothing() {
    let at = address();
    let mut up = up(at, Stdio::null(), Stdio::piped());
    drop(up.0.stderr.take());
    until("the process is ready", || is_ready(at), |ready| *ready);
    drains(up);
}
