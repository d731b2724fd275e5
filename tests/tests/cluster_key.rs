//! A cluster with a key, and processes that do not have it.

use anyhow::Result;
use serde_json::json;
use std::{collections::BTreeSet, fs};
use tandem::settings::{KeyFlags, PrefillPlace, UpSettings};
use tandem_kv::{HashKey, Namespace, SequenceHash, sequence_hashes};
use tandem_proto::{
    ClusterKey,
    link::{Network, endpoint},
    v1::{
        BookingsRequest, DescribeRequest, ExplainRequest, GenerateRequest, LinkRequest, PrefillRequest, PushRequest,
        RouteRequest, SnapshotRequest, WatchRequest, WorkersRequest, control_client::ControlClient, decode_client::DecodeClient,
        prefill_client::PrefillClient, router_client::RouterClient, transfer_client::TransferClient,
    },
};
use tandem_tests::{Client, Endpoint, TestCluster, sim_settings, start};
use tokio_stream::empty;
use tonic::{Code, Status};

const SECRET: &[u8] = b"the secret of one cluster in a test";

/// A cluster whose key is [`SECRET`]'s, and that prefills on prefill workers.
async fn keyed() -> Result<TestCluster> {
    let file = tempfile::NamedTempFile::new()?;
    fs::write(&file, SECRET)?;
    let key = KeyFlags { cluster_key_file: Some(file.path().to_owned()) };
    start(UpSettings { key, prefill: PrefillPlace::Remote, prefill_workers: 1, ..sim_settings() }).await
}

/// What became of every call there is, made by a process with this key.
async fn call_everything(cluster: &TestCluster, key: ClusterKey) -> Result<Vec<(&'static str, Option<Status>)>> {
    let network = Network::tcp(key);
    let to = |address: std::net::SocketAddr| anyhow::Ok(network.connect_lazy(&endpoint(&address.to_string())?));
    let [prefill, decode] = cluster.inner().workers() else { anyhow::bail!("there are two workers") };
    let mut router = RouterClient::new(to(cluster.inner().router())?);
    let (mut control, mut prefills) = (ControlClient::new(to(prefill.address)?), PrefillClient::new(to(prefill.address)?));
    let (mut decodes, mut transfer) = (DecodeClient::new(to(decode.address)?), TransferClient::new(to(decode.address)?));
    Ok(vec![
        ("Route", router.route(empty::<RouteRequest>()).await.err()),
        ("Explain", router.explain(ExplainRequest::default()).await.err()),
        ("Workers", router.workers(WorkersRequest {}).await.err()),
        ("Bookings", router.bookings(BookingsRequest::default()).await.err()),
        ("Describe", control.describe(DescribeRequest {}).await.err()),
        ("Watch", control.watch(WatchRequest::default()).await.err()),
        ("Snapshot", control.snapshot(SnapshotRequest::default()).await.err()),
        ("Prefill", prefills.prefill(empty::<PrefillRequest>()).await.err()),
        ("Generate", decodes.generate(GenerateRequest::default()).await.err()),
        ("Push", transfer.push(empty::<PushRequest>()).await.err()),
        ("Link", transfer.link(empty::<LinkRequest>()).await.err()),
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn no_call_is_served_without_the_clusters_key() -> Result<()> {
    let cluster = keyed().await?;
    let client = Client::new(cluster.frontend());
    for stranger in [ClusterKey::default(), ClusterKey::random()] {
        for (call, refused) in call_everything(&cluster, stranger).await? {
            let status = refused.unwrap_or_else(|| panic!("{call} was served"));
            assert_eq!(status.code(), Code::Unauthenticated, "{call}: {status}");
            assert!(status.message().contains("give all processes the same --cluster-key-file"), "{call}: {status}");
        }
    }
    assert_eq!(client.metric("tandem_router_unauthenticated_total", "").await?, 8.0);
    assert_eq!(client.metric("tandem_worker_unauthenticated_total", "prefill-0").await?, 8.0);
    assert_eq!(client.metric("tandem_worker_unauthenticated_total", "decode-0").await?, 6.0);
    // With the key, each is judged by what it asks for.
    for (call, refused) in call_everything(&cluster, ClusterKey::new(SECRET)?).await? {
        assert!(refused.as_ref().is_none_or(|status| status.code() != Code::Unauthenticated), "{call}: {refused:?}");
    }
    cluster.stop().await;
    Ok(())
}

/// `up` has sockets that every user of the machine can reach.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_given_no_key_makes_one_for_itself() -> Result<()> {
    let cluster = start(UpSettings { prefill_workers: 1, ..sim_settings() }).await?;
    for (call, refused) in call_everything(&cluster, ClusterKey::default()).await? {
        assert!(refused.is_some_and(|status| status.code() == Code::Unauthenticated), "{call}");
    }
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn hashes_that_a_stranger_sees_do_not_confirm_guessed_prompts() -> Result<()> {
    let cluster = keyed().await?;
    let client = Client::new(cluster.frontend());
    let text = "the codename is BLUE HERON and must not be guessed ".repeat(4);
    let request = Endpoint::Completions.request(&cluster.model_id(), &text, json!({ "max_tokens": 2 }));
    assert_eq!(client.ask(Endpoint::Completions.path(), &request).await?.status, 200);
    let mut seen = BTreeSet::new();
    for worker in cluster.inner().workers() {
        let (snapshot, _) = worker.engine.watch().await.expect("it runs");
        seen.extend(snapshot.stored.into_iter().flat_map(|chain| chain.sequence_hashes));
    }
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let model = cluster.model_id();
    let confirmed = |key: &HashKey| {
        let guesses = sequence_hashes(key, &Namespace::new(&model, "sim", "", ""), 16, &tokens[..tokens.len() - 1]);
        guesses.iter().filter(|guess: &&SequenceHash| seen.contains(guess)).count()
    };
    assert_eq!(confirmed(&ClusterKey::new(SECRET)?.hash_key()), (tokens.len() - 1) / 16, "the cluster itself knows them");
    assert_eq!([HashKey::NONE, ClusterKey::random().hash_key()].map(|key| confirmed(&key)), [0, 0]);
    cluster.stop().await;
    Ok(())
}
