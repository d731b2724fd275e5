//! Tests of equal prompts that arrive at the same time.

use anyhow::Result;
use serde_json::json;
use tandem::settings::{PrefillPlace, UpSettings};
use tandem_tests::{Client, Endpoint, prose, sim_settings_with, start};

#[tokio::test(flavor = "multi_thread")]
async fn equal_prompts_of_one_request_are_computed_once() -> Result<()> {
    const PROMPTS: u64 = 4;
    for place in [PrefillPlace::Local, PrefillPlace::Remote] {
        let cluster = start(UpSettings { prefill_workers: 4, decode_workers: 4, ..sim_settings_with(place) }).await?;
        // Computing a prompt of 40 tokens again costs less than the delay that another sequence causes on its worker.
        for salt in 0..4 {
            let prompts = vec![format!("{salt}{}", "x".repeat(39)); PROMPTS as usize];
            let request = json!({ "model": cluster.model_id(), "prompt": prompts, "max_tokens": 4, "temperature": 0 });
            let answer = Client::new(cluster.frontend()).answer(Endpoint::Completions.path(), &request).await?;
            assert_eq!((answer.status, answer.usage("/prompt_tokens")), (200, 40 * PROMPTS), "{answer:?}");
            assert_eq!(answer.cached_tokens(), 32 * (PROMPTS - 1), "{place:?}: {answer:?}");
        }
        cluster.assert_idle().await?;
        cluster.stop().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn burst_of_equal_prompts_is_computed_and_transferred_at_most_twice() -> Result<()> {
    const PROMPT_TOKENS: u64 = 4_000;
    let mut settings = UpSettings { prefill_workers: 4, ..sim_settings_with(PrefillPlace::Remote) };
    settings.worker.sim.sim_speedup = 4.0;
    let block_size = u64::from(settings.common.block_size);
    let cluster = start(settings).await?;
    let mut text = prose("burst", 2_000);
    text.truncate(PROMPT_TOKENS as usize);
    let request = Endpoint::Completions.request(&cluster.model_id(), &text, json!({ "max_tokens": 4, "temperature": 0 }));
    let mut requests = tokio::task::JoinSet::new();
    for _ in 0..32 {
        let (client, request) = (Client::new(cluster.frontend()), request.clone());
        requests.spawn(async move { client.answer(Endpoint::Completions.path(), &request).await });
    }
    let (mut computed, mut texts) = (0, std::collections::BTreeSet::new());
    while let Some(answer) = requests.join_next().await {
        let answer = answer??;
        assert_eq!((answer.status, answer.usage("/prompt_tokens")), (200, PROMPT_TOKENS), "{answer:?}");
        computed += PROMPT_TOKENS - answer.cached_tokens();
        texts.insert(answer.text(0));
    }
    assert_eq!(texts.len(), 1, "equal requests have equal answers");
    // Each request also computes the incomplete last block of its prompt.
    assert!(computed <= 2 * PROMPT_TOKENS + 32 * block_size, "{computed} tokens were computed");
    let block_bytes = cluster.inner().workers[0].engine.as_ref().expect("an engine in this process").info().block_bytes as u64;
    let transferred = Client::new(cluster.frontend()).metric("tandem_worker_kv_transfer_bytes_total", "received").await?;
    assert!(transferred <= (2 * PROMPT_TOKENS.div_ceil(block_size) * block_bytes) as f64, "{transferred} bytes were transferred");
    cluster.assert_idle().await?;
    cluster.stop().await;
    Ok(())
}
