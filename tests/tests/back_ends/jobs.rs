//! Tests of jobs of an external engine that prefills its own prompts, of the queue of jobs, and of the reports about the engine's cache.

use super::*;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tandem_engine::{Generated, Refusal};
use tandem_kv::sequence_hashes;

/// The time within which a change of the server's LoRAs must be known.
const LORAS_LIMIT: Duration = Duration::from_secs(5);

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

/// Only the first sample reports the number of cached tokens, whichever sample ends first. A cancellation before its first token leaves no
/// number, because vLLM then reports 0 cached tokens even if it had found some.
#[tokio::test]
async fn cancelled_samples_report_cached_tokens_once() -> Result<()> {
    let fake = FakeSettings { step: Duration::from_millis(5), ..FakeSettings::default() };
    let External { fake, adapter, follower: _follower } = external(fake, |_| {}).await?;
    for round in 0..20 {
        let mut job = adapter.generate(Generate { samples: 3, ..generate(&prompt(round, 100), 3_000) }).await?;
        // In every second round, the job is cancelled before its first token.
        let mut begun = [round % 2 == 1; 3];
        while begun.contains(&false) {
            if let Some(Event::Token { sample, .. }) = next(&mut *job).await? {
                begun[sample as usize] = true;
            }
        }
        let mut early = Vec::new();
        until("the engine runs the request", || {
            early.extend(poll(&mut *job));
            fake.running() > 0
        })
        .await?;
        job.cancel();
        let report = read(&mut *job).await?;
        let has_begun = round % 2 == 0 || !report.tokens_of(0).is_empty() || early.len() > 1;
        let expected = if has_begun { on_device(0) } else { Some(None) };
        assert_eq!((report.cached, report.finished), (expected, Vec::new()), "round {round}");
        until("the engine is idle", || fake.running() == 0).await?;
    }
    Ok(())
}

#[tokio::test]
async fn observed_engine_has_one_data_parallel_rank() -> Result<()> {
    for (ranks, rank, is_accepted) in [(1, None, true), (1, Some(0), true), (2, None, false), (2, Some(1), false)] {
        let observed = external(FakeSettings { ranks, ..FakeSettings::default() }, |settings| {
            (settings.observed_at, settings.rank) = (Some(([10, 0, 0, 1], 80).into()), rank);
        });
        match observed.await {
            Ok(_) => assert!(is_accepted, "{ranks} ranks, {rank:?}"),
            Err(error) => assert!(!is_accepted && error.to_string().contains("data-parallel ranks"), "{error}"),
        }
    }
    Ok(())
}

