//! Tests of KV events with a real NATS server: delivery, detection of lost events by their numbers, authentication and reconnection.

#[path = "../servers/certificates.rs"]
mod certificates;
#[path = "../servers/mod.rs"]
mod servers;

use certificates::Certificates;
use futures::StreamExt;
use servers::{Server, TIMEOUT};
use std::{fs, path::Path, sync::Arc, time::Duration};
use tandem_kv::{Change, KvBatch, KvEvent, SequenceHash, StoredChain};
use tandem_process::{
    Metrics, Secret,
    events::{Broker, NatsAuth, NatsSettings, Published},
};
use tandem_proto::{ClusterKey, event_batch, v1::KvEventBatch};
use tokio::{
    sync::broadcast,
    time::{sleep, timeout},
};

fn settings(server: &Server) -> NatsSettings {
    NatsSettings {
        servers: vec![server.address()],
        auth: NatsAuth::None,
        ca: None,
        identity: None,
        cluster: "c".to_owned(),
        pending_max: 1_024,
    }
}

async fn open(settings: &NatsSettings) -> (Broker, Metrics) {
    open_with(settings, ClusterKey::default()).await
}

async fn open_with(settings: &NatsSettings, key: ClusterKey) -> (Broker, Metrics) {
    let metrics = Metrics::default();
    (Broker::open(settings, key, &metrics).await.expect("the settings are valid"), metrics)
}

async fn connected(settings: &NatsSettings) -> Broker {
    let (broker, metrics) = open(settings).await;
    timeout(TIMEOUT, broker.until(true)).await.expect("NATS is connected");
    assert_eq!(value(&metrics, "tandem_events_nats_connected"), Some(1.0));
    broker
}

