//! Tests of llama.cpp servers as back ends of workers.

use super::*;
use tandem_adapter::{
    ConnectError,
    llama_cpp::{LlamaCppSettings, connect, inspect},
};
use tandem_engine::Refusal;
use tandem_tests::fake_llama_cpp::{END_TOKEN, FakeLlamaCpp, LlamaCppFake};
use tandem_worker::KvExchange;

struct LlamaCpp {
    fake: FakeLlamaCpp,
    adapter: Adapter,
    follower: JoinSet<EngineEnded>,
}

fn settings(fake: &FakeLlamaCpp) -> LlamaCppSettings {
    LlamaCppSettings {
        url: fake.url(),
        key: None,
        ca: None,
        block_size: 16,
        hash_key: HashKey::new([7; 16]),
        waiting_max: 8,
        prefix_caching: true,
        silence_max: Duration::from_secs(60),
    }
}

async fn llama_cpp(fake: LlamaCppFake, change: impl FnOnce(&mut LlamaCppSettings)) -> Result<LlamaCpp> {
    let fake = FakeLlamaCpp::start(fake).await?;
    let mut settings = settings(&fake);
    change(&mut settings);
    let (adapter, follower) = connect(settings).await?.into_parts();
    let mut following = JoinSet::new();
    following.spawn(follower);
    Ok(LlamaCpp { fake, adapter, follower: following })
}

fn shared() -> Namespace {
    Namespace::new("fake", "", "", "")
}

fn request(prompt: &[TokenId], max_tokens: u32) -> Generate {
    Generate { namespace: shared(), ..generate(prompt, max_tokens) }
}

fn cached(tokens: u32) -> Option<Option<CachedTokens>> {
    Some(Some(CachedTokens::on_device(tokens)))
}

#[tokio::test]
async fn generation_reports_the_servers_tokens_and_its_count_of_cached_tokens() -> Result<()> {
    let LlamaCpp { fake, adapter, follower: _follower } = llama_cpp(LlamaCppFake::default(), |_| {}).await?;
    let prompt = prompt(1, 100);
    for of_cache in [0, 99] {
        let report = run(&adapter, request(&prompt, 5)).await?;
        let expected = Report {
            cached: cached(of_cache),
            started: 1,
            tokens: continuation(&prompt, 5, None).into_iter().map(|token| (0, token)).collect(),
            finished: vec![(0, FinishReason::Length)],
            other: Vec::new(),
        };
        assert_eq!(report, expected);
    }
    assert_eq!(fake.counted(), (101, 99));
    until("the engine is idle", || fake.running() == 0).await
}

#[tokio::test]
async fn cached_tokens_are_reported_before_the_first_token() -> Result<()> {
    let LlamaCpp { adapter, fake: _fake, follower: _follower } = llama_cpp(LlamaCppFake::default(), |_| {}).await?;
    let mut job = adapter.generate(request(&prompt(1, 40), 3)).await?;
    assert!(matches!(next(&mut *job).await?, Some(Event::Submitted)));
    assert!(matches!(next(&mut *job).await?, Some(Event::Scheduled { cached: Some(_) })));
    assert!(matches!(next(&mut *job).await?, Some(Event::Started(_))));
    let rest = read(&mut *job).await?;
    assert_eq!((rest.tokens.len(), rest.cached), (3, None), "the cached tokens are reported once");
    Ok(())
}

#[tokio::test]
async fn tokens_that_end_within_a_character_are_not_lost() -> Result<()> {
    let fake = LlamaCppFake { divides_characters: true, ..LlamaCppFake::default() };
    let LlamaCpp { adapter, fake: _fake, follower: _follower } = llama_cpp(fake, |_| {}).await?;
    let prompt = prompt(1, 40);
    let mut with_logprobs = request(&prompt, 10);
    with_logprobs.sampling.logprobs = Some(1);
    for request in [request(&prompt, 10), with_logprobs] {
        assert_eq!(run(&adapter, request).await?.tokens_of(0), continuation(&prompt, 10, None));
    }
    Ok(())
}

