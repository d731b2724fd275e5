//! Tests of `tandem top` without a terminal.

use crate::{
    cluster::{Plan, address, ready, until},
    talk::chat,
    up::tandem,
};

fn top(plan: &Plan, args: &[&str]) -> (Option<i32>, String) {
    let key = plan.file("key");
    let output = tandem(&[&["top", "--cluster-key-file", key.to_str().expect("the path is UTF-8")], args].concat())
        .output()
        .expect("the binary runs");
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).expect("the output is UTF-8"))
}

#[test]
fn top_shows_every_worker_and_unreachable_addresses() {
    let plan = Plan::new();
    let (prefill, decode, unused) = (address(), address(), address());
    plan.list(&[prefill, decode, unused]);
    let (_router, frontend) = (plan.router(&[]), plan.frontend(&[]));
    let _workers = (plan.worker("prefill", "p", prefill, &[]), plan.worker("decode", "d", decode, &[]));
    ready(&frontend);
    let text = "a prompt that is sent twice is cached the second time ".repeat(8);
    chat(&frontend, &text);
    until("the prompt is found in the cache", || chat(&frontend, &text).1, |cached| *cached > 0);
    let router = plan.routers[0].to_string();
    let line = |name: &str| {
        let (code, table) = top(&plan, &[&router, "--once", "--interval", "0.1"]);
        assert_eq!(code, Some(0), "{table}");
        let line = table.lines().find(|line| line.split_whitespace().next() == Some(name)).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{name} is not in {table}")).split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let p =
        until("the worker has reported its hits", || line("p"), |cells| cells[6] != "-" && cells[6] != "0.0%" && cells[7] != "0");
    assert_eq!(p[1..3], ["prefill", "healthy"]);
    assert_eq!(line("d")[1..3], ["decode", "healthy"]);
    assert_eq!(line(&unused.to_string())[1..3], ["?", "unreachable"]);
    // Without a terminal, `top` prints one table, as it does with `--once`.
    let (code, table) = top(&plan, &[&router, "--interval", "0.1", "--sort", "role", "--reverse"]);
    let order: Vec<&str> = table.lines().skip(4).take(2).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!((code, order), (Some(0), vec!["p", "d"]), "{table}");
    assert!(table.starts_with("tandem serves sim: 2 of 3 workers"), "{table}");

    let (code, printed) = top(&plan, &[&unused.to_string(), "--once"]);
    assert!(
        code == Some(1) && printed.contains(&format!("no router answers at {unused}")) && printed.lines().count() == 1,
        "{printed}"
    );
}

/// Runs a command, and returns its exit code and its output.
fn run(args: &[&str]) -> (Option<i32>, String) {
    let output = tandem(args).output().expect("the binary runs");
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).expect("the output is UTF-8"))
}

#[test]
fn commands_accept_each_spelling_of_a_server_and_identify_a_server_of_the_wrong_kind() {
    let plan = Plan::new();
    let (prefill, decode) = (address(), address());
    plan.list(&[prefill, decode]);
    let (router, frontend) = (plan.router(&[]), plan.frontend(&[]));
    let (worker, _decode) = (plan.worker("prefill", "p", prefill, &[]), plan.worker("decode", "d", decode, &[]));
    ready(&frontend);
    let port = |address: &str| address.rsplit(':').next().expect("an address has a port").to_owned();
    let (api, grpc) = (frontend.address().to_owned(), plan.routers[0].to_string());
    for spelling in
        [port(&api), format!("localhost:{}", port(&api)), api.clone(), format!("http://{api}/"), format!("http://{api}/v1")]
    {
        assert_eq!(run(&["ready", &spelling]), (Some(0), String::new()), "{spelling}");
        let (code, explained) = run(&["route", "explain", &spelling, "--prompt", "x"]);
        assert!(code == Some(0) && explained.contains("d does both"), "{spelling}: {explained}");
    }
    for spelling in [port(&grpc), format!("localhost:{}", port(&grpc)), format!("http://{grpc}")] {
        let (code, table) = top(&plan, &[&spelling, "--once", "--interval", "0.1"]);
        assert!(code == Some(0) && table.contains(" hit "), "{spelling}: {table}");
    }
    let evidence = ["--client", "/dev/null", "--ledger", "/dev/null"];
    let audit = |servers: &[&str]| run(&[&["audit", "check"], servers, &evidence].concat());
    let (code, checked) = audit(&[&api, router.address(), worker.address()]);
    assert!(code == Some(0) && checked.contains("0 answers") && checked.contains("1 workers"), "{checked}");

    let second = plan.frontend(&["--admin-listen", "127.0.0.1:0"]);
    let admin = second.introduction.lines().find_map(|line| line.trim().strip_prefix("admin")?.trim().strip_prefix("http://"));
    let admin = admin.expect("the admin port is printed");
    const GRPC: &str = " is the gRPC port of a router, a worker or an endpoint picker; ";
    let key = plan.file("key");
    let top = ["top", "--cluster-key-file", key.to_str().expect("the path is UTF-8")];
    let chat = ["chat"];
    let (prefill, grpc) = (prefill.to_string(), grpc.as_str());
    for (command, server, kind) in [
        (&top[..], &*api, " is a frontend; this command reads a router"),
        (&top, router.address(), " is the admin port of a router; this command reads a router"),
        (&top, &prefill, " is the gRPC port of a worker or an endpoint picker; this command reads a router"),
        (&["ready"], grpc, GRPC),
        (&["route", "explain", "--prompt", "x"], grpc, GRPC),
        (
            &["route", "explain", "--prompt", "x"],
            admin,
            " is the admin port of a frontend or an endpoint picker; write the port of a frontend's --listen; an admin port",
        ),
        (&["route", "explain", "--prompt", "x"], router.address(), " is the admin port of a router; `tandem route explain`"),
        (&chat, grpc, GRPC),
        (&chat, worker.address(), " is the admin port of a worker; `tandem chat`"),
        (&["audit", "check", "--client", "/dev/null", "--ledger", "/dev/null"], grpc, GRPC),
    ] {
        let (code, error) = run(&[command, &[server]].concat());
        assert!(code == Some(1) && error.contains(&format!("{server}{kind}")), "{command:?} {server}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}
