//! Tests of discovery with a real etcd server: registration, watch, leases, reconnection, authentication, and loss of etcd's data.

#[path = "../servers/certificates.rs"]
mod certificates;
mod proxy;
#[path = "../servers/mod.rs"]
mod servers;

use certificates::Certificates;
use proxy::Proxy;
use servers::{Server, TIMEOUT};
use std::{collections::BTreeSet, time::Duration};
use tandem_process::{
    Metrics, Secret, Shutdown,
    discovery::{EtcdSettings, EtcdTls, MemberRecord, MemberSource, Members, Role, register},
};
use tandem_proto::ClusterKey;
use tokio::time::{Instant, sleep, timeout};

const ROLES: [Role; 2] = [Role::PrefillWorker, Role::DecodeWorker];

fn settings(endpoints: &[String]) -> EtcdSettings {
    EtcdSettings {
        endpoints: endpoints.to_vec(),
        user: None,
        tls: None,
        cluster: "c".to_owned(),
        key: ClusterKey::default(),
        lease_ttl: Duration::from_secs(5),
    }
}

fn record(role: Role, address: &str) -> MemberRecord {
    MemberRecord {
        role,
        address: address.to_owned(),
        instance_id: format!("of {address}"),
        version: "0.1.0".to_owned(),
        worker_id: String::new(),
        model: "m".to_owned(),
        revision: "r".to_owned(),
        block_size: 16,
        capacity_blocks: 0,
        context_length: 0,
        signature: Vec::new(),
    }
}

/// A process that stays registered until this value is dropped.
struct Registered {
    metrics: Metrics,
    shutdown: Shutdown,
}

impl Registered {
    fn start(settings: &EtcdSettings, role: Role, address: &str) -> Self {
        let (metrics, shutdown) = (Metrics::default(), Shutdown::default());
        let (settings, own_record, own, until) = (settings.clone(), record(role, address), metrics.clone(), shutdown.clone());
        shutdown.spawn(async move { register(settings, own_record, &own, &until).await });
        Self { metrics, shutdown }
    }

    async fn connected(&self) {
        wait_until(&self.metrics, "tandem_discovery_etcd_connected{for=\"registration\"}", 1.0).await;
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.shutdown.stop();
    }
}

