//! Tests of the cluster key: processes without it are refused, and operators see messages and warnings about it.

use crate::{
    cluster::{Plan, SECRET, address, ready, until},
    talk::{chat, chat_body, metric},
    up::{Up, tandem},
};
use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
};

fn run(args: &[&str]) -> (Option<i32>, String) {
    let output = tandem(args).output().expect("the binary runs");
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).expect("the output is UTF-8"))
}

#[test]
fn processes_without_the_cluster_key_are_refused_with_advice() {
    let plan = Plan::new();
    plan.secret("other-key", "the secret of another cluster altogether");
    let other = plan.file("other-key");
    let other = ["--cluster-key-file", other.to_str().expect("the path is UTF-8")];
    let [prefill, decode, stranger, keyless] = [(); 4].map(|()| address());
    plan.list(&[prefill, decode, stranger, keyless]);
    let router = plan.router(&[]);
    let worker = ["--engine", "sim", "--sim-speedup", "20", "--admin-listen", "127.0.0.1:0", "--worker-id"];
    let _workers = [
        plan.worker("prefill", "p", prefill, &[]),
        plan.worker("decode", "d", decode, &[]),
        plan.worker("decode", "s", stranger, &other),
        plan.start_without_key("decode-worker", "k", keyless, &[&worker[..], &["k"]].concat()),
    ];
    plan.joined(&["d", "p"]);
    let absent =
        |view: &tandem_proto::v1::WorkersReply| view.unavailable.iter().filter(|worker| worker.incompatible).count() == 2;
    let view = until("both workers without the cluster key are refused", || plan.view(), absent);
    for worker in &view.unavailable {
        assert!(worker.reason.contains("give all processes the same --cluster-key-file"), "{}", worker.reason);
    }

    let keyless = plan.start_without_key(
        "frontend",
        "keyless",
        ([127, 0, 0, 1], 0).into(),
        &["--engine", "sim", "--router", &plan.router_list()],
    );
    for frontend in [plan.frontend(&other), keyless] {
        let unready = frontend.get("/ready");
        assert!(unready.starts_with("HTTP/1.1 503") && unready.contains("--cluster-key-file"), "{unready}");
        let refused = frontend.answer("/v1/chat/completions", &chat_body("hello", 8, false));
        assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("cluster_mismatch"), "{refused}");
    }
    assert!(metric(&router, "tandem_router_unauthenticated_total").is_some_and(|refused| refused >= 2.0));

    let frontend = plan.frontend(&[]);
    ready(&frontend);
    chat(&frontend, "hello");

    let (router_address, key) = (plan.routers[0].to_string(), plan.file("key"));
    let key = key.to_str().expect("the path is UTF-8");
    let (code, output) = run(&["top", &router_address, "--once"]);
    assert!(code == Some(1) && output.contains("--cluster-key-file") && output.lines().count() == 1, "{output}");
    let (code, output) = run(&["top", &router_address, "--once", "--interval", "0.1", "--cluster-key-file", key]);
    assert!(code == Some(0) && output.contains("2 of 4 workers"), "{output}");

    let (_, printed) = run(&["router", "--print-config", "--cluster-key-file", key]);
    assert!(printed.contains("cluster-key-file = "), "{printed}");
    for text in [printed, plan.log("router"), plan.log("d"), plan.log("frontend"), router.get("/metrics")] {
        assert!(!text.contains(SECRET) && !text.contains("Bearer "), "neither the secret nor the header of calls is printed");
    }
}

#[test]
fn process_with_an_unusable_key_file_ends_with_advice() {
    let plan = Plan::new();
    plan.secret("short", "0123456789abcdef\n");
    for (name, expected) in [("short", "has 16 bytes, but needs at least 32"), ("missing", "openssl rand -hex 32")] {
        let path = plan.file(name);
        let key = ["--listen", "127.0.0.1:0", "--cluster-key-file", path.to_str().expect("the path is UTF-8")];
        for role in
            [&["up", "--engine", "sim"][..], &["frontend", "--engine", "sim"], &["router", "--admin-listen", "127.0.0.1:0"]]
        {
            let (code, output) = run(&[role, &key].concat());
            assert!(code == Some(1) && output.contains(expected) && !output.contains("0123"), "{role:?}: {output}");
            assert_eq!(output.matches(expected).count(), 1, "{role:?}: {output}");
        }
    }
}

#[test]
fn process_on_a_public_address_warns_about_a_missing_or_readable_key() {
    let plan = Plan::new();
    let warned = |name: &str, what: &str| plan.log(name).lines().any(|line| line.contains("WARN") && line.contains(what));
    let router = |name: &str, listen: [u8; 4], args: &[&str]| -> Up {
        plan.start_without_key("router", name, (listen, 0).into(), &[&["--admin-listen", "127.0.0.1:0"], args].concat())
    };
    // Waits for the warning: a separate thread writes the log, perhaps after the process has printed its introduction.
    let _open = router("open", [0, 0, 0, 0], &[]);
    until("the process warns", || warned("open", "this cluster has no key"), |warned| *warned);
    let _local = router("local", [127, 0, 0, 1], &[]);
    assert!(!warned("local", "this cluster has no key"));

    let key = plan.file("key");
    let path = key.to_str().expect("the path is UTF-8");
    let _keyed = router("keyed", [0, 0, 0, 0], &["--cluster-key-file", path]);
    assert!(!plan.log("keyed").contains("WARN"), "{}", plan.log("keyed"));
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("the folder is writable");
    let _readable = router("readable", [0, 0, 0, 0], &["--cluster-key-file", path]);
    until("the process warns", || warned("readable", "can read the cluster key"), |warned| *warned);
}

#[test]
fn cluster_in_front_of_external_engines_keeps_its_key_in_the_state_folder() {
    let plan = Plan::new();
    let (state, key) = (plan.file("state"), plan.file("state/tandem/cluster-key"));
    let start = || {
        // No engine listens at this address. The key is read before the process waits for its engines.
        let args = ["up", "--engine", "vllm", "--engine-url", "http://127.0.0.1:1", "--listen", "127.0.0.1:0"];
        let mut process = tandem(&args).env("XDG_STATE_HOME", &state).spawn().expect("the binary runs");
        let errors = BufReader::new(process.stderr.take().expect("stderr is piped"));
        let logged = errors.lines().map(|line| line.expect("the log is text")).find(|line| line.contains("cluster key"));
        process.kill().expect("it runs");
        process.wait().expect("the process is a child of this one");
        logged.expect("the log says which key is used")
    };
    let logged = start();
    assert!(logged.contains(key.to_str().expect("the path is UTF-8")), "{logged}");
    let secret = fs::read_to_string(&key).expect("the key is kept");
    assert_eq!((secret.len(), fs::metadata(&key).expect("it exists").permissions().mode() & 0o777), (65, 0o600));
    start();
    assert_eq!(fs::read_to_string(&key).expect("the key is kept"), secret);

    fs::remove_dir_all(&state).expect("the folder is writable");
    fs::write(&state, "not a folder").expect("the folder is writable");
    let warned = start();
    assert!(warned.contains("WARN") && warned.contains("what the engines have cached"), "{warned}");
}
