//! A cluster of processes that can be hurt while clients ask it, and the books that must agree afterwards.

use crate::{
    cluster::{Plan, address, ready, series, until},
    services::Services,
    up::{Up, tandem},
};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
    path::PathBuf,
    time::Duration,
};
use tandem_tests::{Answer, Client, Endpoint};
use tokio::{task::JoinSet, time::Instant};

/// Within this time all is given back and written down, or never.
const SETTLES: Duration = Duration::from_secs(20);

const RESUMED: &str = "tandem_frontend_migrations_total";
const RETRIED: &str = "tandem_frontend_attempts_failed_total";

/// Resident memory in KiB.
pub fn resident(process: &Up) -> f64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
    line.split_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number")
}

/// What a cluster is made of: `f0`, … frontends, `r0`, … routers, `p0`, … prefill and `d0`, … decode workers.
pub struct Shape {
    pub frontends: usize,
    pub routers: usize,
    pub prefill_workers: usize,
    pub decode_workers: usize,
    /// With etcd and NATS; without, processes are listed and events are streamed.
    pub services: bool,
    /// Of every worker.
    pub args: Vec<String>,
}

impl Default for Shape {
    fn default() -> Self {
        Self { frontends: 1, routers: 1, prefill_workers: 2, decode_workers: 2, services: false, args: Vec::new() }
    }
}

/// All of it, running. Whatever is killed can come back at its address.
pub struct Rig {
    pub plan: Plan,
    members: BTreeMap<String, Member>,
    pub services: Option<Services>,
    args: Vec<String>,
    /// Who has ended, at any time: the last counters of that life, and perhaps lines of its ledger, are gone.
    lost: BTreeSet<String>,
    /// What frontends that have ended had counted, by series.
    counted: BTreeMap<&'static str, f64>,
    /// The clients of each frontend.
    pub clients: Vec<Client>,
}

struct Member {
    role: &'static str,
    at: SocketAddr,
    process: Option<Up>,
}

impl Member {
    fn is_worker(&self) -> bool {
        self.role.ends_with("-worker")
    }
}

/// What a client has in the end, and where it came from.
pub type Outcome = anyhow::Result<Answer>;

/// Requests under way, by number.
pub struct Asked(JoinSet<(usize, Outcome)>);

/// What the audit says.
pub struct Books {
    /// Things that do not reconcile, and errors in logs.
    pub wrong: Vec<String>,
    /// Answers whose count only killed workers knew.
    pub unverified: u64,
    /// Blocks in use though nothing runs, or missing.
    pub leaked_blocks: f64,
}

impl Rig {
    /// Returns when everybody knows everybody and requests can be served.
    pub fn start(shape: &Shape) -> Self {
        let plan = Plan::with_routers(shape.routers);
        let kinds = [
            ("f", "frontend", shape.frontends),
            ("r", "router", shape.routers),
            ("p", "prefill-worker", shape.prefill_workers),
            ("d", "decode-worker", shape.decode_workers),
        ];
        let each = kinds.iter().flat_map(|(letter, role, count)| (0..*count).map(move |number| (*letter, *role, number)));
        let member = |(letter, role, number)| {
            let at = if role == "router" { plan.routers[number] } else { address() };
            (format!("{letter}{number}"), Member { role, at, process: None })
        };
        let members: BTreeMap<_, _> = each.map(member).collect();
        let workers: BTreeMap<_, _> =
            members.iter().filter(|(_, member)| member.is_worker()).map(|(name, member)| (name.clone(), member.at)).collect();
        plan.list(&workers.values().copied().collect::<Vec<_>>());
        let clients = members.values().filter(|member| member.role == "frontend").map(|member| Client::new(member.at)).collect();
        let services = shape.services.then(|| Services::start(&workers));
        let mut rig =
            Self { plan, members, services, args: shape.args.clone(), lost: BTreeSet::new(), counted: BTreeMap::new(), clients };
        for name in rig.names() {
            rig.restart(&name);
        }
        rig.whole();
        rig.of_role("frontend").for_each(ready);
        rig
    }

    fn names(&self) -> Vec<String> {
        self.members.keys().cloned().collect()
    }

    /// Starts a process that does not run, at its address; it joins by itself.
    pub fn restart(&mut self, name: &str) {
        let args = self.args_of(name);
        let member = self.members.get_mut(name).expect("a process of the rig");
        assert!(member.process.is_none(), "{name} runs");
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        member.process = Some(self.plan.start(member.role, name, member.at, &args));
    }