#[tokio::test]
async fn finish_reason_names_the_stop_or_end_of_sequence_token() -> Result<()> {
    for divides_characters in [false, true] {
        let fake = LlamaCppFake { divides_characters, ..LlamaCppFake::default() };
        let LlamaCpp { fake, adapter, follower: _follower } = llama_cpp(fake, |_| {}).await?;
        let ends =
            |prompt: &Vec<TokenId>| continuation(prompt, 3, None).iter().position(|token| *token == END_TOKEN.0) == Some(2);
        let mut prompts = (20..).flat_map(|len| (0..250).map(move |seed| prompt(seed, len)));
        let ending = prompts.find(ends).context("no answer ends")?;
        for prompt in [ending, prompt(4, 20)] {
            let whole = continuation(&prompt, 3, None);
            let mut request = request(&prompt, 50);
            request.sampling.stop_token_ids = vec![whole[2]];
            let report = run(&adapter, request).await?;
            assert_eq!((report.tokens_of(0), report.finished), (whole.clone(), vec![(0, FinishReason::Stop(whole[2]))]));
        }
        until("the engine is idle", || fake.running() == 0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn cancelled_job_reports_cached_tokens_and_dropped_job_leaves_no_request() -> Result<()> {
    let fake = LlamaCppFake { step: Duration::from_millis(5), ..LlamaCppFake::default() };
    let LlamaCpp { fake, adapter, follower: _follower } = llama_cpp(fake, |_| {}).await?;
    for cancels in [true, false] {
        let mut job = adapter.generate(request(&prompt(1, 100), 1_500)).await?;
        let mut counted = false;
        loop {
            match next(&mut *job).await? {
                Some(Event::Token { .. }) => break,
                event => counted |= matches!(event, Some(Event::Scheduled { cached: Some(_) })),
            }
        }
        assert!(counted && fake.running() == 1);
        if cancels {
            job.cancel();
            assert_eq!(read(&mut *job).await?.finished, Vec::new());
        }
        drop(job);
        until("the engine is idle", || fake.running() == 0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn request_that_waits_for_a_slot_can_be_cancelled() -> Result<()> {
    let fake = LlamaCppFake { slots: 1, step: Duration::from_millis(5), ..LlamaCppFake::default() };
    let LlamaCpp { fake, adapter, follower: _follower } = llama_cpp(fake, |_| {}).await?;
    // Another client of the server occupies its only slot.
    let (other, _following) = connect(settings(&fake)).await?.into_parts();
    let mut first = other.generate(request(&prompt(1, 40), 1_500)).await?;
    while !matches!(next(&mut *first).await?, Some(Event::Token { .. })) {}
    let mut second = adapter.generate(request(&prompt(2, 40), 1)).await?;
    assert!(matches!(next(&mut *second).await?, Some(Event::Submitted)));
    until("the server has the request", || fake.seen().len() == 2).await?;
    second.cancel();
    assert_eq!(read(&mut *second).await?.cached, Some(None), "the server has not counted the prompt");
    Ok(())
}

#[tokio::test]
async fn requests_wait_in_the_worker_while_all_slots_are_taken() -> Result<()> {
    let fake = LlamaCppFake { slots: 1, step: Duration::from_millis(5), ..LlamaCppFake::default() };
    let LlamaCpp { fake, adapter, follower: _follower } = llama_cpp(fake, |settings| settings.waiting_max = 1).await?;
    let mut first = adapter.generate(request(&prompt(1, 40), 1_500)).await?;
    assert!(matches!(next(&mut *first).await?, Some(Event::Submitted)));
    let mut second = adapter.generate(request(&prompt(2, 40), 1)).await?;
    assert!(matches!(adapter.generate(request(&prompt(3, 40), 1)).await, Err(Refusal::Full)));
    until("the server runs the first request", || fake.running() == 1).await?;
    assert_eq!(fake.seen().len(), 1, "the second request waits in the worker");
    drop(first);
    assert_eq!(read(&mut *second).await?.finished, [(0, FinishReason::Length)]);
    Ok(())
}

#[tokio::test]
async fn isolated_clients_are_refused_unless_prefix_caching_is_off() -> Result<()> {
    let prompt = prompt(1, 100);
    let separate = [Namespace::new("fake", "", "", "tenant"), shared().of_account("tenant")];
    let LlamaCpp { fake, adapter, follower: _follower } = llama_cpp(LlamaCppFake::default(), |_| {}).await?;
    for namespace in separate.clone() {
        let refused = adapter.generate(Generate { namespace, ..request(&prompt, 1) }).await;
        assert!(matches!(refused, Err(Refusal::Unsupported(message)) if message.contains("--no-prefix-caching")));
    }
    assert!(fake.seen().is_empty());
    let LlamaCpp { fake, adapter, follower: _follower } =
        llama_cpp(LlamaCppFake::default(), |settings| settings.prefix_caching = false).await?;
    for namespace in separate {
        let report = run(&adapter, Generate { namespace, ..request(&prompt, 1) }).await?;
        assert_eq!(report.cached, cached(0));
    }
    assert!(adapter.watch().await.context("the engine has ended")?.snapshot.stored.is_empty());
    assert!(fake.seen().iter().all(|body| body["cache_prompt"] == false));
    Ok(())
}

#[tokio::test]
async fn requests_that_the_server_does_not_support_are_refused() -> Result<()> {
    let LlamaCpp { fake, adapter, follower: _follower } = llama_cpp(LlamaCppFake::default(), |_| {}).await?;
    assert_eq!(adapter.kv_exchange().family(), KvExchange::NO_FAMILY);
    let prompt = prompt(1, 40);
    let mut min_tokens = request(&prompt, 5);
    min_tokens.sampling.min_tokens = 1;
    let unsupported = [
        min_tokens,
        Generate { prompt_logprobs: Some(1), ..request(&prompt, 1) },
        Generate { kv: KvSource::Handle, ..request(&prompt, 1) },
        Generate { kv: KvSource::Remote, ..request(&prompt, 1) },
    ];
    for request in unsupported {
        assert!(matches!(adapter.generate(request).await, Err(Refusal::Unsupported(_))));
    }
    assert!(matches!(adapter.generate(request(&prompt, 5_000)).await, Err(Refusal::BeyondContext { .. })));
    assert!(fake.seen().is_empty());
    fake.fail(true);
    assert_eq!(run(&adapter, request(&prompt, 1)).await?.other, ["Failed"]);
    Ok(())
}

#[tokio::test]
async fn adapter_waits_until_the_model_is_loaded() -> Result<()> {
    let fake = FakeLlamaCpp::start(LlamaCppFake::default()).await?;
    fake.load(true);
    let settings = settings(&fake);
    let inspected = inspect(&settings);
    tokio::pin!(inspected);
    assert!(timeout(Duration::from_millis(50), &mut inspected).await.is_err());
    fake.load(false);
    let server = timeout(LIMIT, inspected).await??;
    let model = server.model;
    assert_eq!((&*model.id, model.root.as_deref(), server.ranks), ("fake", Some("/models/fake.gguf"), vec![(0, 4_096)]));
    assert_eq!(connect(settings.clone()).await?.model, model, "a connection describes the model as well");
    Ok(())
}

#[tokio::test]
async fn server_without_slots_is_refused() -> Result<()> {
    let fake = FakeLlamaCpp::start(LlamaCppFake { slots: 0, ..LlamaCppFake::default() }).await?;
    assert!(matches!(connect(settings(&fake)).await, Err(ConnectError::NoSlots)));
    Ok(())
}

#[tokio::test]
async fn restarted_server_is_another_instance() -> Result<()> {
    let LlamaCpp { fake, adapter, mut follower } = llama_cpp(LlamaCppFake::default(), |_| {}).await?;
    fake.pretend_restart();
    let ended = timeout(LIMIT, follower.join_next()).await?.context("the follower has ended")??;
    assert!(matches!(ended, EngineEnded::Restarted));
    assert!(adapter.watch().await.is_none());
    Ok(())
}
