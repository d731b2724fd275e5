//! The conformance suite of back ends. Each test runs on Tandem's engine, and on the adapter with a vLLM, a SGLang and a
//! llama.cpp server.

use super::{
    sglang::{Sglang, sglang},
    *,
};
use std::any::Any;
use tandem_adapter::{
    llama_cpp::{self, LlamaCppSettings},
    sglang::SglangSettings,
};
use tandem_devices::sim::{SimEngine, SimSettings};
use tandem_engine::{EngineHandle, EngineSettings, Generated, Prefill, Refusal};
use tandem_kv::{BlockAccess, Change, Load, sequence_hashes};
use tandem_proto::{
    channel,
    v1::{
        DescribeRequest, FailureReason, GenerateReply, GenerateRequest, control_client::ControlClient,
        decode_client::DecodeClient, generate_reply::Message,
    },
};
use tandem_tests::{
    fake_llama_cpp::{FakeLlamaCpp, LlamaCppFake},
    fake_sglang::SglangFake,
    services::{Services, engine_settings, worker_settings},
};
use tandem_worker::KvExchange;

const BLOCK_SIZE: usize = 16;

struct BackEnd {
    name: &'static str,
    kind: Kind,
    /// Returns how many tokens of a repeated prompt are cached, given the prompt's length.
    reusable: fn(usize) -> usize,
    /// The number of connections that the server of an external engine has accepted.
    connections: Arc<AtomicUsize>,
    /// The server of an external engine, and the task that applies its events.
    _server: Box<dyn Any + Send>,
}

enum Kind {
    Own(EngineHandle),
    External(Adapter),
}

#[derive(Clone, Copy)]
struct Setup {
    running_max: u32,
    waiting_max: u32,
    /// The duration of a step that generates a token.
    step: Duration,
}

const FAST: Setup = Setup { running_max: 8, waiting_max: 8, step: Duration::from_micros(100) };
const SLOW: Setup = Setup { step: Duration::from_millis(5), ..FAST };

impl BackEnd {
    /// Returns one back end of each kind.
    async fn all(setup: Setup) -> Result<Vec<Self>> {
        Ok(vec![Self::own(setup), Self::vllm(setup).await?, Self::sglang(setup).await?, Self::llama_cpp(setup).await?])
    }

    fn own(Setup { running_max, waiting_max, step }: Setup) -> Self {
        let fixed = SimSettings { decode_step: step, decode_per_sequence: Duration::ZERO, ..SimSettings::default() };
        let sim = SimSettings { prefill_overhead: Duration::ZERO, prefill_tokens_per_second: 1e6, ..fixed };
        let settings = EngineSettings { batch_max: running_max, queue_max: waiting_max, ..engine_settings() };
        let settings = EngineSettings { hash_key: HashKey::new([7; 16]), ..settings };
        Self {
            name: "Tandem's engine",
            kind: Kind::Own(EngineHandle::start(Box::new(SimEngine::new(sim).in_real_time()), settings)),
            reusable: |len| (len - 1) / BLOCK_SIZE * BLOCK_SIZE,
            connections: Arc::default(),
            _server: Box::new(()),
        }
    }

    async fn vllm(Setup { running_max, waiting_max, step }: Setup) -> Result<Self> {
        let fake = FakeSettings { step, ..FakeSettings::default() };
        let limits = |settings: &mut VllmSettings| {
            (settings.running_max, settings.waiting_max) = (running_max as usize, waiting_max as usize);
        };
        let External { fake, adapter, follower } = external(fake, limits).await?;
        Ok(Self {
            name: "vLLM",
            kind: Kind::External(adapter),
            reusable: |len| (len - 1) / 32 * 32,
            connections: Arc::clone(&fake.connections),
            _server: Box::new((fake, follower)),
        })
    }

    async fn sglang(Setup { running_max, waiting_max, step }: Setup) -> Result<Self> {
        let limits = |settings: &mut SglangSettings| {
            (settings.running_max, settings.waiting_max) = (running_max as usize, waiting_max as usize);
        };
        let Sglang { fake, adapter, follower } = sglang(SglangFake { step, ..SglangFake::default() }, limits).await?;
        Ok(Self {
            name: "SGLang",
            kind: Kind::External(adapter),
            reusable: |len| (len - 1) / 32 * 32,
            connections: Arc::clone(&fake.connections),
            _server: Box::new((fake, follower)),
        })
    }

