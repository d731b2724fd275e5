//! Checks that the rates measured on a simulated device equal the device's settings.

use crate::fake::{self, Behaviour, Fake};
use anyhow::{Context, Result, ensure};
use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};
use tandem_load::{HeaderMap, RateSettings, RatesError, rates};
use tandem_tests::{sim_settings, start};

fn settings(url: String) -> RateSettings {
    RateSettings {
        url,
        ca: None,
        model: None,
        headers: HeaderMap::new(),
        prompt_tokens_max: 2_048,
        chunk_tokens: 512,
        batch_max: 8,
        timeout: Duration::from_secs(200),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn measured_rates_are_those_of_the_device() -> Result<()> {
    let mut up = sim_settings();
    (up.prefill_workers, up.decode_workers) = (0, 1);
    let sim = &mut up.worker.sim;
    (sim.sim_speedup, sim.sim_prefill_tokens_per_second, sim.sim_prefill_overhead_ms) = (1.0, 4_000.0, 40.0);
    (sim.sim_decode_step_ms, sim.sim_decode_per_sequence_ms) = (50.0, 10.0);
    let cluster = start(up).await?;
    // Other programs of this machine make some times longer.
    let near = |found: f64, given: f64| (found / given - 1.0).abs() < 0.25;
    let mut attempts = 0;
    let found = loop {
        attempts += 1;
        let shown = AtomicUsize::new(0);
        let show = |_: String| {
            shown.fetch_add(1, Relaxed);
        };
        let found = rates(&settings(format!("http://{}", cluster.frontend())), show).await?;
        assert_eq!(shown.into_inner(), found.batches.len() + found.prompts.len());
        let prefill = near(found.prefill_tokens_per_second, 4_000.0) && near(found.prefill_step_ms, 40.0);
        if prefill && near(found.decode_step_ms, 50.0) && near(found.decode_sequence_ms, 10.0) {
            break found;
        }
        ensure!(attempts < 3, "{found:?}");
    };
    assert_eq!(found.batches.iter().map(|(batch, _)| *batch).collect::<Vec<_>>(), [1.0, 2.0, 4.0, 8.0]);
    ensure!(found.prompts.windows(2).all(|pair| pair[1].0 > pair[0].0) && found.prompts.len() == 6, "{found:?}");
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn measurement_ends_at_its_time_limit_and_says_what_a_server_refuses() -> Result<()> {
    let mut up = sim_settings();
    up.worker.sim.sim_speedup = 0.01;
    let cluster = start(up).await?;
    let url = format!("http://{}", cluster.frontend());
    let slow = RateSettings { timeout: Duration::from_millis(300), ..settings(url.clone()) };
    let error = rates(&slow, drop).await.err().context("the device is slow")?;
    ensure!(matches!(error, RatesError::Timeout(_)), "{error}");
    let unknown = RateSettings { model: Some("no-such-model".to_owned()), ..settings(url) };
    let error = rates(&unknown, drop).await.err().context("the model is unknown")?.to_string();
    ensure!(error.contains("no-such-model"), "{error}");
    cluster.stop().await;
    Ok(())
}

#[tokio::test]
async fn answers_without_text_are_left_out() -> Result<()> {
    for every in [2, 1] {
        let answered = AtomicUsize::new(0);
        let fake = Fake::start(fake::Settings::default(), move |body| match body["max_tokens"].as_u64() {
            Some(2) if answered.fetch_add(1, Relaxed).is_multiple_of(every) => Behaviour::Textless(2),
            Some(tokens) => Behaviour::Tokens(tokens),
            None => Behaviour::Refuse(400),
        })
        .await?;
        // All prompts take the same time, so whether a rate follows depends on chance.
        let measured = rates(&settings(fake.url.clone()), drop).await;
        match (every, &measured) {
            (2, Ok(_) | Err(RatesError::Flat)) | (1, Err(RatesError::NoUsage)) => {}
            _ => anyhow::bail!("every {every}: {measured:?}"),
        }
    }
    Ok(())
}
