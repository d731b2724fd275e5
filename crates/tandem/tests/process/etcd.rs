//! Tests of processes that find each other only through etcd. In one test they also receive KV events over NATS.

#[path = "../../../process/tests/servers/mod.rs"]
mod servers;

use crate::{
    cluster::{Plan, ready, until},
    talk::{chat, metric},
    up::Up,
};
use etcd_client::{Client, ConnectOptions};
use servers::Server;
use std::net::SocketAddr;

fn router_by(plan: &Plan, args: &[&str]) -> Up {
    plan.start("router", "router", plan.routers[0], &[&["--admin-listen", "127.0.0.1:0", "--prefill", "remote"], args].concat())
}

fn frontend_by(plan: &Plan, args: &[&str]) -> Up {
    plan.start("frontend", "frontend", ([127, 0, 0, 1], 0).into(), &[&["--engine", "sim"], args].concat())
}

#[test]
fn processes_find_each_other_through_etcd_and_survive_the_loss_of_etcd() {
    let mut etcd = Server::etcd(&[]);
    let (plan, at, anywhere) = (Plan::new(), etcd.address(), SocketAddr::from(([127, 0, 0, 1], 0)));
    let discovery = ["--cluster", "blue", "--etcd", &at];
    etcd.kill();
    let router = router_by(&plan, &discovery);
    let worker = |role, name| plan.worker(role, name, anywhere, &discovery);
    let (prefill, decode) = (worker("prefill", "p"), worker("decode", "d"));
    let frontend = frontend_by(&plan, &discovery);
    let connected = |process| metric(process, r#"tandem_discovery_etcd_connected{for="registration"}"#);
    assert_eq!((connected(&prefill), connected(&router)), (Some(0.0), Some(0.0)), "the processes run without etcd");
    etcd.start();
    plan.joined(&["d", "p"]);
    ready(&frontend);
    chat(&frontend, "found");

    etcd.kill();
    until("the decode worker detects the end of etcd", || connected(&decode), |connected| *connected == Some(0.0));
    chat(&frontend, "without etcd");
    etcd.lose_data();
    etcd.start();
    let _late = worker("decode", "d2");
    plan.joined(&["d", "d2", "p"]);
    for process in [&prefill, &decode, &router] {
        let again = || metric(process, "tandem_discovery_reregistrations_total");
        until("the process registers again", again, |again| *again == Some(1.0));
    }

    decode.signal("-TERM");
    assert_eq!(decode.wait().0.code(), Some(0));
    let view = plan.joined(&["d2", "p"]);
    assert_eq!(view.unavailable, [], "the drained worker is deregistered");
    chat(&frontend, "without the first");
}

#[test]
fn restarted_router_finds_all_workers_after_the_passwords_of_etcd_and_nats_were_rotated() {
    let (etcd, plan, anywhere) = (Server::etcd(&[]), Plan::new(), SocketAddr::from(([127, 0, 0, 1], 0)));
    let (at, file, config) = (etcd.address(), plan.file("password"), plan.file("nats.conf"));
    let (file, config) = (file.to_str().expect("the path is UTF-8"), config.to_str().expect("the path is UTF-8"));
    let set_nats = |password: &str| plan.secret("nats.conf", &format!("authorization {{ user: u, password: {password} }}"));
    let set_etcd = |last: Option<&str>, password: &str| {
        let set = async {
            let options = last.map(|last| ConnectOptions::new().with_user("root", last));
            let mut client = Client::connect([&at], options).await?;
            if last.is_some() {
                return client.user_change_password("root", password).await.map(drop);
            }
            client.user_add("root", password, None).await?;
            client.user_grant_role("root", "root").await?;
            client.auth_enable().await.map(drop)
        };
        plan.runtime.block_on(set).expect("etcd answers");
    };
    plan.secret("password", "first");
    set_etcd(None, "first");
    set_nats("first");
    let nats = Server::nats(&["--config", config]);
    let (etcd_at, nats_at) = (etcd.address(), nats.address());
    let discovery = ["--etcd", &etcd_at, "--lease-ttl", "2", "--etcd-user", "root", "--etcd-password-file", file];
    let with_nats = [&discovery[..], &["--nats", &nats_at, "--nats-user", "u", "--nats-password-file", file]].concat();
    let router = router_by(&plan, &with_nats);
    let workers = [plan.worker("prefill", "p", anywhere, &with_nats), plan.worker("decode", "d", anywhere, &with_nats)];
    let frontend = frontend_by(&plan, &discovery);
    plan.joined(&["d", "p"]);
    ready(&frontend);
    let all_become = |what: &str, series: &str, value: f64| {
        for process in workers.iter().chain([&router]) {
            until(what, || metric(process, series), |now| *now == Some(value));
        }
    };
    let registered = r#"tandem_discovery_etcd_connected{for="registration"}"#;
    all_become("NATS is connected", "tandem_events_nats_connected", 1.0);

    set_etcd(Some("first"), "second");
    set_nats("second");
    nats.signal("-HUP");
    all_become("etcd refuses the first password", registered, 0.0);
    all_become("NATS refuses the first password", "tandem_events_nats_connected", 0.0);
    chat(&frontend, "while the passwords differ");
    plan.secret("password", "second");
    all_become("the process registers with the second password", registered, 1.0);
    all_become("NATS accepts the second password", "tandem_events_nats_connected", 1.0);
    router.signal("-TERM");
    assert_eq!(router.wait().0.code(), Some(0));
    let _router = router_by(&plan, &with_nats);
    plan.joined(&["d", "p"]);
    chat(&frontend, "after the rotation");
}

#[test]
fn repeated_prompt_is_cached_with_and_without_nats() {
    let (etcd, mut nats) = (Server::etcd(&[]), Server::nats(&["--user=u", "--pass=hidden"]));
    let (plan, etcd_at, nats_at) = (Plan::new(), etcd.address(), nats.address());
    let discovery = ["--etcd", &etcd_at, "--nats", &nats_at, "--nats-user", "u", "--nats-password"];
    let good = [&discovery[..], &["hidden"]].concat();
    let router = router_by(&plan, &good);
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let _prefill = plan.worker("prefill", "p", anywhere, &good);
    // NATS refuses the password of this worker, so the worker sends its events on its own stream.
    let _decode = plan.worker("decode", "d", anywhere, &[&discovery[..], &["wrong"]].concat());
    let frontend = frontend_by(&plan, &discovery[..2]);
    plan.joined(&["d", "p"]);
    ready(&frontend);
    let plane = |router: &Up, worker: &str, plane: &str| {
        metric(router, &format!("tandem_router_event_plane{{worker=\"{worker}\",plane=\"{plane}\"}}"))
    };
    let over = |worker: &'static str, path: &'static str| {
        let what = format!("{worker} sends its events by {path}");
        let mut round = 0;
        // Each answer changes the cache, which causes KV events.
        let events = || {
            round += 1;
            chat(&frontend, &format!("{what} {round} {}", "some words of a prompt ".repeat(20)));
            plane(&router, worker, path)
        };
        wait_for_one(&what, events);
    };
    over("p", "nats");
    over("d", "direct");
    let cached = |text: &str| {
        let text = format!("{text} {}", "a prompt that is sent again ".repeat(20));
        chat(&frontend, &text);
        until("the prompt is found in the cache", || chat(&frontend, &text).1, |cached| *cached > 400);
    };
    cached("over NATS");
    nats.kill();
    over("p", "direct");
    cached("over the stream");
    nats.start();
    over("p", "nats");
    cached("over NATS again");
    let log = plan.log("d") + &plan.log("p") + &plan.log("router");
    assert!(log.contains("NATS connection failed, retrying") && log.contains("authorization violation"), "{log}");
    assert!(!log.contains("hidden"), "{log}");
}

fn wait_for_one(what: &str, read_value: impl FnMut() -> Option<f64>) {
    let read_value = std::cell::RefCell::new(read_value);
    until(what, || read_value.borrow_mut()(), |seen| *seen == Some(1.0));
}