    fn args_of(&self, name: &str) -> Vec<String> {
        let member = &self.members[name];
        let path = |file: PathBuf| file.to_str().expect("text").to_owned();
        let (list, routers, ledger) = (path(self.plan.file("workers")), self.plan.router_list(), path(self.ledger(name)));
        let own: &[&str] = match (member.role, &self.services) {
            ("frontend", None) => &["--engine", "sim", "--router", &routers],
            ("frontend", Some(_)) => &["--engine", "sim"],
            ("router", None) => &["--admin-listen", "127.0.0.1:0", "--prefill", "remote", "--workers-file", &list],
            ("router", Some(_)) => &["--admin-listen", "127.0.0.1:0", "--prefill", "remote"],
            _ => &["--engine", "sim", "--admin-listen", "127.0.0.1:0", "--worker-id", name, "--ledger", &ledger],
        };
        let mut args: Vec<String> = own.iter().map(|arg| (*arg).to_owned()).collect();
        if let Some(services) = &self.services {
            args.extend(services.args_of(name, member.role));
        }
        if member.is_worker() {
            args.extend(self.args.iter().cloned());
        }
        args
    }

    fn ledger(&self, name: &str) -> PathBuf {
        self.plan.file(&format!("{name}.ledger"))
    }

    /// Resolves when every router has all workers and the other routers, every frontend all routers, and etcd and NATS, if there
    /// are any, all of them.
    pub fn whole(&self) {
        let routers = self.plan.routers.len();
        let names: Vec<&str> =
            self.members.iter().filter(|(_, member)| member.is_worker()).map(|(name, _)| name.as_str()).collect();
        for number in 0..routers {
            let known = || {
                let view = self.plan.view_of(number);
                let joined = view.workers.into_iter().filter_map(|worker| Some(worker.info?.worker_id));
                (joined.collect::<BTreeSet<_>>(), view.peers as usize + 1)
            };
            let all = |(joined, peers): &(BTreeSet<String>, usize)| joined.iter().eq(&names) && *peers == routers;
            until("the router knows everybody", known, all);
        }
        for (name, frontend) in self.running().filter(|(name, _)| name.starts_with('f')) {
            let well = || series(frontend, "tandem_frontend_routers ") as usize;
            until(&format!("{name} finds all routers"), well, |well| *well == routers);
        }
        if self.services.is_some() {
            self.running().for_each(|(name, process)| {
                self.connected(name, process, "tandem_discovery_etcd_connected{for=\"registration\"}", 1.0);
                if !name.starts_with('f') {
                    self.connected(name, process, "tandem_events_nats_connected", 1.0);
                }
            });
        }
    }

    /// Resolves when the process says so of etcd or NATS.
    pub fn connected(&self, name: &str, process: &Up, what: &str, connected: f64) {
        until(&format!("{name}: {what} is {connected}"), || series(process, what), |seen| *seen == connected);
    }

    pub fn up(&self, name: &str) -> &Up {
        self.members[name].process.as_ref().expect("it runs")
    }

    fn of_role(&self, role: &'static str) -> impl Iterator<Item = &Up> {
        self.members.values().filter(move |member| member.role == role).filter_map(|member| member.process.as_ref())
    }

    /// As the system ends it: without a word.
    pub fn kill(&mut self, name: &str) {
        let process = self.take(name);
        process.signal("-KILL");
        process.wait();
    }

    /// As an operator ends it.
    pub fn end(&mut self, name: &str) {
        let process = self.take(name);
        process.signal("-TERM");
        assert_eq!(process.wait().0.code(), Some(0), "{name} ends in order");
    }

    fn take(&mut self, name: &str) -> Up {
        self.lost.insert(name.to_owned());
        if self.members[name].role == "frontend" {
            for counter in [RESUMED, RETRIED] {
                *self.counted.entry(counter).or_default() += series(self.up(name), counter);
            }
        }
        self.members.get_mut(name).expect("a process of the rig").process.take().expect("it runs")
    }

    /// Sends requests, all at a time.
    pub fn ask(&self, requests: &[Value]) -> Asked {
        let mut asking = JoinSet::new();
        for (number, request) in requests.iter().cloned().enumerate() {
            let client = self.clients[0].clone();
            let asked = async move { (number, client.ask(Endpoint::Chat.path(), &request).await) };
            asking.spawn_on(asked, self.plan.runtime.handle());
        }
        Asked(asking)
    }

