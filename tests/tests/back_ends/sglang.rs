//! Tests of SGLang servers as back ends of workers.

use super::*;
use tandem_adapter::{
    ConnectError,
    kv_events::KvEvents,
    sglang::{SglangSettings, connect, inspect},
};
use tandem_engine::Refusal;
use tandem_grammar::Kind;
use tandem_kv::{Change, sequence_hashes};
use tandem_tests::fake_sglang::{CONSTRAINED_TOKENS, END_TOKEN, FakeSglang, SglangFake, VOCABULARY};
use tandem_worker::KvExchange;

pub(super) struct Sglang {
    pub(super) fake: FakeSglang,
    pub(super) adapter: Adapter,
    pub(super) follower: JoinSet<EngineEnded>,
}

fn settings(fake: &FakeSglang) -> SglangSettings {
    SglangSettings {
        url: fake.url(),
        key: None,
        ca: None,
        rank: None,
        events: KvEvents::Discover,
        block_size: Some(16),
        hash_key: HashKey::new([7; 16]),
        running_max: 8,
        waiting_max: 8,
        shared_store: None,
        silence_max: Duration::from_secs(60),
        server_failed: Default::default(),
    }
}

pub(super) async fn sglang(fake: SglangFake, change: impl FnOnce(&mut SglangSettings)) -> Result<Sglang> {
    let fake = FakeSglang::start(fake).await?;
    let mut settings = settings(&fake);
    change(&mut settings);
    let (adapter, follower) = connect(settings).await?.into_parts();
    let mut following = JoinSet::new();
    following.spawn(follower);
    Ok(Sglang { fake, adapter, follower: following })
}

fn on_device(tokens: u32) -> Option<Option<CachedTokens>> {
    Some(Some(CachedTokens::on_device(tokens)))
}

