//! A cluster of processes that tests kill and restart while clients send requests. After the test, the usage that clients received is
//! audited.

use crate::{
    cluster::{Plan, address, make_certificates, ready, series, until},
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

/// Time limit, after the last request, for releasing all blocks and writing all ledgers.
const SETTLE_MAX: Duration = Duration::from_secs(20);

const RESUMED: &str = "tandem_frontend_migrations_total";
const RETRIED: &str = "tandem_frontend_attempts_failed_total";

pub fn resident(process: &Up) -> f64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("the status has VmRSS");
    line.split_whitespace().next().and_then(|kib| kib.parse().ok()).expect("VmRSS is a number")
}

/// The number of processes of each role. The frontends are named `f0`, `f1`, …, the routers `r0`, …, the prefill workers `p0`, …, and the
/// decode workers `d0`, ….
pub struct Shape {
    pub frontends: usize,
    pub routers: usize,
    pub prefill_workers: usize,
    pub decode_workers: usize,
    /// Whether the processes use etcd and NATS instead of static lists and streams.
    pub services: bool,
    /// Whether the processes have certificates, so that their connections use mutual TLS.
    pub certificates: bool,
    pub args: Vec<String>,
}

/// Whether all scenarios run with certificates.
pub fn certificates() -> bool {
    std::env::var_os("CHAOS_CERTIFICATES").is_some()
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            frontends: 1,
            routers: 1,
            prefill_workers: 2,
            decode_workers: 2,
            services: false,
            certificates: certificates(),
            args: Vec::new(),
        }
    }
}

/// A running cluster. Its processes can be killed, and restarted at the same addresses.
pub struct Rig {
    pub plan: Plan,
    members: BTreeMap<String, Member>,
    pub services: Option<Services>,
    args: Vec<String>,
    /// The processes that have been killed or terminated at least once. Their last metrics are lost, and perhaps some lines of their
    /// ledgers.
    ended: BTreeSet<String>,
    ended_counts: BTreeMap<&'static str, f64>,
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

pub type Outcome = anyhow::Result<Answer>;

pub struct PendingAnswers(JoinSet<(usize, Outcome)>);

pub struct AuditResult {
    /// The findings of `tandem audit check`, and the errors in the logs of the processes.
    pub findings: Vec<String>,
    /// The number of answers whose cached-token count was lost with a killed worker.
    pub unverified: u64,
    /// The number of blocks that are in use or missing although no request runs.
    pub leaked_blocks: f64,
}

impl Rig {
    /// Starts the processes, and waits until they are connected and can serve requests.
    pub fn start(shape: &Shape) -> Self {
        let mut plan = Plan::with_routers(shape.routers);
        if shape.certificates {
            let folder = plan.file("certificates");
            make_certificates(&folder);
            plan = plan.with_certificates(folder);
        }
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
        let mut rig = Self {
            plan,
            members,
            services,
            args: shape.args.clone(),
            ended: BTreeSet::new(),
            ended_counts: BTreeMap::new(),
            clients,
        };
        for name in rig.names() {
            rig.restart(&name);
        }
        rig.wait_until_connected();
        rig.of_role("frontend").for_each(ready);
        rig
    }

    fn names(&self) -> Vec<String> {
        self.members.keys().cloned().collect()
    }

    /// Starts a process at the address that the cluster's plan assigns to it. The process must not be running.
    pub fn restart(&mut self, name: &str) {
        let args = self.args_of(name);
        let member = self.members.get_mut(name).expect("the rig has this process");
        assert!(member.process.is_none(), "{name} runs already");
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        member.process = Some(self.plan.start(member.role, name, member.at, &args));
    }

    fn args_of(&self, name: &str) -> Vec<String> {
        let member = &self.members[name];
        let path = |file: PathBuf| file.to_str().expect("the path is UTF-8").to_owned();
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

    /// Waits until every router has all workers and the other routers, every frontend has all routers, and all processes are connected to
    /// etcd and NATS, if the cluster uses them.
    pub fn wait_until_connected(&self) {
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
            until("the router has all workers and peers", known, all);
        }
        for (name, frontend) in self.running().filter(|(name, _)| name.starts_with('f')) {
            let healthy = || series(frontend, "tandem_frontend_routers ") as usize;
            until(&format!("{name} has all routers"), healthy, |healthy| *healthy == routers);
        }
        if self.services.is_some() {
            self.running().for_each(|(name, process)| {
                self.wait_for_value(name, process, "tandem_discovery_etcd_connected{for=\"registration\"}", 1.0);
                if !name.starts_with('f') {
                    self.wait_for_value(name, process, "tandem_events_nats_connected", 1.0);
                }
            });
        }
    }

    pub fn wait_for_value(&self, name: &str, process: &Up, metric: &str, expected: f64) {
        until(&format!("{metric} of {name} is {expected}"), || series(process, metric), |value| *value == expected);
    }

    pub fn process(&self, name: &str) -> &Up {
        self.members[name].process.as_ref().expect("the process runs")
    }

    fn of_role(&self, role: &'static str) -> impl Iterator<Item = &Up> {
        self.members.values().filter(move |member| member.role == role).filter_map(|member| member.process.as_ref())
    }

    pub fn kill(&mut self, name: &str) {
        let process = self.take_process(name);
        process.signal("-KILL");
        process.wait();
    }

