//! Tests with the real model that tokens and logprobs have the same bits, however the prompt was computed.

use anyhow::Result;
use serde_json::{Value, json};
use tandem::settings::PrefillPlace;
use tandem_tests::{Client, Endpoint, cpu_settings, prose, start, with_prefill};

const PATH: &str = "/v1/completions";
const TOKENS: u64 = 20;

fn request(model: &str, salt: &str, seed: u64, n: u64) -> Value {
    let options = json!({
        "max_tokens": TOKENS, "temperature": 0.9, "top_p": 0.95, "seed": seed, "n": n, "logprobs": 5, "ignore_eos": true,
    });
    Endpoint::Completions.request(model, &prose(salt, 330), options)
}

async fn choices(client: &Client, request: &Value) -> Result<(Vec<Value>, u64)> {
    let answer = client.answer(PATH, request).await?;
    anyhow::ensure!(answer.status == 200, "{answer:?}");
    let mut choices = answer.frames[0]["choices"].as_array().cloned().expect("the answer has choices");
    choices.iter_mut().for_each(|choice| choice["index"] = Value::Null);
    assert!(
        choices
            .iter()
            .all(|choice| choice["logprobs"]["token_logprobs"].as_array().is_some_and(|all| all.len() as u64 == TOKENS))
    );
    Ok((choices, answer.cached_tokens()))
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_bit_identical_cold_cached_local_remote_batched_and_chunked() -> Result<()> {
    let Some(settings) = cpu_settings() else { return Ok(()) };
    let mut reference = None;
    for (prefill, prefill_chunk_budget) in
        [(PrefillPlace::Local, 100_000), (PrefillPlace::Local, 64), (PrefillPlace::Remote, 512), (PrefillPlace::Remote, 64)]
    {
        let name = format!("prefill {prefill:?}, budget {prefill_chunk_budget}");
        let mut settings = with_prefill(prefill, settings.clone());
        settings.worker.prefill_chunk_budget = Some(prefill_chunk_budget);
        let cluster = start(settings).await?;
        let (client, model) = (Client::new(cluster.frontend()), cluster.model_id());
        // The request with its three samples runs in one batch with seven other requests, and no prompt is cached.
        let target = request(&model, "asked", 41, 3);
        let others: Vec<_> = (0..7).map(|other| request(&model, &format!("other {other}"), other, 1)).collect();
        let others = futures::future::try_join_all(others.iter().map(|other| choices(&client, other)));
        let (batched, others) = tokio::join!(choices(&client, &target), others);
        let ((batched, cached), others) = (batched?, others?);
        assert_eq!(cached, 0, "{name}");
        // The second time, the same request runs alone, and its prompt is cached.
        let (warm, cached) = choices(&client, &target).await?;
        assert!(cached > 300, "{name}: {cached}");
        assert_eq!(warm, batched, "{name}: a cached request alone and a cold one in a batch differ");
        for sample in 0..3 {
            let (single, _) = choices(&client, &request(&model, "asked", 41 + sample, 1)).await?;
            assert_eq!(single[0], batched[sample as usize], "{name}: a single request with the seed of sample {sample}");
        }
        let all = (batched, others);
        match &reference {
            None => reference = Some(all),
            Some(reference) => assert_eq!(*reference, all, "{name}"),
        }
        cluster.assert_idle().await?;
        cluster.stop().await;
    }
    Ok(())
}