    /// What became of them, in their order.
    pub fn outcomes(&self, Asked(asking): Asked) -> Vec<Outcome> {
        let mut outcomes = self.plan.runtime.block_on(asking.join_all());
        outcomes.sort_unstable_by_key(|(number, _)| *number);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }

    /// Answers that went on elsewhere.
    pub fn resumed(&self) -> u64 {
        self.of_frontends(RESUMED)
    }

    /// Attempts that failed before their first token.
    pub fn retried(&self) -> u64 {
        self.of_frontends(RETRIED)
    }

    fn of_frontends(&self, name: &str) -> u64 {
        let now: f64 = self.of_role("frontend").map(|frontend| series(frontend, name)).sum();
        (now + self.counted.get(name).copied().unwrap_or_default()) as u64
    }

    /// Resident memory of all running processes, in KiB.
    pub fn memory(&self) -> BTreeMap<String, f64> {
        self.running().map(|(name, process)| (name.to_owned(), resident(process))).collect()
    }

    /// All running processes, by name.
    pub fn running(&self) -> impl Iterator<Item = (&str, &Up)> {
        self.members.iter().filter_map(|(name, member)| Some((name.as_str(), member.process.as_ref()?)))
    }

    /// Runs `tandem audit check` on all there is, until it has nothing to find or nothing moves any more.
    pub fn close(&self) -> Books {
        let since = Instant::now();
        loop {
            let books = self.audit();
            if books.wrong.is_empty() || since.elapsed() > SETTLES {
                return books;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn audit(&self) -> Books {
        let lines =
            self.clients.iter().flat_map(Client::lines).map(|line| serde_json::to_string(&line).expect("plain values") + "\n");
        let clients = self.plan.file("clients");
        fs::write(&clients, lines.collect::<String>()).expect("a temporary file");
        let mut evidence = vec![("--client", clients)];
        let mut leaked_blocks = 0.0;
        for (name, process) in self.running() {
            let page = process.get("/metrics");
            let (_, metrics) = page.split_once("\r\n\r\n").expect("an answer has a head");
            let file = self.plan.file(&format!("{name}.metrics"));
            fs::write(&file, metrics).expect("a temporary file");
            evidence.push(("--metrics", file));
            let of_state = |state| series(process, &format!("tandem_worker_kv_blocks{{worker=\"{name}\",state=\"{state}\""));
            let [free, cached, in_use] = ["free", "cached", "in_use"].map(of_state);
            let capacity = series(process, "tandem_worker_kv_capacity_blocks");
            leaked_blocks += in_use.max(capacity - free - cached);
        }
        let workers = || self.members.iter().filter(|(_, member)| member.is_worker()).map(|(name, _)| name);
        evidence.extend(workers().map(|name| ("--ledger", self.ledger(name))));
        evidence.extend(workers().filter(|name| self.lost.contains(*name)).map(|name| ("--lost-worker", name.into())));
        let mut audit = tandem(&["audit", "check"]);
        if self.lost.iter().any(|name| name.starts_with('f')) {
            audit.arg("--lost-frontend");
        }
        let output = evidence.iter().fold(&mut audit, |audit, (flag, value)| audit.arg(flag).arg(value)).output();
        let output = output.expect("the binary runs");
        let printed = String::from_utf8(output.stdout).expect("text");
        let mut wrong: Vec<String> = printed.lines().map(str::to_owned).collect();
        let sum = wrong.pop().unwrap_or_default();
        let before = sum.split(" counted by killed workers").next().and_then(|text| text.rsplit(' ').next());
        let unverified = before.and_then(|number| number.parse().ok());
        if wrong.is_empty() && (unverified.is_none() || !output.status.success()) {
            wrong.push(format!("{sum}{}", String::from_utf8_lossy(&output.stderr)));
        }
        let unverified = unverified.unwrap_or_default();
        // Processes must not log faults of others as errors.
        wrong.extend(self.members.keys().flat_map(|name| self.errors(name)));
        Books { wrong, unverified, leaked_blocks }
    }

    /// What a process has logged that no operator should have to read.
    fn errors(&self, name: &str) -> Vec<String> {
        let log = self.plan.log(name);
        let errors = log.lines().filter(|line| line.contains("ERROR") || line.contains("panicked"));
        errors.map(|line| format!("{name} logs: {line}")).collect()
    }
}
