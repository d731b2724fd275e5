//! Tests of a cluster with a key, and of processes that lack the key.

use anyhow::Result;
use serde_json::json;
use std::{collections::BTreeSet, fs};
use tandem::settings::{KeyArgs, PrefillPlace, UpSettings};
use tandem_kv::{HashKey, Namespace, SequenceHash, sequence_hashes};
use tandem_proto::{
    ClusterKey,
    channel::{Channel, Network, endpoint},
    v1::{
        BookingsRequest, Candidate, DescribeRequest, ExplainRequest, FailureReason, GenerateRequest, NcclControlRequest,
        Placement, PrefillRequest, PrefillStart, PushRequest, RoutePrompt, RouteRequest, Sampling, SnapshotRequest, Ticket,
        WatchRequest, WorkerRef, WorkersRequest, control_client::ControlClient, decode_client::DecodeClient, generate_reply,
        prefill_client::PrefillClient, prefill_reply, prefill_request, route_reply, route_request, router_client::RouterClient,
        transfer_client::TransferClient,
    },
};
use tandem_tests::{Client, Endpoint, TestCluster, sim_settings, sim_settings_with, start};
use tokio::sync::mpsc;
use tokio_stream::{empty, wrappers::ReceiverStream};
use tonic::{Code, Status};

const SECRET: &[u8] = b"the secret of one cluster in a test";

async fn start_with_key() -> Result<TestCluster> {
    let file = tempfile::NamedTempFile::new()?;
    fs::write(&file, SECRET)?;
    let mut settings = UpSettings { prefill_workers: 1, ..sim_settings_with(PrefillPlace::Remote) };
    settings.common.key = KeyArgs { cluster_key_file: Some(file.path().to_owned()) };
    start(settings).await
}