fn value(metrics: &Metrics, series: &str) -> Option<f64> {
    metrics.render().lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

fn event(event_id: u64, blocks: u64) -> KvEvent {
    let sequence_hashes = (0..blocks).map(|block| SequenceHash(event_id << 32 | block)).collect();
    KvEvent { event_id, change: Change::Stored(StoredChain { parent: None, sequence_hashes }) }
}

fn batch(events: Vec<KvEvent>) -> KvBatch {
    KvBatch { last_event_id: events.last().expect("a batch has events").event_id, events, ..Default::default() }
}

async fn next(published: &mut Published) -> KvEventBatch {
    timeout(TIMEOUT, published.next()).await.expect("a message arrives in time").expect("the subscription is open")
}

/// Publishes the same event until it is received, which shows that the server knows the subscription.
async fn subscribed(broker: &Broker, published: &mut Published) {
    loop {
        broker.publish(event_batch("i", &batch(vec![event(1, 1)]), 0)).await;
        if timeout(Duration::from_millis(50), published.next()).await.is_ok() {
            return;
        }
    }
}

async fn drained(broker: &Broker, published: &mut Published) {
    broker.publish(event_batch("i", &batch(vec![event(99, 1)]), 0)).await;
    while next(published).await.last_event_id != 99 {}
}

#[tokio::test]
async fn events_of_an_instance_arrive_in_order_in_bounded_messages() {
    let server = Server::nats(&[]);
    let settings = settings(&server);
    let (worker, router) = (connected(&settings).await, connected(&settings).await);
    let mut published = router.subscribe("i").await.expect("the broker is connected");
    subscribed(&worker, &mut published).await;
    drained(&worker, &mut published).await;

    let (send, batches) = broadcast::channel(16);
    let mut publishing = tokio::task::JoinSet::new();
    publishing.spawn(worker.clone().publish_all("i".to_owned(), batches));
    publishing.spawn({
        let other = NatsSettings { cluster: "other".to_owned(), ..settings.clone() };
        let (other, _) = open(&other).await;
        async move {
            other.until(true).await;
            other.publish(event_batch("i", &batch(vec![event(66, 1)]), 0)).await;
        }
    });
    // A batch without events is not published. The second batch has 100,000 blocks, which are 800 kB. The third has an event that exceeds
    // the maximum size of a message.
    send.send(Arc::new(KvBatch { last_event_id: 99, ..Default::default() })).expect("the publisher runs");
    send.send(Arc::new(batch((100..=199).map(|id| event(id, 1_000)).collect()))).expect("the publisher runs");
    send.send(Arc::new(batch(vec![event(200, 50_000), event(201, 1)]))).expect("the publisher runs");
    let mut received = Vec::new();
    let mut messages = 0;
    while received.last() != Some(&201) {
        let batch_received = next(&mut published).await;
        assert_eq!((&*batch_received.instance_id, batch_received.load), ("i", None));
        assert!(batch_received.sent_unix_us > 0);
        received.extend(batch_received.events.iter().map(|event| event.event_id));
        if batch_received.events.is_empty() {
            assert_eq!(batch_received.last_event_id, 200, "a batch without its too long event still has the event's id");
        }
        messages += 1;
    }
    assert_eq!(received, (100..=199).chain([201]).collect::<Vec<_>>());
    assert!((5..=12).contains(&messages), "{messages} messages");
}

#[tokio::test]
async fn messages_without_a_valid_signature_are_dropped_and_counted() {
    let server = Server::nats(&[]);
    let (settings, key) = (settings(&server), ClusterKey::random());
    let ((worker, _), (router, metrics)) = (open_with(&settings, key.clone()).await, open_with(&settings, key).await);
    let ((keyless, _), (stranger, _)) = (open(&settings).await, open_with(&settings, ClusterKey::random()).await);
    for broker in [&worker, &router, &keyless, &stranger] {
        timeout(TIMEOUT, broker.until(true)).await.expect("NATS is connected");
    }
    let mut published = router.subscribe("i").await.expect("the broker is connected");
    subscribed(&worker, &mut published).await;
    let forged = event_batch("i", &batch(vec![event(666, 1)]), 0);
    keyless.publish(forged.clone()).await;
    stranger.publish(forged).await;
    let raw = async_nats::connect(server.address()).await.expect("NATS is connected");
    let mut others = raw.subscribe("tandem.c.kv.j").await.expect("the broker is connected");
    let replayed = loop {
        worker.publish(event_batch("j", &batch(vec![event(666, 1)]), 0)).await;
        if let Ok(Some(message)) = timeout(Duration::from_millis(50), others.next()).await {
            break message.payload;
        }
    };
    raw.publish("tandem.c.kv.i", replayed).await.expect("the broker is connected");
    while value(&metrics, "tandem_events_nats_forged_total") != Some(3.0) {
        worker.publish(event_batch("i", &batch(vec![event(2, 1)]), 0)).await;
        assert!(next(&mut published).await.last_event_id <= 2, "only the worker's own messages are received");
    }
}

#[tokio::test]
async fn connection_survives_a_late_start_and_restarts_of_nats() {
    let mut server = Server::nats(&[]);
    server.kill();
    let settings = settings(&server);
    let (broker, metrics) = open(&settings).await;
    assert!(!broker.is_connected());
    broker.publish(event_batch("i", &batch(vec![event(1, 1)]), 0)).await;
    let mut published = broker.subscribe("i").await.expect("subscriptions are kept");
    for _ in 0..2 {
        server.start();
        timeout(TIMEOUT, broker.until(true)).await.expect("NATS is connected");
        subscribed(&broker, &mut published).await;
        server.kill();
        timeout(TIMEOUT, broker.until(false)).await.expect("the end of NATS is detected");
        assert_eq!(value(&metrics, "tandem_events_nats_connected"), Some(0.0));
    }
}

#[tokio::test]
async fn slow_subscriber_detects_gap() {
    let server = Server::nats(&[]);
    let settings = NatsSettings { pending_max: 8, ..settings(&server) };
    let (worker, (router, metrics)) = (connected(&settings).await, open(&settings).await);
    router.until(true).await;
    let mut published = router.subscribe("i").await.expect("the broker is connected");
    subscribed(&worker, &mut published).await;
    for id in 100..200 {
        worker.publish(event_batch("i", &batch(vec![event(id, 100)]), 0)).await;
    }
    let lost = async {
        while value(&metrics, "tandem_events_nats_lost_total") == Some(0.0) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TIMEOUT, lost).await.expect("the loss is detected");
    let mut ids = Vec::new();
    while let Ok(Some(batch_received)) = timeout(Duration::from_millis(200), published.next()).await {
        ids.extend(batch_received.events.iter().map(|event| event.event_id));
    }
    ids.retain(|id| *id >= 100);
    assert!(ids.len() < 100, "{} events arrived", ids.len());
    subscribed(&worker, &mut published).await;
}

#[tokio::test]
async fn client_authenticates_by_password_token_or_nkey() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    // The test's key pair was made with `nk -gen user -pubout`.
    let seed = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY\n".to_owned();
    let nkey = folder.path().join("nkey.conf");
    fs::write(&nkey, "authorization { users: [ { nkey: UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4 } ] }")
        .expect("the folder is writable");
    let config = format!("--config={}", nkey.display());
    let user = |password: &str| NatsAuth::User("u".to_owned(), password.to_owned().into());
    let token = |token: &str| NatsAuth::Token(token.to_owned().into());
    for (args, good, bad) in [
        (&["--user=u", "--pass=right"][..], user("right"), user("wrong")),
        (&["--auth=right"], token("right"), token("wrong")),
        (&[&*config], NatsAuth::Nkey(seed.into()), NatsAuth::None),
    ] {
        let server = Server::nats(args);
        let (refused, metrics) = open(&NatsSettings { auth: bad, ..settings(&server) }).await;
        connected(&NatsSettings { auth: good, ..settings(&server) }).await;
        server.wait_for_log("authentication error", 1).await;
        assert!(!refused.is_connected());
        assert_eq!(value(&metrics, "tandem_events_nats_connected"), Some(0.0));
    }
    assert!(!format!("{:?}", user("hidden")).contains("hidden"));
}