    pub fn terminate(&mut self, name: &str) {
        let process = self.take_process(name);
        process.signal("-TERM");
        assert_eq!(process.wait().0.code(), Some(0), "{name} ends without an error");
    }

    fn take_process(&mut self, name: &str) -> Up {
        self.ended.insert(name.to_owned());
        if self.members[name].role == "frontend" {
            for counter in [RESUMED, RETRIED] {
                *self.ended_counts.entry(counter).or_default() += series(self.process(name), counter);
            }
        }
        self.members.get_mut(name).expect("the rig has this process").process.take().expect("the process runs")
    }

    pub fn send_all(&self, requests: &[Value]) -> PendingAnswers {
        let mut pending = JoinSet::new();
        for (number, request) in requests.iter().cloned().enumerate() {
            let client = self.clients[0].clone();
            let request = async move { (number, client.answer(Endpoint::Chat.path(), &request).await) };
            pending.spawn_on(request, self.plan.runtime.handle());
        }
        PendingAnswers(pending)
    }

    pub fn outcomes(&self, PendingAnswers(pending): PendingAnswers) -> Vec<Outcome> {
        let mut outcomes = self.plan.runtime.block_on(pending.join_all());
        outcomes.sort_unstable_by_key(|(number, _)| *number);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }

    /// Returns how many answers failed over to another worker after their first token.
    pub fn resumed(&self) -> u64 {
        self.of_frontends(RESUMED)
    }

    /// Returns how many attempts failed before their first token.
    pub fn retried(&self) -> u64 {
        self.of_frontends(RETRIED)
    }

    fn of_frontends(&self, name: &str) -> u64 {
        let now: f64 = self.of_role("frontend").map(|frontend| series(frontend, name)).sum();
        (now + self.ended_counts.get(name).copied().unwrap_or_default()) as u64
    }

    pub fn memory(&self) -> BTreeMap<String, f64> {
        self.running().map(|(name, process)| (name.to_owned(), resident(process))).collect()
    }

    pub fn running(&self) -> impl Iterator<Item = (&str, &Up)> {
        self.members.iter().filter_map(|(name, member)| Some((name.as_str(), member.process.as_ref()?)))
    }

    /// Runs `tandem audit check` on all evidence until it has no findings, or until the time limit. Returns the last result.
    pub fn reconcile(&self) -> AuditResult {
        let since = Instant::now();
        loop {
            let result = self.audit();
            if result.findings.is_empty() || since.elapsed() > SETTLE_MAX {
                return result;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn audit(&self) -> AuditResult {
        let lines = self
            .clients
            .iter()
            .flat_map(Client::lines)
            .map(|line| serde_json::to_string(&line).expect("the client line can be serialized") + "\n");
        let clients = self.plan.file("clients");
        fs::write(&clients, lines.collect::<String>()).expect("the folder is writable");
        let mut evidence = vec![("--client", clients)];
        let mut leaked_blocks = 0.0;
        for (name, process) in self.running() {
            let page = process.get("/metrics");
            let (_, metrics) = page.split_once("\r\n\r\n").expect("the answer has a head");
            let file = self.plan.file(&format!("{name}.metrics"));
            fs::write(&file, metrics).expect("the folder is writable");
            evidence.push(("--metrics", file));
            let of_state = |state| series(process, &format!("tandem_worker_kv_blocks{{worker=\"{name}\",state=\"{state}\""));
            let [free, cached, in_use] = ["free", "cached", "in_use"].map(of_state);
            let capacity = series(process, "tandem_worker_kv_capacity_blocks");
            leaked_blocks += in_use.max(capacity - free - cached);
        }
        let workers = || self.members.iter().filter(|(_, member)| member.is_worker()).map(|(name, _)| name);
        evidence.extend(workers().map(|name| ("--ledger", self.ledger(name))));
        evidence.extend(workers().filter(|name| self.ended.contains(*name)).map(|name| ("--lost-worker", name.into())));
        let mut audit = tandem(&["audit", "check"]);
        if self.ended.iter().any(|name| name.starts_with('f')) {
            audit.arg("--lost-frontend");
        }
        let output = evidence.iter().fold(&mut audit, |audit, (flag, value)| audit.arg(flag).arg(value)).output();
        let output = output.expect("the binary runs");
        let printed = String::from_utf8(output.stdout).expect("the output is UTF-8");
        let mut findings: Vec<String> = printed.lines().map(str::to_owned).collect();
        let sum = findings.pop().unwrap_or_default();
        let before = sum.split(" counted by killed workers").next().and_then(|text| text.rsplit(' ').next());
        let unverified = before.and_then(|number| number.parse().ok());
        if findings.is_empty() && (unverified.is_none() || !output.status.success()) {
            findings.push(format!("{sum}{}", String::from_utf8_lossy(&output.stderr)));
        }
        let unverified = unverified.unwrap_or_default();
        // Errors in logs are findings, too, because a process must not log the fault of another process as an error.
        findings.extend(self.members.keys().flat_map(|name| self.errors(name)));
        AuditResult { findings, unverified, leaked_blocks }
    }

    fn errors(&self, name: &str) -> Vec<String> {
        let log = self.plan.log(name);
        let errors = log.lines().filter(|line| line.contains("ERROR") || line.contains("panicked"));
        errors.map(|line| format!("{name} logs: {line}")).collect()
    }
}
