//! Tests of SGLang servers that compute one half of each request, and meet in rooms.

use super::{
    sglang::{Sglang, sglang},
    *,
};
use serde_json::{Value, json};
use tandem::audit;
use tandem_devices::sim::SimSettings;
use tandem_engine::{KvHandle, Prefill, Refusal, new_room};
use tandem_frontend::FrontendSettings;
use tandem_kv::prompt_digest;
use tandem_process::discovery::MemberSource;
use tandem_proto::{
    channel::endpoint,
    v1::{
        self, FailureReason, KvRoom, PrefillReply, PrefillRequest, PrefillStart, prefill_client::PrefillClient, prefill_reply,
        prefill_request::Message,
    },
};
use tandem_router::RouterSettings;
use tandem_tests::{
    Client, Endpoint,
    fake_sglang::SglangFake,
    prose,
    services::{Services, worker_settings},
    wait_until,
};
use tandem_text::ServedModel;
use tandem_worker::{KvExchange, Ledger, WorkerError, WorkerSettings};
use tempfile::TempDir;
use tokio::{sync::mpsc, time::Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

fn half(disaggregation_mode: &'static str) -> SglangFake {
    SglangFake { disaggregation_mode, page_size: 16, ..SglangFake::default() }
}

async fn pair(step: Duration) -> Result<(Sglang, Sglang)> {
    let of = |mode| SglangFake { step, ..half(mode) };
    Ok((sglang(of("prefill"), |_| {}).await?, sglang(of("decode"), |_| {}).await?))
}

fn prefill_of(request: &Generate) -> Prefill {
    let Generate { request_id, account, priority, namespace, prompt, sampling, .. } = request.clone();
    Prefill { request_id, account, priority, namespace, prompt, first_token: Some(Box::new(sampling)) }
}

/// Submits both halves of a request, and names the room.
async fn submit((prefill, decode): &(Sglang, Sglang), request: Generate) -> Result<(Box<dyn Job>, Box<dyn Job>)> {
    let mut of_prompt = prefill.adapter.prefill(prefill_of(&request)).await?;
    let mut of_answer = decode.adapter.generate(Generate { kv: KvSource::Handle, ..request }).await?;
    let KvExchange::Rooms { address: Some(address), .. } = prefill.adapter.kv_exchange() else { panic!("the server prefills") };
    let room = KvHandle::of_room(address, new_room(), LIMIT);
    for job in [&mut of_prompt, &mut of_answer] {
        assert!(matches!(next(&mut **job).await?, Some(Event::Submitted)));
        job.pull(room.clone()).await;
    }
    Ok((of_prompt, of_answer))
}

#[tokio::test]
async fn halves_of_a_request_meet_and_only_the_prefill_server_counts_the_prompt() -> Result<()> {
    let pair = pair(Duration::from_millis(1)).await?;
    let prompt = prompt(1, 100);
    for (cached, seed) in [(0, None), (96, None), (96, Some(7))] {
        let mut request = generate(&prompt, 6);
        (request.sampling.temperature, request.sampling.seed) = (if seed.is_some() { 1.0 } else { 0.0 }, seed.unwrap_or(0));
        request.sampling.logprobs = Some(1);
        let (mut of_prompt, mut of_answer) = submit(&pair, request).await?;
        let (report, counted) = tokio::try_join!(read(&mut *of_answer), read(&mut *of_prompt))?;
        assert_eq!((report.tokens_of(0), report.cached, report.started), (continuation(&prompt, 6, seed), None, 1));
        assert_eq!(
            counted,
            Report {
                cached: Some(Some(CachedTokens::on_device(cached))),
                other: vec!["Computed([])".to_owned()],
                ..Report::default()
            }
        );
    }
    let bodies = [pair.0.fake.seen(), pair.1.fake.seen()].concat();
    let rooms: Vec<&Value> = bodies.iter().map(|body| &body["bootstrap_room"]).collect();
    assert_eq!(rooms[..3], rooms[3..], "both halves have the same rooms");
    assert!(
        rooms[0] != rooms[1]
            && bodies.iter().all(|body| body["bootstrap_host"] == "127.0.0.1" && body["bootstrap_port"] == 8_998)
    );
    Ok(())
}

/// Without the other half, a real server waits for minutes.
#[tokio::test]
async fn abandoned_half_is_aborted_at_once() -> Result<()> {
    let (prefill, decode) = &pair(Duration::from_millis(1)).await?;
    // Each half is alone in its room.
    let address = "127.0.0.1:8998";
    let mut of_prompt = prefill.adapter.prefill(prefill_of(&generate(&prompt(2, 100), 3))).await?;
    of_prompt.pull(KvHandle::of_room(address, new_room(), LIMIT)).await;
    let alone = Generate { kv: KvSource::Handle, ..generate(&prompt(2, 100), 3) };
    let mut of_answer = decode.adapter.generate(alone).await?;
    of_answer.pull(KvHandle::of_room(address, new_room(), LIMIT)).await;
    until("both halves run", || {
        poll(&mut *of_prompt);
        poll(&mut *of_answer);
        (prefill.fake.running(), decode.fake.running()) == (1, 1)
    })
    .await?;
    drop((of_prompt, of_answer));
    until("both servers are idle", || prefill.fake.running() + decode.fake.running() == 0).await?;
    for fake in [&prefill.fake, &decode.fake] {
        assert_eq!(fake.aborts()[0], fake.seen()[0]["rid"].as_str().unwrap_or_default());
    }
    Ok(())
}

/// The first call to abort a request may reach the server before the request.
#[tokio::test]
async fn cancelled_half_is_aborted_until_it_ends() -> Result<()> {
    let (prefill, _) = pair(Duration::from_millis(200)).await?;
    let mut job = prefill.adapter.prefill(prefill_of(&generate(&prompt(1, 100), 3))).await?;
    assert!(matches!(next(&mut *job).await?, Some(Event::Submitted)));
    job.pull(KvHandle::of_room("127.0.0.1:8998", new_room(), LIMIT)).await;
    until("the half runs", || {
        poll(&mut *job);
        prefill.fake.running() == 1
    })
    .await?;
    prefill.fake.ignore_abort();
    prefill.fake.ignore_abort();
    job.cancel();
    assert_eq!(read(&mut *job).await?, Report { cached: Some(None), ..Report::default() });
    assert_eq!(prefill.fake.running(), 0);
    Ok(())
}

#[tokio::test]
async fn server_of_one_half_refuses_whole_requests_and_the_other_role() -> Result<()> {
    let (prefill, decode) = pair(Duration::from_millis(1)).await?;
    for adapter in [&prefill.adapter, &decode.adapter] {
        let refused = adapter.generate(generate(&prompt(1, 40), 1)).await;
        assert!(matches!(refused, Err(Refusal::Unsupported(why)) if why.contains("only one half")));
    }
    assert_eq!(prefill.adapter.kv_exchange().family(), decode.adapter.kv_exchange().family());
    assert!(decode.adapter.kv_exchange().computes_no_prompts() && !prefill.adapter.kv_exchange().computes_no_prompts());
    assert!(!decode.adapter.assumes_cache() && !prefill.adapter.assumes_cache());
    let listener = || async { tokio::net::TcpListener::bind("127.0.0.1:0").await };
    let (metrics, stop) = (tandem_process::Metrics::default(), tandem_process::Shutdown::default());
    let settings = tandem_decode_worker::DecodeWorkerSettings {
        worker: worker_settings("decode-0", "fake"),
        advertise: None,
        remote_waiting_max: 1,
        receive_timeout: LIMIT,
        transfer_mode: tandem_transfer::TransferMode::Tcp,
    };
    let refused = tandem_decode_worker::run(listener().await?, prefill.adapter, settings, metrics.clone(), stop.clone()).await;
    assert!(matches!(refused, Err(tandem_decode_worker::DecodeWorkerError::Worker(WorkerError::OnlyPrompts))), "{refused:?}");
    let settings = tandem_prefill_worker::PrefillWorkerSettings {
        worker: worker_settings("prefill-0", "fake"),
        ticket_wait: LIMIT,
        transfer_mode: tandem_transfer::TransferMode::Tcp,
    };
    let refused = tandem_prefill_worker::run(listener().await?, decode.adapter, settings, metrics, stop).await;
    assert!(matches!(refused, Err(WorkerError::NoKvExchange)), "{refused:?}");
    Ok(())
}

struct Cluster {
    services: Services,
    client: Client,
    prefill: Vec<Sglang>,
    decode: Sglang,
    prefill_worker: String,
    folder: TempDir,
}

impl Cluster {
    async fn start(step: Duration, prefill_workers: usize) -> Result<Self> {
        Self::start_with(SglangFake { step, ..SglangFake::default() }, prefill_workers).await
    }

    async fn start_with(fake: SglangFake, prefill_workers: usize) -> Result<Self> {
        let (services, folder) = (Services::default(), tempfile::tempdir()?);
        let half = |disaggregation_mode| SglangFake { disaggregation_mode, page_size: 16, ..fake.clone() };
        let unkeyed = |settings: &mut tandem_adapter::sglang::SglangSettings| settings.hash_key = HashKey::NONE;
        let worker = |name: &str| -> Result<WorkerSettings> {
            Ok(WorkerSettings { ledger: Ledger::open(&folder.path().join(name))?, ..worker_settings(name, "fake") })
        };
        let (mut prefill, mut workers) = (Vec::new(), Vec::new());
        for number in 0..prefill_workers {
            let server = sglang(half("prefill"), unkeyed).await?;
            let sim = SimSettings::default();
            let worker = services.prefill_worker(worker(&format!("prefill-{number}"))?, server.adapter.clone(), &sim).await?;
            workers.push(worker.to_string());
            prefill.push(server);
        }
        let prefill_worker = workers[0].clone();
        let decode = sglang(half("decode"), unkeyed).await?;
        workers.push(services.decode_worker(worker("decode-0")?, decode.adapter.clone()).await?.to_string());
        let workers = MemberSource::List(workers);
        let router = services.router(RouterSettings { workers, ..RouterSettings::default() }).await?;
        let model = ServedModel::sim("fake").with_context_length(4_096);
        let client = Client::new(services.frontend(FrontendSettings::new(router.to_string(), model)).await?);
        services.ready(1 + prefill_workers, &client).await?;
        Ok(Self { services, client, prefill, decode, prefill_worker, folder })
    }

    fn running(&self) -> usize {
        self.prefill.iter().map(|server| server.fake.running()).sum::<usize>() + self.decode.fake.running()
    }

    /// Waits until usage, ledgers and metrics agree. Returns the number of prompts in the ledgers.
    async fn assert_usage_reconciles(&self) -> Result<()> {
        let check = || -> Result<_> {
            let ledgers: Vec<_> = std::fs::read_dir(self.folder.path())?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
            let mut evidence = audit::read(&[], &ledgers, &[])?;
            evidence.client = self.client.lines();
            evidence.metrics.add(&self.services.metrics.render());
            Ok(audit::check(&evidence))
        };
        let agree = wait_until("usage reconciles", async || Ok(check()?.1.is_empty())).await;
        let findings = check()?.1;
        agree.with_context(|| findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    }
}

#[tokio::test]
async fn answers_over_a_pair_have_the_prefill_servers_count_of_cached_tokens() -> Result<()> {
    let cluster = Cluster::start(Duration::from_millis(1), 1).await?;
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        for (stream, samples) in [(false, 1), (true, 1), (false, 3)] {
            let mut options = json!({ "n": samples, "temperature": 1, "seed": 5, "stream": stream, "max_tokens": 9 });
            if stream {
                options["stream_options"] = json!({ "include_usage": true });
            }
            let request = endpoint.request("fake", &prose(&format!("{endpoint:?} {stream} {samples}"), 300), options);
            let cold = cluster.client.answer(endpoint.path(), &request).await?;
            let warm = cluster.client.answer(endpoint.path(), &request).await?;
            let reusable = (cold.usage("/prompt_tokens") - 1) / 16 * 16;
            assert_eq!((cold.cached_tokens(), warm.cached_tokens()), (0, reusable), "{endpoint:?} {stream} {samples}");
            assert_eq!(warm.details()["cached_tokens_source"], "worker");
            for sample in 0..samples {
                assert_eq!(cold.text(sample), warm.text(sample), "the answer depends only on the seed");
            }
            assert!(samples == 1 || cold.text(0) != cold.text(1), "each sample has its own seed");
        }
    }
    let one_token = json!({ "model": "fake", "prompt": [7], "max_tokens": 3, "temperature": 0 });
    assert_eq!(cluster.client.answer("/v1/completions", &one_token).await?.usage("/completion_tokens"), 3);
    let logprobs = json!({ "model": "fake", "prompt": [7, 8, 9], "max_tokens": 1, "prompt_logprobs": 1 });
    let refused = cluster.client.send("/v1/completions", &logprobs).await?;
    let (status, body) = (refused.status().as_u16(), refused.text().await?);
    assert!(status == 400 && body.contains("no logprobs of a prompt"), "{status} {body}");
    cluster.assert_usage_reconciles().await?;
    until("both servers are idle", || cluster.running() == 0).await
}

#[tokio::test]
async fn requests_of_a_failed_prefill_server_are_computed_on_another_pair() -> Result<()> {
    let cluster = Cluster::start(Duration::from_millis(5), 2).await?;
    let request = |number| {
        Endpoint::Completions.request("fake", &prose(&format!("{number}"), 300), json!({ "max_tokens": 20, "temperature": 0 }))
    };
    cluster.prefill[0].fake.fail(true);
    for number in 0..8 {
        let answer = cluster.client.answer(Endpoint::Completions.path(), &request(number)).await?;
        assert_eq!(answer.usage("/completion_tokens"), 20);
    }
    until("no half is left", || cluster.running() == 0).await?;
    assert!(!cluster.decode.fake.aborts().is_empty(), "the halves whose prefill had failed were aborted");
    cluster.assert_usage_reconciles().await
}

/// A decode server answers as soon as it has received KV, although the prefill server may still find that the KV is not complete.
#[tokio::test]
async fn no_token_is_sent_before_the_prefill_server_has_confirmed_its_transfer() -> Result<()> {
    let confirmation = Duration::from_millis(300);
    let cluster = Cluster::start_with(SglangFake { confirmation, ..SglangFake::default() }, 2).await?;
    let request = |number| {
        let options = json!({ "max_tokens": 5, "temperature": 0, "stream": true, "stream_options": { "include_usage": true } });
        Endpoint::Completions.request("fake", &prose(&format!("confirmed {number}"), 300), options)
    };
    let began = Instant::now();
    let mut response = cluster.client.send(Endpoint::Completions.path(), &request(0)).await?;
    let first = loop {
        let chunk = response.chunk().await?.context("the answer has no token")?;
        if String::from_utf8_lossy(&chunk).contains("\"text\":\"") {
            break began.elapsed();
        }
    };
    assert!(first >= confirmation, "{first:?}");
    // The answers of the decode server are dropped, and another prefill server computes the prompts.
    cluster.prefill[0].fake.confirm(false);
    for number in 1..7 {
        let answer = cluster.client.answer(Endpoint::Completions.path(), &request(number)).await?;
        assert_eq!(answer.usage("/completion_tokens"), 5);
    }
    assert!(cluster.prefill[0].fake.seen().len() > 1, "the first prefill server was used");
    cluster.assert_usage_reconciles().await
}

/// The decode server of the first pair is lost. Its prefill server must remain in use: there is no other one.
#[tokio::test]
async fn lost_decode_server_is_not_blamed_on_the_prefill_server() -> Result<()> {
    let (_, Sglang { adapter, fake, follower: _follower }) = pair(Duration::from_millis(1)).await?;
    let request = Generate { kv: KvSource::Handle, ..generate(&prompt(1, 40), 3) };
    let mut job = adapter.generate(request).await?;
    assert!(matches!(next(&mut *job).await?, Some(Event::Submitted)));
    job.pull(KvHandle::of_room("127.0.0.1:8998", new_room(), LIMIT)).await;
    until("the half has begun and crashed", || {
        poll(&mut *job);
        fake.crash();
        !fake.seen().is_empty() && fake.running() == 0
    })
    .await?;
    assert_eq!(read(&mut *job).await?.other, ["Failed"], "a failed pull would name the prefill worker");
    Ok(())
}

#[tokio::test]
async fn both_halves_end_when_the_client_leaves() -> Result<()> {
    let cluster = Cluster::start(Duration::from_millis(20), 1).await?;
    let options = json!({ "max_tokens": 1_500, "stream": true });
    let request = Endpoint::Completions.request("fake", &prose("leaves", 300), options);
    let mut response = cluster.client.send(Endpoint::Completions.path(), &request).await?;
    response.chunk().await?.context("the answer did not begin")?;
    drop(response);
    until("both servers are idle", || cluster.running() == 0).await?;
    cluster.assert_usage_reconciles().await
}

async fn open(address: &str, start: PrefillStart) -> Result<(mpsc::Sender<PrefillRequest>, Streaming<PrefillReply>)> {
    let (requests, receiver) = mpsc::channel(4);
    requests.try_send(PrefillRequest { message: Some(Message::Start(start)) })?;
    let channel = endpoint(address)?.connect().await?;
    Ok((requests, PrefillClient::new(channel).prefill(ReceiverStream::new(receiver)).await?.into_inner()))
}

/// A real prefill server sends the KV of whatever prompt it has, and the decode server answers from it without an error.
#[tokio::test]
async fn prompt_that_was_swapped_never_reaches_the_prefill_server() -> Result<()> {
    let cluster = Cluster::start(Duration::from_millis(1), 1).await?;
    let fake = &cluster.prefill[0].fake;
    let mut described = tandem_proto::v1::control_client::ControlClient::new(endpoint(&cluster.prefill_worker)?.connect().await?);
    let info = described.describe(v1::DescribeRequest::default()).await?.into_inner();
    let sampling = v1::Sampling { temperature: 1.0, top_p: 1.0, repetition_penalty: 1.0, ..Default::default() };
    let start = || PrefillStart {
        request_id: "r".to_owned(),
        instance_id: info.instance_id.clone(),
        prompt: prompt(1, 100),
        cache_namespace: namespace().as_bytes().to_vec(),
        sampling: Some(sampling.clone()),
        ..PrefillStart::default()
    };
    let before = fake.seen().len();
    for (of, other_namespace) in
        [(prompt(2, 100), namespace()), (prompt(1, 99), namespace()), (prompt(1, 100), Namespace::new("fake", "", "", "other"))]
    {
        let (requests, mut replies) = open(&cluster.prefill_worker, start()).await?;
        let submitted = replies.message().await?.context("the worker answers")?.message;
        assert!(
            matches!(submitted, Some(prefill_reply::Message::Submitted(v1::Submitted { room_address })) if room_address == "127.0.0.1:8998")
        );
        let room = KvRoom { room: new_room(), prompt_digest: prompt_digest(&HashKey::NONE, &other_namespace, &of) };
        requests.send(PrefillRequest { message: Some(Message::Room(room)) }).await?;
        let ended = replies.message().await?.context("the worker answers")?.message;
        assert!(
            matches!(&ended, Some(prefill_reply::Message::Failure(failure)) if failure.reason() == FailureReason::Unspecified),
            "{ended:?}"
        );
    }
    assert_eq!((fake.seen().len(), fake.running()), (before, 0));
    let (_requests, mut replies) = open(&cluster.prefill_worker, PrefillStart { sampling: None, ..start() }).await?;
    let refused = replies.message().await.expect_err("the engine cannot sample the first token");
    assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    Ok(())
}

#[test]
fn rooms_are_signed_numbers_and_never_drawn_twice() {
    let rooms: std::collections::BTreeSet<u64> = (0..10_000).map(|_| new_room()).collect();
    assert!(rooms.len() == 10_000 && rooms.iter().all(|room| *room < 1 << 62));
    let handle = KvHandle::of_room("[::1]:8998", 7, LIMIT);
    assert_eq!(handle.room(), Some(("[::1]:8998", 7)));
    assert!(!format!("{handle:?}").contains("8998"), "rooms are not logged");
}
