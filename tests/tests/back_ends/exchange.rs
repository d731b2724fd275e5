//! Tests of the transfer of KV from one external engine to another with handles.

use super::*;
use tandem_engine::{KvHandle, Prefill};
use tandem_worker::KvExchange;

async fn pair() -> Result<(External, External)> {
    let fake = FakeSettings::default();
    Ok((external(fake.clone(), |_| {}).await?, external(fake, |_| {}).await?))
}

async fn export(adapter: &Adapter, tokens: &[TokenId]) -> Result<(Option<Option<CachedTokens>>, KvHandle)> {
    let prefill = Prefill {
        request_id: "request".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: namespace(),
        prompt: tokens.to_vec(),
        first_token: None,
    };
    let mut job = adapter.prefill(prefill).await?;
    let mut cached = None;
    while let Some(event) = next(&mut *job).await? {
        match event {
            Event::Scheduled { cached: counted } => cached = Some(counted),
            Event::Exported(handle) => return Ok((cached, handle)),
            Event::Submitted => {}
            other => anyhow::bail!("{other:?}"),
        }
    }
    anyhow::bail!("the engine returned no KV handle")
}

async fn pull(adapter: &Adapter, tokens: &[TokenId], handle: KvHandle) -> Result<Report> {
    let mut job = adapter.generate(Generate { kv: KvSource::Handle, ..generate(tokens, 6) }).await?;
    assert!(matches!(next(&mut *job).await?, Some(Event::Submitted)));
    job.pull(handle).await;
    read(&mut *job).await
}

#[tokio::test]
async fn pulled_prompt_is_continued_and_only_the_prefilling_engine_counts_the_prompt() -> Result<()> {
    let (prefill, decode) = pair().await?;
    let prompt = prompt(1, 100);
    for cached in [0, 96] {
        let (counted, handle) = export(&prefill.adapter, &prompt).await?;
        assert_eq!(counted, Some(Some(CachedTokens::on_device(cached))));
        let report = pull(&decode.adapter, &prompt, handle).await?;
        assert_eq!((report.tokens_of(0), report.cached, report.started), (continuation(&prompt, 6, None), None, 1));
    }
    assert_eq!(decode.fake.counted(), (0, 0), "the decoding engine computed no prompt");
    Ok(())
}

#[tokio::test]
async fn loss_of_held_kv_fails_only_the_pull_of_that_kv() -> Result<()> {
    let (prefill, decode) = pair().await?;
    let prompt = prompt(1, 100);
    let (_, handle) = export(&prefill.adapter, &prompt).await?;
    prefill.fake.lose_held_kv();
    assert_eq!(pull(&decode.adapter, &prompt, handle).await?.other, ["PullFailed"]);
    let (_, handle) = export(&prefill.adapter, &prompt).await?;
    assert_eq!(pull(&decode.adapter, &prompt, handle).await?.tokens_of(0), continuation(&prompt, 6, None));
    Ok(())
}

/// For a cancelled request vLLM reports 0 cached tokens, even if it had found some, so the count must not be used.
#[tokio::test]
async fn cancelled_prefill_reports_neither_cached_tokens_nor_a_handle() -> Result<()> {
    let fake = FakeSettings { step: Duration::from_millis(50), ..FakeSettings::default() };
    let External { fake, adapter, follower: _follower } = external(fake, |_| {}).await?;
    let prompt = prompt(1, 100);
    export(&adapter, &prompt).await?;
    let prefill = Prefill {
        request_id: "request".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: namespace(),
        prompt,
        first_token: None,
    };
    let mut job = adapter.prefill(prefill).await?;
    until("the engine runs the request", || {
        poll(&mut *job);
        fake.running() == 1
    })
    .await?;
    job.cancel();
    let report = read(&mut *job).await?;
    assert_eq!(report, Report { cached: Some(None), ..Report::default() });
    Ok(())
}

#[tokio::test]
async fn transfer_time_begins_with_the_arrival_of_the_handle() -> Result<()> {
    const PREFILL: Duration = Duration::from_secs(1);
    let (prefill, decode) = pair().await?;
    let prompt = prompt(1, 100);
    let mut job = decode.adapter.generate(Generate { kv: KvSource::Handle, ..generate(&prompt, 6) }).await?;
    assert!(matches!(next(&mut *job).await?, Some(Event::Submitted)));
    tokio::time::sleep(PREFILL).await;
    job.pull(export(&prefill.adapter, &prompt).await?.1).await;
    match next(&mut *job).await? {
        Some(Event::Started(started)) => assert!(started.kv_transfer < PREFILL, "{started:?}"),
        other => anyhow::bail!("{other:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn incomplete_handle_is_not_sent_to_the_engine() -> Result<()> {
    let (_, decode) = pair().await?;
    let handle = KvHandle { bytes: br#"{"do_remote_prefill":true}"#.to_vec(), valid_for: LIMIT, chunks: Vec::new() };
    assert_eq!(pull(&decode.adapter, &prompt(1, 100), handle).await?.other, ["PullFailed"]);
    assert!(decode.fake.seen().is_empty());
    Ok(())
}

#[tokio::test]
async fn engine_has_a_kv_exchange_family_only_with_a_connector() -> Result<()> {
    let (prefill, _) = pair().await?;
    assert_eq!(prefill.adapter.kv_exchange().family(), "nixl/vllm-0.32.0/auto/32");
    let alone = external(FakeSettings::default(), |settings| settings.nixl = false).await?;
    assert_eq!(alone.adapter.kv_exchange().family(), KvExchange::NO_FAMILY);
    Ok(())
}