/// Makes every call of every service with this key. Returns the name of each call, with the error if the call was refused.
async fn make_every_call(cluster: &TestCluster, key: ClusterKey) -> Result<Vec<(&'static str, Option<Status>)>> {
    let network = Network::tcp(key);
    let to = |address: std::net::SocketAddr| anyhow::Ok(network.connect_lazy(&endpoint(&address.to_string())?));
    let [prefill, decode] = cluster.inner().workers.as_slice() else { anyhow::bail!("the cluster does not have two workers") };
    let mut router = RouterClient::new(to(cluster.inner().router)?);
    let (mut control, mut prefills) = (ControlClient::new(to(prefill.address)?), PrefillClient::new(to(prefill.address)?));
    let (mut decodes, mut transfer) = (DecodeClient::new(to(decode.address)?), TransferClient::new(to(decode.address)?));
    Ok(vec![
        ("Route", router.route(empty::<RouteRequest>()).await.err()),
        ("Explain", router.explain(ExplainRequest::default()).await.err()),
        ("Workers", router.workers(WorkersRequest {}).await.err()),
        ("Bookings", router.bookings(BookingsRequest::default()).await.err()),
        ("Describe", control.describe(DescribeRequest::default()).await.err()),
        ("Watch", control.watch(WatchRequest::default()).await.err()),
        ("Snapshot", control.snapshot(SnapshotRequest::default()).await.err()),
        ("Prefill", prefills.prefill(empty::<PrefillRequest>()).await.err()),
        ("Generate", decodes.generate(GenerateRequest::default()).await.err()),
        ("Push", transfer.push(empty::<PushRequest>()).await.err()),
        ("NcclControl", transfer.nccl_control(empty::<NcclControlRequest>()).await.err()),
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_without_the_cluster_key_are_refused() -> Result<()> {
    let cluster = start_with_key().await?;
    let client = Client::new(cluster.frontend());
    for stranger in [ClusterKey::default(), ClusterKey::random()] {
        for (call, refused) in make_every_call(&cluster, stranger).await? {
            let status = refused.unwrap_or_else(|| panic!("{call} was served"));
            assert_eq!(status.code(), Code::Unauthenticated, "{call}: {status}");
            assert!(status.message().contains("give all processes the same --cluster-key-file"), "{call}: {status}");
        }
    }
    assert_eq!(client.metric("tandem_router_unauthenticated_total", "").await?, 8.0);
    assert_eq!(client.metric("tandem_worker_unauthenticated_total", "prefill-0").await?, 8.0);
    assert_eq!(client.metric("tandem_worker_unauthenticated_total", "decode-0").await?, 6.0);
    // With the key, no call may be refused as unauthenticated.
    for (call, refused) in make_every_call(&cluster, ClusterKey::new(SECRET)?).await? {
        assert!(refused.as_ref().is_none_or(|status| status.code() != Code::Unauthenticated), "{call}: {refused:?}");
    }
    cluster.stop().await;
    Ok(())
}

/// The sockets of `up` need a key even if none is configured. Without a key, every user of the machine could call them.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_without_a_configured_key_generates_a_key() -> Result<()> {
    let cluster = start(UpSettings { prefill_workers: 1, ..sim_settings() }).await?;
    for (call, refused) in make_every_call(&cluster, ClusterKey::default()).await? {
        assert!(refused.is_some_and(|status| status.code() == Code::Unauthenticated), "{call}");
    }
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn observed_hashes_do_not_confirm_guessed_prompts() -> Result<()> {
    let cluster = start_with_key().await?;
    let client = Client::new(cluster.frontend());
    let text = "the codename is BLUE HERON and must not be guessed ".repeat(4);
    let request = Endpoint::Completions.request(&cluster.model_id(), &text, json!({ "max_tokens": 2 }));
    assert_eq!(client.answer(Endpoint::Completions.path(), &request).await?.status, 200);
    let mut cached = BTreeSet::new();
    for worker in &cluster.inner().workers {
        let engine = worker.engine.as_ref().expect("the engine runs in this process");
        let (snapshot, _) = engine.watch().await.expect("the engine thread runs");
        cached.extend(snapshot.stored.into_iter().flat_map(|chain| chain.sequence_hashes));
    }
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let model = cluster.model_id();
    let confirmed = |key: &HashKey| {
        let guesses = sequence_hashes(key, &Namespace::new(&model, "sim", "", ""), 16, &tokens[..tokens.len() - 1]);
        guesses.iter().filter(|guess: &&SequenceHash| cached.contains(guess)).count()
    };
    assert_eq!(
        confirmed(&ClusterKey::new(SECRET)?.hash_key()),
        (tokens.len() - 1) / 16,
        "the cluster's own key gives the cached hashes"
    );
    assert_eq!([HashKey::NONE, ClusterKey::random().hash_key()].map(|key| confirmed(&key)), [0, 0]);
    cluster.stop().await;
    Ok(())
}

struct Insider {
    router: RouterClient<Channel>,
    decode: DecodeClient<Channel>,
    prefill: PrefillClient<Channel>,
}

impl Insider {
    fn new(cluster: &TestCluster) -> Result<Self> {
        let network = Network::tcp(ClusterKey::new(SECRET)?);
        let to = |address: std::net::SocketAddr| anyhow::Ok(network.connect_lazy(&endpoint(&address.to_string())?));
        let [prefill, decode] = cluster.inner().workers.as_slice() else {
            anyhow::bail!("the cluster does not have two workers")
        };
        let (router, decode) = (RouterClient::new(to(cluster.inner().router)?), DecodeClient::new(to(decode.address)?));
        Ok(Self { router, decode, prefill: PrefillClient::new(to(prefill.address)?) })
    }

    async fn placed(&mut self) -> Result<[WorkerRef; 2]> {
        let identity = self.router.workers(WorkersRequest {}).await?.into_inner().identity;
        let prompt =
            RoutePrompt { request_id: "r".to_owned(), prompt_tokens: PROMPT_TOKENS, samples: 1, identity, ..Default::default() };
        let message = Some(route_request::Message::Prompt(prompt));
        let mut replies = self.router.route(tokio_stream::once(RouteRequest { message })).await?.into_inner();
        let reply = replies.message().await?.and_then(|reply| reply.message);
        let Some(route_reply::Message::Placement(Placement { decode, prefill, .. })) = reply else { anyhow::bail!("{reply:?}") };
        let worker = |candidate: Option<Candidate>| candidate.and_then(|candidate| candidate.worker);
        let [Some(decode), Some(prefill)] = [worker(decode), worker(prefill)] else {
            anyhow::bail!("the placement does not name both workers")
        };
        Ok([decode, prefill])
    }

    async fn generate(&mut self, instance_id: &str, prefill: WorkerRef) -> Result<Option<generate_reply::Message>> {
        let request = GenerateRequest {
            request_id: "r".to_owned(),
            attempt: 1,
            instance_id: instance_id.to_owned(),
            prompt: (0..PROMPT_TOKENS).collect(),
            sampling: Some(Sampling { max_tokens: Some(1), top_p: 1.0, repetition_penalty: 1.0, ..Default::default() }),
            samples: 1,
            prefill: Some(prefill),
            ..Default::default()
        };
        Ok(self.decode.generate(request).await?.into_inner().message().await?.and_then(|reply| reply.message))
    }

    async fn prefill(&mut self, instance_id: &str, ticket: Ticket) -> Result<Status> {
        let (requests, sent) = mpsc::channel(2);
        let start = PrefillStart {
            request_id: "r".to_owned(),
            attempt: 1,
            instance_id: instance_id.to_owned(),
            prompt: (0..PROMPT_TOKENS).collect(),
            ..Default::default()
        };
        requests.send(PrefillRequest { message: Some(prefill_request::Message::Start(start)) }).await?;
        let mut replies = self.prefill.prefill(ReceiverStream::new(sent)).await?.into_inner();
        let scheduled = replies.message().await?.and_then(|reply| reply.message);
        anyhow::ensure!(matches!(scheduled, Some(prefill_reply::Message::Scheduled(_))), "{scheduled:?}");
        requests.send(PrefillRequest { message: Some(prefill_request::Message::Ticket(ticket)) }).await?;
        loop {
            match replies.message().await {
                Ok(Some(reply)) => anyhow::ensure!(reply.message.is_none(), "{reply:?}"),
                Ok(None) => anyhow::bail!("the stream ended without an error"),
                Err(status) => return Ok(status),
            }
        }
    }
}

const PROMPT_TOKENS: u32 = 40;

#[tokio::test(flavor = "multi_thread")]
async fn workers_connect_to_signed_addresses_only() -> Result<()> {
    let cluster = start_with_key().await?;
    let (client, mut insider) = (Client::new(cluster.frontend()), Insider::new(&cluster)?);
    // This listener is a trap: no process of the cluster may connect to it.
    let trap = std::net::TcpListener::bind("127.0.0.1:0")?;
    trap.set_nonblocking(true)?;
    let address = trap.local_addr()?.to_string();
    let [decode, prefill] = insider.placed().await?;
    for named in [
        WorkerRef { instance_id: "mine".to_owned(), address: address.clone(), ..Default::default() },
        WorkerRef { address: address.clone(), ..prefill.clone() },
        WorkerRef { address: address.clone(), signature: decode.signature.clone(), ..prefill.clone() },
        // The first reference names a worker of the cluster, but one that is not a prefill worker.
        decode.clone(),
    ] {
        let answer = insider.generate(&decode.instance_id, named).await?;
        let Some(generate_reply::Message::Failure(failure)) = answer else { anyhow::bail!("{answer:?}") };
        assert_eq!(failure.reason(), FailureReason::InvalidRequest);
        assert!(failure.message.contains("not signed by a router of this cluster"), "{}", failure.message);
    }
    for address_signature in [Vec::new(), decode.signature.clone(), prefill.signature.clone()] {
        let ticket = Ticket { address: address.clone(), missing_blocks: vec![0], address_signature, ..Default::default() };
        let status = insider.prefill(&prefill.instance_id, ticket).await?;
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("not signed by a decode worker of this cluster"), "{status}");
    }
    let unsigned = "tandem_worker_unsigned_addresses_total";
    assert_eq!((client.metric(unsigned, "decode-0").await?, client.metric(unsigned, "prefill-0").await?), (4.0, 3.0));
    assert_eq!(trap.accept().err().map(|error| error.kind()), Some(std::io::ErrorKind::WouldBlock), "nothing has connected");

    let answer = insider.generate(&decode.instance_id, prefill).await?;
    assert!(
        matches!(answer, Some(generate_reply::Message::Scheduled(_))),
        "the address that the router names is used: {answer:?}"
    );
    cluster.stop().await;
    Ok(())
}
