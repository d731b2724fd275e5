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
        until("the worker has reported its hits", || line("p"), |cells| cells[6] != "-" && cells[6] != "0.0%" && cells[8] != "0");
    assert_eq!(p[1..3], ["prefill", "healthy"]);
    assert_eq!(line("d")[1..3], ["decode", "healthy"]);
    assert_eq!(line(&unused.to_string())[1..3], ["?", "unreachable"]);
    // Without a terminal, `top` prints one table, as it does with `--once`.
    let (code, table) = top(&plan, &[&router, "--interval", "0.1", "--sort", "role", "--reverse"]);
    let order: Vec<&str> = table.lines().skip(3).take(2).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!((code, order), (Some(0), vec!["p", "d"]), "{table}");
    assert!(table.starts_with("tandem serves sim: 2 of 3 workers"), "{table}");

    let (code, printed) = top(&plan, &[&unused.to_string(), "--once"]);
    assert!(
        code == Some(1) && printed.contains(&format!("no router answers at {unused}")) && printed.lines().count() == 1,
        "{printed}"
    );
}
