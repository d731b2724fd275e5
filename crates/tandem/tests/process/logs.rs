//! Tests that each role serves, rejoins and drains even if its logs cannot be written.

use crate::{
    cluster::{Plan, address, ready, series, until},
    talk::chat,
    up::{Up, tandem},
};
use std::{fs::File, io::Write, process::Stdio};

const LOG: [&str; 2] = ["--log", "debug"];

fn drains(process: Up) {
    process.signal("-TERM");
    assert_eq!(process.wait().0.code(), Some(0));
}

/// Starts `up` and each role with this stdout and stderr, and restarts a worker and the router. `loses` says whether log lines are lost.
fn served_with(output: fn() -> Stdio, loses: bool) {
    let at = address();
    let listen = at.to_string();
    let up = Up::unread(tandem(&["up", "--engine", "sim", "--listen", &listen]).args(LOG).stdout(output()).stderr(output()), at);

    let plan = Plan::new().with_output(output);
    let [prefill, decode] = [address(), address()];
    plan.list(&[prefill, decode]);
    let routers = plan.router_list();
    let frontend = [&["--engine", "sim", "--router", &routers], &LOG[..]].concat();
    let frontend = plan.start("frontend", "frontend", address(), &frontend);
    let router = plan.router(&LOG);
    let worker = || plan.worker("prefill", "p", prefill, &LOG);
    let (prefill, decode) = (worker(), plan.worker("decode", "d", decode, &LOG));
    let instance = plan.joined_after("p", "");
    prefill.signal("-KILL");
    prefill.wait();
    let prefill = worker();
    plan.joined_after("p", &instance);
    router.signal("-KILL");
    router.wait();
    let router = plan.router(&LOG);
    plan.joined(&["d", "p"]);
    for frontend in [&up, &frontend] {
        ready(frontend);
        chat(frontend, "the answer is complete");
        until("lost lines are counted", || series(frontend, "tandem_log_lines_lost_total"), |lost| (*lost > 0.0) == loses);
    }
    [up, frontend, router, prefill, decode].into_iter().for_each(drains);
}

#[cfg(target_os = "linux")]
#[test]
fn processes_serve_while_the_disk_of_their_logs_is_full() {
    served_with(|| File::options().write(true).open("/dev/full").expect("Linux has this device").into(), true);
}

#[test]
fn processes_serve_while_nothing_reads_their_logs() {
    served_with(Stdio::piped, true);
}

#[test]
fn processes_serve_while_the_reader_of_their_logs_stalls() {
    served_with(
        || {
            let (reader, mut writer) = std::io::pipe().expect("the system can create a pipe");
            // The pipe has little space left, and no process reads from it.
            writer.write_all(&[b' '; 60 << 10]).expect("a pipe of Linux holds 64 KiB");
            std::mem::forget(reader);
            writer.into()
        },
        false,
    );
}
