//! Jobs of an external engine that prefills its own prompts, the queue of jobs, and the reports about the engine's cache.

use super::*;
use tandem_engine::{Generated, Refusal};
use tandem_kv::{Change, sequence_hashes};

fn on_device(tokens: u32) -> Option<Option<CachedTokens>> {
    Some(Some(CachedTokens::on_device(tokens)))
}

#[tokio::test]
async fn job_reports_the_engines_tokens_and_cached_tokens() -> Result<()> {
    let External { fake, adapter, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
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
        assert_eq!(report, expected);
    }
    assert_eq!(fake.counted(), (200, 96));
    until("the engine is idle", || fake.running() == 0).await
}

#[tokio::test]
async fn prompts_of_different_namespaces_share_no_cached_blocks() -> Result<()> {
    let External { adapter, fake: _fake, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
    let prompt = prompt(1, 100);
    run(&adapter, generate(&prompt, 1)).await?;
    let other = Generate { namespace: Namespace::new("fake", "", "", "other"), ..generate(&prompt, 1) };
    assert_eq!(run(&adapter, other).await?.cached, on_device(0));
    Ok(())
}

#[tokio::test]
async fn cached_tokens_are_reported_before_a_sample_finishes() -> Result<()> {
    let External { adapter, fake: _fake, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
    let mut job = adapter.generate(generate(&prompt(1, 40), 3)).await?;
    let mut counted = false;
    while let Some(event) = next(&mut *job).await? {
        counted |= matches!(event, Event::Scheduled { .. });
        assert!(counted || !matches!(event, Event::Finished { .. }));
    }
    assert!(counted);
    Ok(())
}

#[tokio::test]
async fn each_sample_has_its_own_seed_and_the_prompt_counts_once() -> Result<()> {
    let External { fake, adapter, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
    let prompt = prompt(2, 70);
    let sampling = Sampling { max_tokens: Some(4), temperature: 1.0, seed: 7, ..Sampling::default() };
    let report = run(&adapter, Generate { samples: 3, sampling, ..generate(&prompt, 4) }).await?;
    for sample in 0..3 {
        assert_eq!(report.tokens_of(sample), continuation(&prompt, 4, Some(7 + u64::from(sample))));
    }
    assert_eq!((report.cached, report.started, report.finished.len()), (on_device(0), 1, 3));
    let seeds: Vec<u64> = fake.seen().iter().filter_map(|body| body["sampling_params"]["seed"].as_u64()).collect();
    assert_eq!(seeds.len(), 3);
    Ok(())
}

#[tokio::test]
async fn resumed_samples_continue_after_their_generated_tokens() -> Result<()> {
    let External { adapter, fake: _fake, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
    let prompt = prompt(3, 50);
    let whole = continuation(&prompt, 9, None);
    let generated = vec![Generated { sample: 1, tokens: whole[..4].to_vec() }, Generated { sample: 2, tokens: whole.clone() }];
    let report = run(&adapter, Generate { samples: 3, generated, ..generate(&prompt, 9) }).await?;
    assert_eq!(report.tokens_of(1), whole[4..]);
    assert!(report.tokens_of(2).is_empty());
    assert_eq!(report.finished.len(), 2);
    Ok(())
}

#[tokio::test]
async fn stop_token_ends_a_sample_and_is_reported() -> Result<()> {
    let External { adapter, fake: _fake, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
    let prompt = prompt(4, 20);
    let whole = continuation(&prompt, 3, None);
    let mut request = generate(&prompt, 50);
    request.sampling.stop_token_ids = vec![whole[2]];
    let report = run(&adapter, request).await?;
    assert_eq!((report.tokens_of(0), report.finished), (whole.clone(), vec![(0, FinishReason::Stop(whole[2]))]));
    Ok(())
}

#[tokio::test]
async fn logprobs_of_prompt_and_generated_tokens_are_reported() -> Result<()> {
    let External { adapter, fake: _fake, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
    let prompt = prompt(5, 20);
    let mut request = Generate { prompt_logprobs: Some(1), ..generate(&prompt, 2) };
    request.sampling.logprobs = Some(2);
    let mut job = adapter.generate(request).await?;
    let (mut of_prompt, mut of_tokens) = (0, 0);
    while let Some(event) = next(&mut *job).await? {
        match event {
            Event::PromptLogprobs(logprobs) => {
                assert!(logprobs[0].is_none() && logprobs[1..].iter().all(Option::is_some));
                of_prompt = logprobs.len();
            }
            Event::Token { logprobs: Some(logprobs), .. } => {
                assert_eq!(logprobs.top.len(), 2);
                of_tokens += 1;
            }
            Event::Scheduled { cached } => assert_eq!(cached, Some(CachedTokens::default())),
            _ => {}
        }
    }
    assert_eq!((of_prompt, of_tokens), (20, 2));
    Ok(())
}

#[tokio::test]
async fn cached_tokens_are_unreported_if_the_engine_does_not_report_them() -> Result<()> {
    let fake = FakeSettings { reports_cached_tokens: false, ..FakeSettings::default() };
    let External { adapter, fake: _fake, follower: _follower } = external(fake, |_| {}).await?;
    assert_eq!(run(&adapter, generate(&prompt(1, 40), 1)).await?.cached, Some(None));
    Ok(())
}

#[tokio::test]
async fn cancelled_job_reports_cached_tokens_and_a_dropped_job_is_aborted() -> Result<()> {
    let fake = FakeSettings { step: Duration::from_millis(5), ..FakeSettings::default() };
    let External { fake, adapter, follower: _follower } = external(fake, |_| {}).await?;
    for cancels in [true, false] {
        let mut job = adapter.generate(generate(&prompt(1, 100), 3_000)).await?;
        while !matches!(next(&mut *job).await?, Some(Event::Token { .. })) {}
        assert_eq!(fake.running(), 1);
        if cancels {
            job.cancel();
            let report = read(&mut *job).await?;
            assert_eq!((report.cached, report.finished), (on_device(0), Vec::new()));
        }
        drop(job);
        until("the engine is idle", || fake.running() == 0).await?;
    }
    Ok(())
}

/// Only the first sample reports the number of cached tokens. It must be reported whichever sample ends first. Before its first token there is
/// no number, because vLLM reports 0 then, whatever it has found.
#[tokio::test]
async fn cancelled_samples_end_with_their_count() -> Result<()> {
    let fake = FakeSettings { step: Duration::from_millis(5), ..FakeSettings::default() };
    let External { fake, adapter, follower: _follower } = external(fake, |_| {}).await?;
    for round in 0..20 {
        let mut job = adapter.generate(Generate { samples: 3, ..generate(&prompt(round, 100), 3_000) }).await?;
        // In every other round the job is cancelled before its first token.
        let mut begun = [round % 2 == 1; 3];
        while begun.contains(&false) {
            if let Some(Event::Token { sample, .. }) = next(&mut *job).await? {
                begun[sample as usize] = true;
            }
        }
        until("the engine has it", || fake.running() > 0).await?;
        job.cancel();
        let report = read(&mut *job).await?;
        let has_begun = round % 2 == 0 || !report.tokens_of(0).is_empty();
        let expected = if has_begun { on_device(0) } else { Some(None) };
        assert_eq!((report.cached, report.finished), (expected, Vec::new()), "round {round}");
        until("the engine is idle", || fake.running() == 0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn request_is_submitted_when_the_engine_has_a_free_slot() -> Result<()> {
    let fake = FakeSettings { step: Duration::from_millis(5), ..FakeSettings::default() };
    let External { fake, adapter, follower: _follower } =
        external(fake, |settings| (settings.running_max, settings.waiting_max) = (1, 1)).await?;
    let mut first = adapter.generate(generate(&prompt(1, 40), 3_000)).await?;
    assert!(matches!(next(&mut *first).await?, Some(Event::Submitted)));
    let mut second = adapter.generate(generate(&prompt(2, 40), 1)).await?;
    assert!(matches!(adapter.generate(generate(&prompt(3, 40), 1)).await, Err(Refusal::Full)));
    until("the first runs", || fake.running() == 1).await?;
    assert_eq!(fake.seen().len(), 1, "the second job waits in the worker");
    drop(first);
    assert!(matches!(next(&mut *second).await?, Some(Event::Submitted)));
    assert_eq!(read(&mut *second).await?.finished, [(0, FinishReason::Length)]);
    Ok(())
}

#[tokio::test]
async fn failed_and_unsupported_requests_are_reported_with_their_reason() -> Result<()> {
    let External { fake, adapter, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
    fake.fail(true);
    assert_eq!(run(&adapter, generate(&prompt(1, 40), 1)).await?.other, ["Failed"]);
    fake.fail(false);
    let mut too_long = generate(&prompt(1, 40), 1);
    too_long.sampling.max_tokens = Some(5_000);
    assert!(matches!(adapter.generate(too_long).await, Err(Refusal::BeyondContext { .. })));
    let remote = Generate { kv: KvSource::Remote, ..generate(&prompt(1, 40), 1) };
    assert!(matches!(adapter.generate(remote).await, Err(Refusal::Unsupported(_))));
    Ok(())
}

/// Returns the sequence hashes of the prompt's blocks, which the worker must report.
fn hashes(tokens: &[TokenId]) -> Vec<tandem_kv::SequenceHash> {
    sequence_hashes(&HashKey::new([7; 16]), &namespace(), 16, tokens)
}

#[tokio::test]
async fn watch_reports_the_engines_blocks_as_sequence_hashes() -> Result<()> {
    let External { adapter, fake: _fake, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
    let mut watch = adapter.watch().await.context("the engine has ended")?;
    assert!(watch.snapshot.stored.is_empty());
    // An engine's block of 32 tokens is two blocks of the cluster. The generated token does not fill another block.
    let prompt = prompt(1, 100);
    run(&adapter, generate(&prompt, 1)).await?;
    let mut stored = Vec::new();
    while stored.len() < 6 {
        for event in &timeout(LIMIT, watch.batches.recv()).await??.events {
            let Change::Stored(chain) = &event.change else { panic!("{event:?}") };
            stored.extend_from_slice(&chain.sequence_hashes);
        }
    }
    assert_eq!(stored, hashes(&prompt)[..6]);
    let snapshot = adapter.watch().await.context("the engine has ended")?.snapshot;
    assert_eq!(snapshot.stored.iter().flat_map(|chain| chain.sequence_hashes.clone()).collect::<Vec<_>>(), stored);
    Ok(())
}

#[tokio::test]
async fn cached_blocks_are_assumed_from_prompts_if_the_engine_publishes_no_events() -> Result<()> {
    let fake = FakeSettings { events: false, ..FakeSettings::default() };
    let External { adapter, fake: _fake, follower: _follower } = external(fake, |_| {}).await?;
    let prompt = prompt(1, 100);
    run(&adapter, generate(&prompt, 1)).await?;
    let snapshot = adapter.watch().await.context("the engine has ended")?.snapshot;
    let stored: Vec<_> = snapshot.stored.iter().flat_map(|chain| chain.sequence_hashes.clone()).collect();
    assert_eq!(stored, hashes(&prompt)[..6]);
    assert!(adapter.assumes_cache());
    let with_events = external(FakeSettings::default(), |_| {}).await?;
    assert!(!with_events.adapter.assumes_cache());
    Ok(())
}

#[tokio::test]
async fn restart_of_the_engine_ends_the_workers_instance() -> Result<()> {
    let External { fake, adapter, mut follower } = external(FakeSettings::default(), |_| {}).await?;
    fake.pretend_restart();
    let ended = timeout(LIMIT, follower.join_next()).await?.context("the follower has ended")??;
    assert!(matches!(ended, EngineEnded::Restarted));
    assert!(adapter.watch().await.is_none());
    Ok(())
}