    async fn llama_cpp(Setup { running_max, waiting_max, step }: Setup) -> Result<Self> {
        let fake = FakeLlamaCpp::start(LlamaCppFake { slots: running_max as usize, step, ..LlamaCppFake::default() }).await?;
        let settings = LlamaCppSettings {
            url: fake.url(),
            key: None,
            ca: None,
            block_size: BLOCK_SIZE as u32,
            hash_key: HashKey::new([7; 16]),
            waiting_max: waiting_max as usize,
            prefix_caching: true,
            silence_max: Duration::from_secs(60),
        };
        let (adapter, follower) = llama_cpp::connect(settings).await?.into_parts();
        let mut following = JoinSet::new();
        following.spawn(follower);
        Ok(Self {
            name: "llama.cpp",
            kind: Kind::External(adapter),
            reusable: |len| len - 1,
            connections: Arc::default(),
            _server: Box::new((fake, following)),
        })
    }

    fn get(&self) -> &dyn Backend {
        match &self.kind {
            Kind::Own(engine) => engine,
            Kind::External(adapter) => adapter,
        }
    }

    async fn run(&self, generate: Generate) -> Result<Report> {
        read(&mut *self.get().generate(generate).await?).await
    }

    /// Waits until the load satisfies the condition. Each of the back end's blocks must always be in exactly one state.
    async fn until(&self, fits: impl Fn(&Load) -> bool) -> Result<()> {
        let polling = async {
            loop {
                let load = self.get().watch().await.context("the engine has ended")?.load;
                let all = load.free_blocks + load.cached_blocks + load.in_use_blocks;
                anyhow::ensure!(all == self.get().info().capacity_blocks, "{load:?}");
                if fits(&load) {
                    return Ok(());
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(LIMIT, polling).await.with_context(|| format!("the load of {} never satisfies the condition", self.name))?
    }

    async fn idle(&self) -> Result<()> {
        let work = |load: &Load| {
            u64::from(load.running_sequences + load.waiting_requests + load.in_use_blocks) + load.pending_prefill_tokens
        };
        self.until(|load| work(load) == 0).await
    }

    async fn decode_worker(&self, services: &Services) -> Result<std::net::SocketAddr> {
        let settings = worker_settings(self.name, "fake");
        match &self.kind {
            Kind::Own(engine) => services.decode_worker(settings, engine.clone()).await,
            Kind::External(adapter) => services.decode_worker(settings, adapter.clone()).await,
        }
    }
}

/// Returns a request in a namespace without a cache salt, which all back ends serve.
fn request(prompt: &[TokenId], max_tokens: u32) -> Generate {
    Generate { namespace: Namespace::new("fake", "", "", ""), ..generate(prompt, max_tokens) }
}

#[tokio::test]
async fn events_of_a_generation_are_complete_and_in_order() -> Result<()> {
    for back_end in BackEnd::all(FAST).await? {
        for samples in [1, 3] {
            let name = format!("{} with {samples} samples", back_end.name);
            let prompt = prompt(samples, 100);
            let mut job = back_end.get().generate(Generate { samples, ..request(&prompt, 5) }).await?;
            let (mut counted, mut started, mut tokens, mut finished) = (None, false, vec![0; samples as usize], Vec::new());
            let mut is_first = true;
            while let Some(event) = next(&mut *job).await? {
                match event {
                    Event::Submitted => assert!(is_first, "{name}"),
                    Event::Scheduled { cached } => {
                        assert_eq!(counted.replace(cached), None, "{name}: the cached tokens are reported once")
                    }
                    Event::Started(_) => assert!(!std::mem::replace(&mut started, true), "{name}"),
                    Event::Token { sample, .. } => {
                        assert!(started && !finished.contains(&sample), "{name}");
                        tokens[sample as usize] += 1;
                    }
                    Event::Finished { sample, reason } => {
                        finished.push(sample);
                        assert_eq!((reason, tokens[sample as usize]), (FinishReason::Length, 5), "{name}");
                        assert!(
                            counted.is_some() || finished.len() < samples as usize,
                            "{name}: the count precedes the last end"
                        );
                    }
                    other => panic!("{name}: {other:?}"),
                }
                is_first = false;
            }
            assert_eq!(counted, Some(Some(CachedTokens::default())), "{name}");
            assert_eq!(finished.len(), samples as usize, "{name}");
        }
        back_end.idle().await?;
    }
    Ok(())
}

#[tokio::test]
async fn repeated_prompt_has_the_same_tokens_and_its_cached_tokens_are_counted() -> Result<()> {
    for back_end in BackEnd::all(FAST).await? {
        let prompt = prompt(1, 100);
        let cold = back_end.run(request(&prompt, 5)).await?;
        let warm = back_end.run(request(&prompt, 5)).await?;
        let reusable = CachedTokens::on_device((back_end.reusable)(prompt.len()) as u32);
        assert_eq!((cold.cached, warm.cached), (Some(Some(CachedTokens::default())), Some(Some(reusable))), "{}", back_end.name);
        assert_eq!(cold.tokens, warm.tokens, "{}", back_end.name);
    }
    Ok(())
}

/// A back end that cannot keep namespaces apart must refuse them.
#[tokio::test]
async fn namespaces_share_no_cached_blocks() -> Result<()> {
    for back_end in BackEnd::all(FAST).await? {
        let prompt = prompt(1, 100);
        back_end.run(request(&prompt, 1)).await?;
        for other in [namespace(), Namespace::new("fake", "", "", "").of_account("a")] {
            match back_end.get().generate(Generate { namespace: other, ..request(&prompt, 1) }).await {
                Ok(mut job) => {
                    let report = read(&mut *job).await?;
                    assert_eq!(report.cached, Some(Some(CachedTokens::default())), "{}", back_end.name);
                }
                Err(refusal) => assert!(matches!(refusal, Refusal::Unsupported(_)), "{}: {refusal}", back_end.name),
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn sample_equals_a_separate_request_with_its_seed() -> Result<()> {
    for back_end in BackEnd::all(FAST).await? {
        let prompt = prompt(2, 70);
        let seeded = |seed| {
            let sampling = Sampling { max_tokens: Some(6), temperature: 1.0, seed, ..Sampling::default() };
            Generate { sampling, ..request(&prompt, 6) }
        };
        let together = back_end.run(Generate { samples: 3, ..seeded(7) }).await?;
        for sample in 0..3 {
            let alone = back_end.run(seeded(7 + u64::from(sample))).await?;
            assert_eq!(together.tokens_of(sample), alone.tokens_of(0), "{}", back_end.name);
        }
        assert_ne!(together.tokens_of(0), together.tokens_of(1), "{}", back_end.name);
    }
    Ok(())
}

#[tokio::test]
async fn resumed_samples_continue_and_complete_samples_generate_no_token() -> Result<()> {
    for back_end in BackEnd::all(FAST).await? {
        let prompt = prompt(3, 50);
        let whole = back_end.run(request(&prompt, 9)).await?.tokens_of(0);
        let generated =
            vec![Generated { sample: 1, tokens: whole[..4].to_vec() }, Generated { sample: 2, tokens: whole.clone() }];
        let report = back_end.run(Generate { samples: 3, generated, ..request(&prompt, 9) }).await?;
        assert_eq!((report.tokens_of(1), report.tokens_of(2)), (whole[4..].to_vec(), Vec::new()), "{}", back_end.name);
        assert_eq!(report.finished.len(), 2, "{}", back_end.name);
    }
    Ok(())
}

#[tokio::test]
async fn samples_end_at_a_stop_token_or_at_a_limit_of_zero_tokens() -> Result<()> {
    for back_end in BackEnd::all(FAST).await? {
        // The prompt is one for which the engine does not generate the stop token earlier.
        let mut prompts = (0..).map(|seed| prompt(seed, 20));
        let (prompt, whole) = loop {
            let prompt = prompts.next().context("the iterator of prompts is infinite")?;
            let whole = back_end.run(request(&prompt, 3)).await?.tokens_of(0);
            if !whole[..2].contains(&whole[2]) {
                break (prompt, whole);
            }
        };
        let mut stopping = request(&prompt, 50);
        stopping.sampling.stop_token_ids = vec![whole[2]];
        let report = back_end.run(stopping).await?;
        let expected = (whole.clone(), vec![(0, FinishReason::Stop(whole[2]))]);
        assert_eq!((report.tokens_of(0), report.finished), expected, "{}", back_end.name);
        let nothing = back_end.run(request(&prompt, 0)).await?;
        assert_eq!((nothing.tokens, nothing.finished), (Vec::new(), vec![(0, FinishReason::Length)]), "{}", back_end.name);
        assert!(nothing.cached.is_some(), "{}: the prompt is counted", back_end.name);
    }
    Ok(())
}

#[tokio::test]
async fn dropping_a_job_aborts_its_request_in_the_engine() -> Result<()> {
    for back_end in BackEnd::all(SLOW).await? {
        for samples in [1, 2] {
            let mut job = back_end.get().generate(Generate { samples, ..request(&prompt(samples, 100), 900) }).await?;
            while !matches!(next(&mut *job).await?, Some(Event::Token { .. })) {}
            back_end.until(|load| load.running_sequences > 0 && load.in_use_blocks > 0).await?;
            drop(job);
            back_end.idle().await?;
        }
    }
    Ok(())
}

/// llama.cpp's server has few threads, and an open connection takes one, so its connections are closed.
#[tokio::test]
async fn complete_answers_share_connections() -> Result<()> {
    for back_end in [BackEnd::vllm(FAST).await?, BackEnd::sglang(FAST).await?] {
        let before = back_end.connections.load(Ordering::SeqCst);
        for number in 0..20 {
            back_end.run(request(&prompt(number, 50), 3)).await?;
            back_end.idle().await?;
        }
        let opened = back_end.connections.load(Ordering::SeqCst) - before;
        // The end of an answer may arrive after the next request is sent.
        assert!(opened < 15, "{} opened {opened} connections for 20 requests", back_end.name);
    }
    Ok(())
}

#[tokio::test]
async fn requests_beyond_the_queue_limit_are_refused() -> Result<()> {
    for back_end in BackEnd::all(Setup { running_max: 1, waiting_max: 1, ..SLOW }).await? {
        let mut first = back_end.get().generate(request(&prompt(1, 40), 900)).await?;
        while !matches!(next(&mut *first).await?, Some(Event::Token { .. })) {}
        let mut second = back_end.get().generate(request(&prompt(2, 40), 1)).await?;
        let refused = back_end.get().generate(request(&prompt(3, 40), 1)).await.err();
        assert_eq!(refused, Some(Refusal::Full), "{}", back_end.name);
        drop(first);
        assert_eq!(read(&mut *second).await?.finished, [(0, FinishReason::Length)], "{}", back_end.name);
        back_end.idle().await?;
    }
    Ok(())
}

#[tokio::test]
async fn requests_that_can_never_run_are_refused_with_a_reason() -> Result<()> {
    for back_end in BackEnd::all(FAST).await? {
        let refused = async |change: fn(&mut Generate)| {
            let mut generate = request(&prompt(1, 40), 1);
            change(&mut generate);
            let refused = back_end.get().generate(generate).await.err();
            refused.with_context(|| format!("{} does not refuse the request", back_end.name))
        };
        assert_eq!(refused(|generate| generate.prompt.clear()).await?, Refusal::Empty);
        assert_eq!(refused(|generate| generate.samples = 0).await?, Refusal::Empty);
        assert!(matches!(refused(|generate| generate.account = "a".repeat(257)).await?, Refusal::LongAccount { len: 257 }));
        let beyond = refused(|generate| generate.sampling.max_tokens = Some(1 << 30)).await?;
        assert!(matches!(beyond, Refusal::BeyondContext { .. }), "{beyond}");
        let of_others = match back_end.get().kv_exchange() {
            KvExchange::Transfers(_) => [KvSource::Handle; 2],
            KvExchange::Handles { .. } => [KvSource::Remote; 2],
            KvExchange::Rooms { .. } => [KvSource::Local, KvSource::Remote],
            KvExchange::None => [KvSource::Handle, KvSource::Remote],
        };
        for kv in of_others {
            let refused = back_end.get().generate(Generate { kv, ..request(&prompt(1, 40), 1) }).await.err();
            assert!(matches!(refused, Some(Refusal::Unsupported(_))), "{}: {refused:?}", back_end.name);
        }
        back_end.idle().await?;
    }
    Ok(())
}

/// The prompt has 100 tokens. 96 of them fill blocks of every engine.
#[tokio::test]
async fn cached_blocks_are_reported_without_gaps_and_in_snapshots() -> Result<()> {
    for back_end in BackEnd::all(FAST).await? {
        let mut watch = back_end.get().watch().await.context("the engine has ended")?;
        assert!(watch.snapshot.stored.is_empty(), "{}", back_end.name);
        let request = request(&prompt(1, 100), 1);
        back_end.run(request.clone()).await?;
        let expected = sequence_hashes(&HashKey::new([7; 16]), &request.namespace, BLOCK_SIZE, &request.prompt);
        let (mut last_id, mut stored) = (watch.snapshot.at_event_id, Vec::new());
        while stored.len() < expected.len() {
            for event in &timeout(LIMIT, watch.batches.recv()).await.context(back_end.name)??.events {
                last_id += 1;
                assert_eq!(event.event_id, last_id, "{}", back_end.name);
                let Change::Stored(chain) = &event.change else { panic!("{}: {event:?}", back_end.name) };
                stored.extend_from_slice(&chain.sequence_hashes);
            }
        }
        assert_eq!(stored, expected, "{}", back_end.name);
        let later = back_end.get().watch().await.context("the engine has ended")?.snapshot;
        assert_eq!(later.at_event_id, last_id, "{}", back_end.name);
        assert_eq!(later.stored.iter().flat_map(|chain| chain.sequence_hashes.clone()).collect::<Vec<_>>(), expected);
        assert!(back_end.get().cached_blocks_max() >= expected.len() as u32);
    }
    Ok(())
}

/// The test does not apply to a back end that cannot exchange KV, because such a back end prefills only prompts that it also generates for.
#[tokio::test]
async fn cached_tokens_of_a_remote_prefill_are_reported_before_its_kv() -> Result<()> {
    for back_end in BackEnd::all(FAST).await? {
        let exchange = back_end.get().kv_exchange();
        let prompt = prompt(1, 100);
        for cached in [0, (back_end.reusable)(prompt.len()) as u32] {
            if matches!(exchange, KvExchange::None) {
                continue;
            }
            let request = request(&prompt, 1);
            let Generate { request_id, account, priority, namespace, prompt, .. } = request;
            let mut job =
                back_end.get().prefill(Prefill { request_id, account, priority, namespace, prompt, first_token: None }).await?;
            if matches!(exchange, KvExchange::Transfers(_)) {
                job.send_blocks(Vec::new(), BlockAccess::Copied).await;
            }
            let mut events = Vec::new();
            while !matches!(events.last(), Some(Event::Computed(_) | Event::Exported(_))) {
                events.push(next(&mut *job).await?.context("the job ends before its KV is ready")?);
            }
            let counts: Vec<_> = events
                .iter()
                .filter_map(|event| if let Event::Scheduled { cached } = event { Some(*cached) } else { None })
                .collect();
            assert_eq!(counts, [Some(CachedTokens::on_device(cached))], "{}", back_end.name);
            drop(job);
            back_end.idle().await?;
        }
    }
    Ok(())
}

async fn replies(mut stream: tonic::Streaming<GenerateReply>) -> Result<Vec<Message>> {
    let mut messages = Vec::new();
    while let Some(reply) = timeout(LIMIT, stream.message()).await?? {
        messages.extend(reply.message);
    }
    Ok(messages)
}

#[tokio::test]
async fn draining_worker_completes_its_requests_and_refuses_others() -> Result<()> {
    for back_end in BackEnd::all(SLOW).await? {
        let services = Services::default();
        let endpoint = channel::endpoint(&back_end.decode_worker(&services).await?.to_string())?;
        let channel = channel::Network::default().connect(&endpoint).await?;
        let info = ControlClient::new(channel.clone()).describe(DescribeRequest::default()).await?.into_inner();
        assert_eq!((&*info.model, info.capacity_blocks), ("fake", back_end.get().info().capacity_blocks));
        let request = |number, max_tokens| GenerateRequest {
            request_id: format!("request-{number}"),
            attempt: 1,
            instance_id: info.instance_id.clone(),
            prompt: prompt(number, 40),
            cache_namespace: Namespace::new("fake", "", "", "").as_bytes().to_vec(),
            sampling: Some(tandem_proto::v1::Sampling {
                max_tokens: Some(max_tokens),
                top_p: 1.0,
                repetition_penalty: 1.0,
                ..Default::default()
            }),
            samples: 1,
            ..GenerateRequest::default()
        };
        let mut client = DecodeClient::new(channel);
        let mut running = client.generate(request(1, 60)).await?.into_inner();
        let first = timeout(LIMIT, running.message()).await??.context("the stream has no first message")?;
        assert!(matches!(first.message, Some(Message::Scheduled(_))), "{first:?}");
        let drained = services.shutdown.run(LIMIT);
        let both = async {
            tokio::task::yield_now().await;
            let refused = replies(client.generate(request(2, 1)).await?.into_inner()).await?;
            anyhow::Ok((refused, replies(running).await?))
        };
        let ((), both) = tokio::join!(drained, both);
        let (refused, completed) = both.context(back_end.name)?;
        assert!(
            matches!(&refused[..], [Message::Failure(failure)] if failure.reason() == FailureReason::Draining),
            "{}: {refused:?}",
            back_end.name
        );
        let tokens = completed
            .iter()
            .filter_map(|message| if let Message::Tokens(tokens) = message { Some(tokens.tokens.len()) } else { None });
        assert_eq!(tokens.sum::<usize>(), 60, "{}", back_end.name);
        assert!(matches!(completed.last(), Some(Message::Finished(_))), "{}: {completed:?}", back_end.name);
        back_end.idle().await?;
    }
    Ok(())
}