#[tokio::test]
async fn cumulative_and_incremental_answers_report_the_servers_tokens_and_cached_tokens() -> Result<()> {
    for incremental in [false, true] {
        let fake = SglangFake { incremental, ..SglangFake::default() };
        let Sglang { fake, adapter, follower: _follower } = sglang(fake, |_| {}).await?;
        let prompt = prompt(1, 100);
        for cached in [0, 96] {
            let report = run(&adapter, generate(&prompt, 5)).await?;
            let expected = Report {
                cached: on_device(cached),
                started: 1,
                tokens: continuation(&prompt, 5, None).into_iter().map(|token| (0, token)).collect(),
                finished: vec![(0, FinishReason::Length)],
                other: Vec::new(),
            };
            assert_eq!(report, expected, "incremental: {incremental}");
        }
        until("the engine is idle", || fake.running() == 0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn cached_tokens_are_reported_with_the_first_token() -> Result<()> {
    let Sglang { adapter, fake: _fake, follower: _follower } = sglang(SglangFake::default(), |_| {}).await?;
    let mut job = adapter.generate(generate(&prompt(1, 40), 3)).await?;
    assert!(matches!(next(&mut *job).await?, Some(Event::Submitted)));
    assert!(matches!(next(&mut *job).await?, Some(Event::Scheduled { cached: Some(_) })));
    assert!(matches!(next(&mut *job).await?, Some(Event::Started(_))));
    let rest = read(&mut *job).await?;
    assert_eq!((rest.tokens.len(), rest.cached), (3, None), "the cached tokens are reported once");
    Ok(())
}

#[tokio::test]
async fn logprobs_of_prompt_and_generated_tokens_are_reported() -> Result<()> {
    let Sglang { adapter, fake: _fake, follower: _follower } = sglang(SglangFake::default(), |_| {}).await?;
    let prompt = prompt(5, 20);
    for (requested, expected) in [(vec![], vec![0, 1]), (vec![9, 8, 7], vec![9, 8, 7])] {
        let mut request = Generate { prompt_logprobs: Some(1), ..generate(&prompt, 2) };
        (request.sampling.logprobs, request.sampling.logprob_token_ids) = (Some(2), requested.clone());
        let mut job = adapter.generate(request).await?;
        let (mut of_prompt, mut of_tokens) = (0, 0);
        while let Some(event) = next(&mut *job).await? {
            match event {
                Event::PromptLogprobs(logprobs) => {
                    assert!(logprobs[0].is_none() && logprobs[1..].iter().all(Option::is_some));
                    of_prompt = logprobs.len();
                }
                Event::Token { token, logprobs: Some(logprobs), .. } => {
                    let base = if requested.is_empty() { token } else { 0 };
                    assert_eq!(logprobs.top.iter().map(|top| top.token - base).collect::<Vec<_>>(), expected);
                    of_tokens += 1;
                }
                Event::Scheduled { cached } => assert_eq!(cached, Some(CachedTokens::default())),
                _ => {}
            }
        }
        assert_eq!((of_prompt, of_tokens), (20, 2));
    }
    Ok(())
}

/// Returns a prompt whose answer has the end-of-sequence token at position `at`, and the first `at + 4` tokens of the answer without repetitions.
fn ending(at: usize) -> Result<(Vec<TokenId>, Vec<TokenId>)> {
    let mut prompts = (20..).flat_map(|len| (0..250).map(move |seed| prompt(seed, len)));
    let found = prompts.find_map(|prompt| {
        let answer = continuation(&prompt, at + 4, None);
        let ends = answer.iter().position(|token| *token == END_TOKEN) == Some(at);
        (ends && !answer[..at + 3].contains(&answer[at + 3])).then_some((prompt, answer))
    });
    found.context("no answer ends")
}

#[tokio::test]
async fn answer_ends_only_at_the_requests_own_stop_tokens() -> Result<()> {
    for incremental in [false, true] {
        // The server aborts the id of the first part while the second part runs.
        let (step, delayed_abort) = (Duration::from_millis(10), Duration::from_millis(5));
        let fake = SglangFake { incremental, step, delayed_abort, ..SglangFake::default() };
        let Sglang { fake, adapter, follower: _follower } = sglang(fake, |_| {}).await?;
        let (prompt, answer) = ending(2)?;
        let stopped = async |stop_token_ids: &[TokenId], max_tokens| {
            let mut request = generate(&prompt, max_tokens);
            request.sampling.stop_token_ids = stop_token_ids.to_vec();
            request.sampling.logprobs = Some(1);
            let report = run(&adapter, request).await?;
            anyhow::Ok((report.tokens_of(0), report.finished))
        };
        let at = |len: usize, reason| (answer[..len].to_vec(), vec![(0, reason)]);
        assert_eq!(stopped(&[END_TOKEN], 50).await?, at(3, FinishReason::Stop(END_TOKEN)));
        assert_eq!(stopped(&[], 6).await?, at(6, FinishReason::Length), "no token ends the answer");
        let requests = fake.seen().len();
        // The server ends the answer at its end-of-sequence token, which this request does not name, so the answer is continued.
        assert_eq!(stopped(&[answer[5]], 50).await?, at(6, FinishReason::Stop(answer[5])));
        assert_eq!(fake.seen().len(), requests + 2);
        assert_eq!(stopped(&[answer[5]], 5).await?, at(5, FinishReason::Length));
        assert_eq!(stopped(&[answer[5]], 3).await?, at(3, FinishReason::Length), "the last token is the end-of-sequence token");
        until("the engine is idle", || fake.running() == 0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn constrained_answer_is_complete_where_the_server_ends_it() -> Result<()> {
    let Sglang { adapter, fake, follower: _follower } = sglang(SglangFake::default(), |_| {}).await?;
    let prompt = prompt(9, 40);
    let mut request = generate(&prompt, 50);
    request.sampling.constraint = Some(Kind::Regex("a+".to_owned()).into());
    request.sampling.stop_token_ids = vec![300];
    let report = run(&adapter, request).await?;
    let mut expected = continuation(&prompt, CONSTRAINED_TOKENS, None);
    expected.push(300);
    assert_eq!((report.tokens_of(0), report.finished), (expected, vec![(0, FinishReason::Stop(300))]));
    assert_eq!(fake.seen().len(), 1);
    Ok(())
}

#[tokio::test]
async fn namespaces_and_cache_follow_the_servers_events() -> Result<()> {
    let Sglang { fake, adapter, follower: _follower } = sglang(SglangFake::default(), |_| {}).await?;
    assert!(!adapter.assumes_cache());
    let mut watch = adapter.watch().await.context("the engine has ended")?;
    let request = generate(&prompt(1, 100), 1);
    run(&adapter, request.clone()).await?;
    let expected = sequence_hashes(&HashKey::new([7; 16]), &request.namespace, 16, &request.prompt[..96]);
    let mut stored = Vec::new();
    while stored.len() < expected.len() {
        for event in &timeout(LIMIT, watch.batches.recv()).await??.events {
            let Change::Stored(chain) = &event.change else { panic!("{event:?}") };
            stored.extend_from_slice(&chain.sequence_hashes);
        }
    }
    assert_eq!(stored, expected);
    // A longer prompt of the same namespace stores blocks after those of the first one.
    run(&adapter, generate(&[&request.prompt[..96], &prompt(3, 64)].concat(), 1)).await?;
    let cached = async |count: usize| {
        let waiting = async {
            loop {
                let snapshot = adapter.watch().await.context("the engine has ended")?.snapshot;
                if snapshot.stored.iter().map(|chain| chain.sequence_hashes.len()).sum::<usize>() == count {
                    return anyhow::Ok(());
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(LIMIT, waiting).await.with_context(|| format!("there are never {count} blocks"))?
    };
    cached(10).await?;
    fake.flush().await?;
    cached(0).await
}

#[tokio::test]
async fn cancelled_job_is_aborted_and_dropped_job_leaves_no_request() -> Result<()> {
    let fake = SglangFake { step: Duration::from_millis(5), ..SglangFake::default() };
    let Sglang { fake, adapter, follower: _follower } = sglang(fake, |_| {}).await?;
    for cancels in [true, false] {
        let mut job = adapter.generate(generate(&prompt(1, 100), 1_500)).await?;
        while !matches!(next(&mut *job).await?, Some(Event::Token { .. })) {}
        assert_eq!(fake.running(), 1);
        if cancels {
            job.cancel();
            assert_eq!(read(&mut *job).await?.finished, Vec::new());
        }
        drop(job);
        until("the engine is idle", || fake.running() == 0).await?;
    }
    // A real server notices a closed connection only after seconds, so a dropped job is aborted by a call, too.
    let rids: Vec<_> = fake.seen().iter().map(|body| body["rid"].as_str().unwrap_or_default().to_owned()).collect();
    until("both requests were aborted", || rids.iter().all(|rid| fake.aborts().contains(rid))).await
}

#[tokio::test]
async fn seeds_are_refused_unless_the_server_repeats_answers() -> Result<()> {
    let seeded = |seed_is_given| {
        let mut request = generate(&prompt(2, 40), 4);
        (request.sampling.temperature, request.sampling.seed, request.sampling.seed_is_given) = (1.0, 7, seed_is_given);
        request
    };
    let fake = SglangFake { deterministic: false, ..SglangFake::default() };
    let Sglang { fake, adapter, follower: _follower } = sglang(fake, |_| {}).await?;
    let refused = adapter.generate(seeded(true)).await;
    assert!(matches!(refused, Err(Refusal::Unsupported(why)) if why.contains("--enable-deterministic-inference")));
    let answers = [run(&adapter, seeded(false)).await?.tokens, run(&adapter, seeded(false)).await?.tokens];
    assert_ne!(answers[0], answers[1]);
    assert!(fake.seen().iter().all(|body| body["sampling_params"].get("sampling_seed").is_none()));
    let Sglang { adapter, fake: _fake, follower: _follower } = sglang(SglangFake::default(), |_| {}).await?;
    assert_eq!(run(&adapter, seeded(true)).await?.tokens_of(0), continuation(&prompt(2, 40), 4, Some(7)));
    Ok(())
}

#[tokio::test]
async fn failures_and_unsupported_requests_are_reported() -> Result<()> {
    let Sglang { fake, adapter, follower: _follower } = sglang(SglangFake::default(), |_| {}).await?;
    assert_eq!(adapter.kv_exchange().family(), KvExchange::NO_FAMILY);
    let prompt = prompt(1, 40);
    let mut allowed = generate(&prompt, 5);
    allowed.sampling.allowed_token_ids = [7].into();
    // Workers refuse tokens beyond the vocabulary. A real server ends when it computes one.
    assert_eq!(adapter.info().vocab_size, VOCABULARY as usize);
    for request in [allowed, Generate { kv: KvSource::Handle, ..generate(&prompt, 1) }] {
        assert!(matches!(adapter.generate(request).await, Err(Refusal::Unsupported(_))));
    }
    assert!(matches!(adapter.generate(generate(&prompt, 5_000)).await, Err(Refusal::BeyondContext { .. })));
    assert!(fake.seen().is_empty());
    fake.fail(true);
    assert_eq!(run(&adapter, generate(&prompt, 1)).await?.other, ["Failed"]);
    Ok(())
}

#[tokio::test]
async fn each_rank_and_lora_of_the_server_is_addressed() -> Result<()> {
    let loras = vec!["sql".to_owned()];
    let fake = SglangFake { ranks: 2, running_max: 3, loras: loras.clone(), ..SglangFake::default() };
    let Sglang { fake, adapter, follower: _follower } = sglang(fake, |settings| settings.rank = Some(1)).await?;
    let server = inspect(&settings(&fake)).await?;
    assert_eq!((&server.loras, server.ranks), (&loras, vec![(0, 16_384), (1, 16_384)]));
    assert_eq!((server.model.root.as_deref(), server.model.context_length), (Some("/models/fake"), 4_090));
    assert_eq!((&*adapter.loras(), adapter.sequences_max(), adapter.assumes_cache()), (&*loras, 3, true));
    let of_lora = Generate { namespace: Namespace::new("sql", "", "", ""), ..generate(&prompt(1, 40), 1) };
    for request in [of_lora, generate(&prompt(1, 40), 1)] {
        run(&adapter, request).await?;
    }
    let seen = fake.seen();
    assert!(seen.iter().all(|body| body["routed_dp_rank"] == 1));
    assert_eq!(seen.iter().map(|body| body["lora_path"].as_str()).collect::<Vec<_>>(), [Some("sql"), None]);
    Ok(())
}

#[tokio::test]
async fn servers_that_cannot_be_used_are_refused_with_advice() -> Result<()> {
    let fake = FakeSglang::start(SglangFake { ranks: 2, ..SglangFake::default() }).await?;
    assert!(matches!(
        connect(SglangSettings { rank: Some(2), ..settings(&fake) }).await,
        Err(ConnectError::NoRank { rank: 2, ranks: 2 })
    ));
    let fake = FakeSglang::start(SglangFake { page_size: 1, ..SglangFake::default() }).await?;
    assert!(matches!(connect(settings(&fake)).await, Err(ConnectError::BlockSize(_))));
    Ok(())
}

#[tokio::test]
async fn restarted_server_is_another_instance() -> Result<()> {
    let Sglang { fake, adapter, mut follower } = sglang(SglangFake::default(), |_| {}).await?;
    fake.pretend_restart();
    let ended = timeout(LIMIT, follower.join_next()).await?.context("the follower has ended")??;
    assert!(matches!(ended, EngineEnded::Restarted));
    assert!(adapter.watch().await.is_none());
    Ok(())
}