/// Rotates the secret with which a process authenticates itself. `accepted` is what the server's configuration says of each secret.
async fn rotate(auth: impl FnOnce(Secret) -> NatsAuth, accepted: [&str; 2], secrets: [&str; 2]) {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let (config, file) = (folder.path().join("nats.conf"), folder.path().join("secret"));
    let write = |path: &Path, text: &str| fs::write(path, text).expect("the folder is writable");
    let accept = |one: &str| write(&config, &format!("authorization {{ {one} }}"));
    accept(accepted[0]);
    write(&file, secrets[0]);
    let server = Server::nats(&[&format!("--config={}", config.display())]);
    let auth = auth(Secret::in_file(file.clone()).expect("the file holds a secret"));
    let broker = connected(&NatsSettings { auth, ..settings(&server) }).await;
    accept(accepted[1]);
    server.signal("-HUP");
    timeout(TIMEOUT, broker.until(false)).await.expect("NATS closes the connection");
    write(&file, secrets[1]);
    timeout(TIMEOUT, broker.until(true)).await.expect("NATS accepts the new secret");
}

#[tokio::test]
async fn rotated_secret_is_read_from_its_file_when_nats_refuses_the_last_one() {
    let user = |password| NatsAuth::User("u".to_owned(), password);
    rotate(user, ["user: u, password: first", "user: u, password: second"], ["first", "second"]).await;
    rotate(NatsAuth::Token, ["token: first", "token: second"], ["first", "second"]).await;
    let pairs = [nkeys::KeyPair::new_user(), nkeys::KeyPair::new_user()];
    let accepted = pairs.each_ref().map(|pair| format!("users: [ {{ nkey: {} }} ]", pair.public_key()));
    let seeds = pairs.each_ref().map(|pair| pair.seed().expect("the pair has a seed"));
    rotate(NatsAuth::Nkey, accepted.each_ref().map(String::as_str), seeds.each_ref().map(String::as_str)).await;
}

#[tokio::test]
async fn tls_verifies_server_and_client() {
    let (files, strangers) = (Certificates::new(), Certificates::new());
    let arg = |name: &str, file: &Path| format!("--{name}={}", file.display());
    let args = [arg("tlscert", &files.certificate), arg("tlskey", &files.key), arg("tlscacert", &files.ca)];
    let server = Server::nats(&["--tlsverify", &args[0], &args[1], &args[2]]);
    let identity = Some((files.certificate.clone(), files.key.clone()));
    let with = |ca: &Path, identity| NatsSettings { ca: Some(ca.to_owned()), identity, ..settings(&server) };
    connected(&with(&files.ca, identity.clone())).await;
    let (stranger, _) = open(&with(&strangers.ca, identity)).await;
    let (anonymous, _) = open(&with(&files.ca, None)).await;
    server.wait_for_log("TLS handshake error", 2).await;
    assert!(!stranger.is_connected() && !anonymous.is_connected());
}

#[tokio::test]
async fn open_rejects_invalid_settings() {
    let server = "127.0.0.1:1";
    let none = Path::new("/none");
    let good = NatsSettings {
        servers: vec![server.to_owned()],
        auth: NatsAuth::None,
        ca: None,
        identity: None,
        cluster: "c".to_owned(),
        pending_max: 1,
    };
    for (bad, expected) in [
        (NatsSettings { servers: vec!["u:p@h:1".to_owned()], ..good.clone() }, "write host:port"),
        (NatsSettings { servers: vec!["http://h:1".to_owned()], ..good.clone() }, "write host:port"),
        (NatsSettings { ca: Some(none.to_owned()), ..good.clone() }, "/none"),
        (NatsSettings { identity: Some((none.to_owned(), none.to_owned())), ..good.clone() }, "/none"),
        (NatsSettings { auth: NatsAuth::Credentials("x".to_owned().into()), ..good.clone() }, "check that --nats-creds"),
        (NatsSettings { auth: NatsAuth::Nkey("x".to_owned().into()), ..good.clone() }, "--nats-nkey"),
    ] {
        let error = Broker::open(&bad, ClusterKey::default(), &Metrics::default())
            .await
            .expect_err("the settings are invalid")
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
}