fn value(metrics: &Metrics, series: &str) -> Option<f64> {
    metrics.render().lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

async fn wait_until(metrics: &Metrics, series: &str, wanted: f64) {
    let started = Instant::now();
    while value(metrics, series) != Some(wanted) {
        assert!(started.elapsed() < TIMEOUT, "{series} should become {wanted}; it is {:?}", value(metrics, series));
        sleep(Duration::from_millis(5)).await;
    }
}

/// A process that watches the workers.
struct Watcher {
    members: Members,
    metrics: Metrics,
}

impl Watcher {
    fn start(settings: &EtcdSettings) -> Self {
        let metrics = Metrics::default();
        let members =
            MemberSource::Etcd(settings.clone(), ROLES.to_vec()).open(&metrics).expect("opening sends no request to etcd");
        Self { members, metrics }
    }

    async fn expect_members(&mut self, addresses: &[&str]) {
        let wanted: BTreeSet<String> = addresses.iter().map(|address| (*address).to_owned()).collect();
        let known = async {
            while *self.members.now() != wanted {
                self.members.changed().await;
            }
        };
        let known = timeout(TIMEOUT, known).await;
        assert!(known.is_ok(), "the members should become {wanted:?}; they are {:?}", self.members.now());
    }

    async fn connected(&self, wanted: bool) {
        wait_until(&self.metrics, "tandem_discovery_etcd_connected{for=\"members\"}", f64::from(u8::from(wanted))).await;
    }
}

async fn admin(server: &Server) -> etcd_client::Client {
    etcd_client::Client::connect([server.address()], None).await.expect("etcd listens")
}

#[tokio::test]
async fn registered_processes_are_found_by_role_until_they_drain() {
    let server = Server::etcd(&[]);
    // The lease does not expire within the test, so a process is removed only if it deregisters.
    let settings = EtcdSettings { lease_ttl: 4 * TIMEOUT, ..settings(&[server.address()]) };
    let decode = Registered::start(&settings, Role::DecodeWorker, "d:1");
    let _frontend = Registered::start(&settings, Role::Frontend, "f:1");
    let _other_cluster =
        Registered::start(&EtcdSettings { cluster: "cc".to_owned(), ..settings.clone() }, Role::DecodeWorker, "x:1");
    let mut watcher = Watcher::start(&settings);
    watcher.expect_members(&["d:1"]).await;
    assert!(watcher.members.are_advisory());
    let prefill = Registered::start(&settings, Role::PrefillWorker, "p:1");
    watcher.expect_members(&["d:1", "p:1"]).await;

    let mut client = admin(&server).await;
    let key = "/tandem/c/prefill-worker/of p:1";
    let read = client.get(key, None).await.expect("etcd answers");
    let text = read.kvs().first().expect("the key exists").value_str().expect("the value is UTF-8");
    assert_eq!(
        text,
        r#"{"role":"prefill-worker","address":"p:1","instance_id":"of p:1","version":"0.1.0","model":"m","revision":"r","block_size":16}"#
    );
    client.put("/tandem/c/decode-worker/broken", "{", None).await.expect("etcd answers");
    client
        .put("/tandem/c/decode-worker/later", r#"{"role":"decode-worker","address":"l:1","new":1}"#, None)
        .await
        .expect("etcd answers");
    watcher.expect_members(&["d:1", "l:1", "p:1"]).await;
    client.delete("/tandem/c/decode-worker/later", None).await.expect("etcd answers");
    watcher.expect_members(&["d:1", "p:1"]).await;

    prefill.shutdown.run(Duration::from_secs(5)).await;
    watcher.expect_members(&["d:1"]).await;
    decode.shutdown.run(Duration::from_secs(5)).await;
    watcher.expect_members(&[]).await;
}

#[tokio::test]
async fn registrations_without_a_valid_signature_are_ignored() {
    let server = Server::etcd(&[]);
    let keyed = |key: &ClusterKey| EtcdSettings { key: key.clone(), ..settings(&[server.address()]) };
    let key = ClusterKey::random();
    let mut watcher = Watcher::start(&keyed(&key));
    let strangers = [ClusterKey::default(), ClusterKey::random()];
    let _strangers = [("0:1", &strangers[0]), ("00:1", &strangers[1])]
        .map(|(address, key)| Registered::start(&keyed(key), Role::DecodeWorker, address));
    for stranger in &_strangers {
        stranger.connected().await;
    }
    let _ours = Registered::start(&keyed(&key), Role::DecodeWorker, "ours:1");
    watcher.expect_members(&["ours:1"]).await;
    // Two records must be refused: a signed record that was copied to another etcd key, and a record whose address was changed after it was signed.
    let mut client = admin(&server).await;
    let read = client.get("/tandem/c/decode-worker/of ours:1", None).await.expect("etcd answers");
    let signed = read.kvs().first().expect("the key exists").value_str().expect("the value is UTF-8").to_owned();
    client.put("/tandem/c/decode-worker/copied", &*signed, None).await.expect("etcd answers");
    client.put("/tandem/c/decode-worker/of ours:1", signed.replace("ours:1", "mine:1"), None).await.expect("etcd answers");
    watcher.expect_members(&[]).await;
    client.put("/tandem/c/decode-worker/of ours:1", signed, None).await.expect("etcd answers");
    watcher.expect_members(&["ours:1"]).await;
}

#[tokio::test]
async fn killed_process_is_removed_when_its_lease_expires_and_a_deleted_key_is_put_again() {
    let server = Server::etcd(&[]);
    let settings = EtcdSettings { lease_ttl: Duration::from_secs(1), ..settings(&[server.address()]) };
    let mut watcher = Watcher::start(&settings);
    let stays = Registered::start(&settings, Role::DecodeWorker, "stays:1");
    let mut killed = tokio::task::JoinSet::new();
    let (metrics, shutdown) = (Metrics::default(), Shutdown::default());
    let own = settings.clone();
    killed.spawn(async move { register(own, record(Role::DecodeWorker, "killed:1"), &metrics, &shutdown).await });
    watcher.expect_members(&["killed:1", "stays:1"]).await;
    killed.shutdown().await;
    watcher.expect_members(&["stays:1"]).await;
    let again = "tandem_discovery_reregistrations_total";
    assert_eq!(value(&stays.metrics, again), Some(0.0), "the lease was kept alive, so the process did not register again");

    let mut client = admin(&server).await;
    client.delete("/tandem/c/decode-worker/of stays:1", None).await.expect("etcd answers");
    watcher.expect_members(&[]).await;
    watcher.expect_members(&["stays:1"]).await;
    let lease = client.leases().await.expect("etcd answers").leases().first().expect("etcd has one lease").id();
    client.lease_revoke(lease).await.expect("etcd answers");
    watcher.expect_members(&[]).await;
    watcher.expect_members(&["stays:1"]).await;
    // The watcher may see the new key before the process has etcd's response.
    stays.connected().await;
    assert_eq!(value(&stays.metrics, again), Some(1.0));
}

#[tokio::test]
async fn members_survive_a_late_start_a_restart_and_data_loss_of_etcd() {
    let mut server = Server::etcd(&[]);
    server.kill();
    let settings = settings(&[server.address()]);
    let mut watcher = Watcher::start(&settings);
    let process = Registered::start(&settings, Role::DecodeWorker, "d:1");
    watcher.connected(false).await;
    assert_eq!(*watcher.members.now(), BTreeSet::new());
    server.start();
    watcher.expect_members(&["d:1"]).await;
    process.connected().await;
    let mut client = admin(&server).await;
    client
        .put("/tandem/c/decode-worker/lost", r#"{"role":"decode-worker","address":"lost:1"}"#, None)
        .await
        .expect("etcd answers");
    watcher.expect_members(&["d:1", "lost:1"]).await;

    server.kill();
    watcher.connected(false).await;
    server.lose_data();
    server.start();
    // After a reconnection, members stay for the time of one lease, within which they can register again. Members that did not register again are
    // then removed.
    let restarted = Instant::now();
    watcher.connected(true).await;
    process.connected().await;
    timeout(TIMEOUT, watcher.members.changed()).await.expect("a member is removed");
    assert!(restarted.elapsed() > Duration::from_secs(4), "{:?}", restarted.elapsed());
    watcher.expect_members(&["d:1"]).await;
    assert_eq!(value(&process.metrics, "tandem_discovery_reregistrations_total"), Some(1.0));
    let keys = admin(&server).await.get("/tandem/c/decode-worker/of d:1", None).await.expect("etcd answers");
    assert_eq!(keys.count(), 1);
}

#[tokio::test]
async fn watch_continues_after_compaction() {
    let server = Server::etcd(&[]);
    let proxy = Proxy::to(&server.address()).await;
    let mut client = admin(&server).await;
    let put =
        |name: &str| (format!("/tandem/c/decode-worker/{name}"), format!(r#"{{"role":"decode-worker","address":"{name}:1"}}"#));
    let (key, record) = put("one");
    client.put(key, record, None).await.expect("etcd answers");
    let mut watcher = Watcher::start(&EtcdSettings { lease_ttl: Duration::from_secs(1), ..settings(&[proxy.address()]) });
    watcher.expect_members(&["one:1"]).await;
    watcher.connected(true).await;

    proxy.cut();
    watcher.connected(false).await;
    for name in ["two", "three"] {
        let (key, record) = put(name);
        client.put(key, record, None).await.expect("etcd answers");
    }
    let deleted = client.delete("/tandem/c/decode-worker/one", None).await.expect("etcd answers");
    let revision = deleted.header().expect("every etcd reply has a header").revision();
    client.compact(revision, None).await.expect("etcd answers");
    // The proxy forwards the watcher's read, and holds back the watch request that follows until its revision is compacted, too.
    proxy.hold_after(b"/tandem/c/decode-worker/two");
    proxy.restore();
    watcher.expect_members(&["one:1", "three:1", "two:1"]).await;
    let (key, record) = put("four");
    client.put(key, record, None).await.expect("etcd answers");
    let deleted = client.delete("/tandem/c/decode-worker/two", None).await.expect("etcd answers");
    client.compact(deleted.header().expect("every etcd reply has a header").revision(), None).await.expect("etcd answers");
    proxy.restore();
    watcher.expect_members(&["four:1", "three:1"]).await;
    let (key, record) = put("five");
    client.put(key, record, None).await.expect("etcd answers");
    watcher.expect_members(&["five:1", "four:1", "three:1"]).await;
}

#[tokio::test]
async fn processes_register_if_one_of_several_etcd_endpoints_is_reachable() {
    let server = Server::etcd(&[]);
    let dead = format!("127.0.0.1:{}", servers::port());
    let settings = settings(&[dead.clone(), server.address(), dead]);
    let mut watcher = Watcher::start(&settings);
    let process = Registered::start(&settings, Role::DecodeWorker, "d:1");
    watcher.expect_members(&["d:1"]).await;
    process.connected().await;
}

#[tokio::test]
async fn client_authenticates_by_password() {
    let server = Server::etcd(&[]);
    let mut client = admin(&server).await;
    client.user_add("root", "right", None).await.expect("etcd answers");
    client.user_grant_role("root", "root").await.expect("etcd answers");
    client.auth_enable().await.expect("etcd answers");
    let with = |password: &str| EtcdSettings {
        user: Some(("root".to_owned(), password.to_owned().into())),
        ..settings(&[server.address()])
    };
    let (wrong, anonymous) = (Watcher::start(&with("wrong")), Watcher::start(&settings(&[server.address()])));
    let process = Registered::start(&with("right"), Role::DecodeWorker, "d:1");
    let mut watcher = Watcher::start(&with("right"));
    watcher.expect_members(&["d:1"]).await;
    process.connected().await;
    for refused in [&wrong, &anonymous] {
        assert_eq!(*refused.members.now(), BTreeSet::new());
        refused.connected(false).await;
    }
    assert!(!format!("{:?}", with("hidden")).contains("hidden"));
}

#[tokio::test]
async fn password_is_read_again_from_its_file_when_etcd_refuses_the_old_one() {
    let server = Server::etcd(&[]);
    let mut client = admin(&server).await;
    client.user_add("root", "first", None).await.expect("etcd answers");
    client.user_grant_role("root", "root").await.expect("etcd answers");
    client.auth_enable().await.expect("etcd answers");
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let file = folder.path().join("password");
    std::fs::write(&file, "first\n").expect("the folder is writable");
    let password = Secret::in_file(file.clone()).expect("the file holds a secret");
    let settings = EtcdSettings {
        user: Some(("root".to_owned(), password)),
        lease_ttl: Duration::from_secs(1),
        ..settings(&[server.address()])
    };
    let process = Registered::start(&settings, Role::DecodeWorker, "d:1");
    process.connected().await;
    let mut running = Watcher::start(&settings);
    running.expect_members(&["d:1"]).await;

    let options = etcd_client::ConnectOptions::new().with_user("root", "first");
    let mut client = etcd_client::Client::connect([server.address()], Some(options)).await.expect("etcd listens");
    client.user_change_password("root", "second").await.expect("etcd answers");
    wait_until(&process.metrics, "tandem_discovery_etcd_connected{for=\"registration\"}", 0.0).await;
    running.expect_members(&[]).await;
    std::fs::write(&file, "second\n").expect("the folder is writable");
    process.connected().await;
    running.expect_members(&["d:1"]).await;
    // A router that starts now finds the process.
    Watcher::start(&settings).expect_members(&["d:1"]).await;
}

#[tokio::test]
async fn tls_verifies_server_and_client() {
    let files = Certificates::new();
    let path = |path: &std::path::Path| path.to_str().expect("the path is UTF-8").to_owned();
    let arg = |name: &str, file| format!("--{name}={}", path(file));
    let args = [arg("cert-file", &files.certificate), arg("key-file", &files.key), arg("trusted-ca-file", &files.ca)];
    let server = Server::etcd(&[&args[0], &args[1], &args[2], "--client-cert-auth"]);
    let identity = Some((files.certificate.clone(), files.key.clone()));
    let with = |tls| EtcdSettings { tls, ..settings(&[server.address()]) };
    let good = with(Some(EtcdTls { ca: files.ca.clone(), identity: identity.clone() }));
    good.check().expect("the certificate files are valid");
    let process = Registered::start(&good, Role::DecodeWorker, "d:1");
    let mut watcher = Watcher::start(&good);
    watcher.expect_members(&["d:1"]).await;
    process.connected().await;
    const REJECTED: &str = "rejected connection";
    let strangers = Certificates::new();
    for refused in [
        with(None),
        with(Some(EtcdTls { ca: files.ca.clone(), identity: None })),
        with(Some(EtcdTls { ca: strangers.ca.clone(), identity })),
    ] {
        let before = server.log().matches(REJECTED).count();
        let watcher = Watcher::start(&refused);
        server.wait_for_log(REJECTED, before + 1).await;
        watcher.connected(false).await;
    }
    for (key, expected) in [(files.ca.with_file_name("none"), "cannot be read"), (files.ca.clone(), "cannot be used")] {
        let identity = Some((files.certificate.clone(), key));
        let error =
            with(Some(EtcdTls { ca: files.ca.clone(), identity })).check().expect_err("the file is not a key").to_string();
        assert!(error.contains(expected), "{error}");
    }
}