#[tokio::test]
async fn observed_engine_gets_no_requests_and_its_load_is_its_own_report() -> Result<()> {
    let External { fake, adapter, follower: _follower } =
        external(FakeSettings::default(), |settings| settings.observed_at = Some(([10, 0, 0, 1], 80).into())).await?;
    assert_eq!(adapter.engine_endpoint(), "10.0.0.1:80");
    let refused = adapter.generate(generate(&prompt(1, 40), 1)).await.err().context("the request was not refused")?;
    assert!(matches!(&refused, Refusal::Unsupported(why) if why.contains("--observe")), "{refused}");
    assert!(fake.seen().is_empty());
    let body = json!({ "model": "fake", "prompt": "hello", "max_tokens": 3_000, "stream": true });
    let running = reqwest::Client::new().post(format!("{}/v1/completions", fake.url())).json(&body).send().await?;
    let load = async || Ok::<_, anyhow::Error>(adapter.watch().await.context("the engine has ended")?.load);
    let mut changes = adapter.watch().await.context("the engine has ended")?.batches;
    while load().await?.running_sequences != 1 {
        timeout(LIMIT, changes.recv()).await??;
    }
    drop(running);
    while load().await?.running_sequences != 0 {
        timeout(LIMIT, changes.recv()).await??;
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
    until("the engine runs the first request", || fake.running() == 1).await?;
    assert_eq!(fake.seen().len(), 1, "the second job waits in the worker");
    drop(first);
    assert!(matches!(next(&mut *second).await?, Some(Event::Submitted)));
    assert_eq!(read(&mut *second).await?.finished, [(0, FinishReason::Length)]);
    Ok(())
}

#[tokio::test]
async fn error_of_the_engine_fails_the_job() -> Result<()> {
    let External { fake, adapter, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
    fake.fail(true);
    assert_eq!(run(&adapter, generate(&prompt(1, 40), 1)).await?.other, ["Failed"]);
    Ok(())
}

#[tokio::test]
async fn engine_receives_the_name_of_the_requested_lora() -> Result<()> {
    let fake = FakeSettings { loras: vec!["sql".to_owned()], ..FakeSettings::default() };
    let External { fake, adapter, follower: _follower } = external(fake, |_| {}).await?;
    assert_eq!(*adapter.loras(), ["sql"]);
    for (model, lora) in [("sql", json!("sql")), ("fake", Value::Null), ("another name", Value::Null)] {
        if lora.is_null() {
            adapter.serve_as(model);
        }
        let request = Generate { namespace: Namespace::new(model, "", "", ""), ..generate(&prompt(1, 100), 1) };
        assert_eq!(run(&adapter, request).await?.cached, on_device(0), "{model}");
        assert_eq!(fake.seen().last().context("the engine did not receive the request")?["model"], lora, "{model}");
    }
    fake.unload_lora("sql");
    let request = Generate { namespace: Namespace::new("sql", "", "", ""), ..generate(&prompt(1, 100), 1) };
    let report = run(&adapter, request).await?;
    assert_eq!(report.other, [r#"Refused(Unloaded("sql"))"#]);
    Ok(())
}

/// The request runs while its LoRA is unloaded, and ends as the engine ends it.
#[tokio::test]
async fn loras_are_those_that_the_server_lists_now() -> Result<()> {
    let fake = FakeSettings { step: Duration::from_millis(5), ..FakeSettings::default() };
    let External { fake, adapter, follower: _follower } = external(fake, |_| {}).await?;
    let change = async |change: &dyn Fn()| {
        let known = adapter.loras();
        change();
        timeout(LORAS_LIMIT, adapter.loras_changed(&known)).await.context("the LoRAs did not change in time")?;
        anyhow::Ok(adapter.loras())
    };
    assert_eq!(*change(&|| fake.load_lora("sql")).await?, ["sql"]);
    let of = |model: &str| Generate { namespace: Namespace::new(model, "", "", ""), ..generate(&prompt(1, 100), 400) };
    let mut running = adapter.generate(of("sql")).await?;
    assert!(matches!(next(&mut *running).await?, Some(Event::Submitted)));
    until("the engine runs the request", || fake.running() == 1).await?;
    assert_eq!(*change(&|| fake.unload_lora("sql")).await?, [""; 0]);
    assert_eq!(read(&mut *running).await?.finished, [(0, FinishReason::Length)]);
    // A request that was accepted before the LoRA was unloaded must not be computed by the base model.
    assert_eq!(run(&adapter, of("sql")).await?.other, [r#"Refused(Unloaded("sql"))"#]);

    let long = "x".repeat(257);
    adapter.serve_as("my model");
    let listed = change(&|| ["my model", &long, "poem"].iter().for_each(|name| fake.load_lora(name))).await?;
    assert_eq!(*listed, ["poem"], "the others are not usable names");
    Ok(())
}

fn hashes(tokens: &[TokenId]) -> Vec<tandem_kv::SequenceHash> {
    sequence_hashes(&HashKey::new([7; 16]), &namespace(), 16, tokens)
}

/// A block of the engine has 32 tokens, which are two blocks of the cluster. The engine does not compute the KV of an answer's last token.
#[tokio::test]
async fn cached_blocks_are_assumed_from_prompts_and_answers_if_the_engine_publishes_no_events() -> Result<()> {
    let fake = FakeSettings { events: false, ..FakeSettings::default() };
    let prompt = prompt(1, 100);
    for (prompt_logprobs, max_tokens, samples, blocks) in
        [(Some(1), 0, 1, 6), (None, 0, 1, 6), (None, 28, 1, 6), (None, 29, 1, 8), (Some(1), 29, 1, 8), (None, 29, 3, 12)]
    {
        let External { adapter, fake: _fake, follower: _follower } = external(fake.clone(), |_| {}).await?;
        let mut request = Generate { prompt_logprobs, samples, ..generate(&prompt, max_tokens) };
        request.sampling.temperature = 1.0;
        let report = run(&adapter, request).await?;
        let snapshot = adapter.watch().await.context("the engine has ended")?.snapshot;
        let stored: BTreeSet<_> = snapshot.stored.iter().flat_map(|chain| chain.sequence_hashes.clone()).collect();
        let mut expected = BTreeSet::new();
        for sample in 0..samples {
            let all = [&*prompt, &report.tokens_of(sample)].concat();
            let computed = (all.len() - 1).max(prompt.len());
            expected.extend(hashes(&all[..computed / 32 * 32]));
        }
        assert_eq!((&stored, stored.len()), (&expected, blocks), "{max_tokens} tokens, {samples} samples, {prompt_logprobs:?}");
        assert!(adapter.assumes_cache());
    }
    let with_events = external(FakeSettings::default(), |_| {}).await?;
    assert!(!with_events.adapter.assumes_cache());
    Ok(())
}

/// Otherwise a request would be lost twice with one server, and after two losses it is not sent again.
#[tokio::test]
async fn rank_of_a_server_that_has_failed_refuses_what_another_rank_has_lost() -> Result<()> {
    let fake = FakeVllm::start(FakeSettings { ranks: 2, ..FakeSettings::default() }).await?;
    let of_all = VllmSettings { rank: Some(0), ..settings(&fake) };
    let (first, _first_follower) = connect(of_all.clone()).await?.into_parts();
    let (second, _second_follower) = connect(VllmSettings { rank: Some(1), ..of_all }).await?.into_parts();
    fake.fail(true);
    for rank in [&first, &second] {
        let report = run(rank, generate(&prompt(1, 40), 3)).await?;
        assert_eq!(report.other, ["Failed"], "the server is healthy, so the request may be the cause");
    }
    fake.end();
    assert_eq!(run(&first, generate(&prompt(1, 40), 3)).await?.other, ["Failed"]);
    assert!(matches!(second.generate(generate(&prompt(1, 40), 3)).await, Err(Refusal::Unusable(_))));
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

#[tokio::test]
async fn constraint_reaches_the_engine_and_a_partly_generated_text_is_refused() -> Result<()> {
    let External { fake, adapter, follower: _follower } = external(FakeSettings::default(), |_| {}).await?;
    let constraint = Some(tandem_grammar::Kind::Choice(vec!["yes".to_owned(), "no".to_owned()]).into());
    let constrained = |seed| {
        let job = generate(&prompt(seed, 40), 3);
        Generate { sampling: Sampling { constraint: constraint.clone(), ..job.sampling.clone() }, ..job }
    };
    run(&adapter, constrained(1)).await?;
    run(&adapter, generate(&prompt(2, 40), 3)).await?;
    let seen = fake.seen();
    let sent: Vec<_> = seen.iter().map(|body| &body["sampling_params"]["structured_outputs"]["choice"]).collect();
    assert_eq!(sent, [&serde_json::json!(["yes", "no"]), &serde_json::Value::Null]);
    let begun = Generate { generated: vec![Generated { sample: 0, tokens: vec![5] }], ..constrained(3) };
    let refusal = adapter.generate(begun).await.err().expect("the engine cannot continue the text");
    assert!(matches!(&refusal, Refusal::Unsupported(why) if why.contains("another worker has begun")), "{refusal}");
    let not_begun = Generate { generated: vec![Generated { sample: 0, tokens: Vec::new() }], ..constrained(3) };
    run(&adapter, not_begun).await?;
    // The engine cannot constrain the inputs of calls, so the text is free and can be continued.
    let calls = Some(tandem_grammar::Kind::CallInputs(Vec::new()).into());
    let begun = Generate { generated: vec![Generated { sample: 0, tokens: vec![5] }], ..constrained(4) };
    run(&adapter, Generate { sampling: Sampling { constraint: calls, ..begun.sampling.clone() }, ..begun }).await?;
    let seen = fake.seen();
    let last = seen.last().expect("the server has seen requests");
    assert_eq!(last["sampling_params"]["structured_outputs"], serde_json::Value::Null);
    assert_eq!(last["sampling_params"]["ignore_eos"], true);
    Ok(())
}
