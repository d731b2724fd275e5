//! Tests that all resources of a request are released when its client disconnects.

use anyhow::Result;
use serde_json::json;
use std::time::Duration;
use tandem::settings::PrefillPlace;
use tandem_tests::{Client, Endpoint, prose, sim_settings_with, start};

/// Two hundred requests are sent. The clients of half of them disconnect, before the first token or while the answer is streamed.
#[tokio::test(flavor = "multi_thread")]
async fn no_resource_is_held_after_half_the_clients_disconnect_at_random_phases() -> Result<()> {
    for prefill in [PrefillPlace::Remote, PrefillPlace::Local, PrefillPlace::Auto] {
        let mut settings = sim_settings_with(prefill);
        // The engines are so slow that clients disconnect in every phase of a request. The caches are so small that sequences are
        // preempted.
        settings.worker.sim.sim_speedup = 10.0;
        settings.worker.kv_capacity_tokens = Some(16_384);
        // Routers do not know that clients will disconnect, and expect their long answers to keep the workers full.
        settings.frontend.limits.max_wait = 0.0;
        let cluster = start(settings).await?;
        let client = Client::new(cluster.frontend());
        let mut clients = tokio::task::JoinSet::new();
        for number in 0..200u64 {
            let (client, model) = (client.clone(), cluster.model_id());
            clients.spawn(async move {
                let endpoint = if number % 3 == 0 { Endpoint::Chat } else { Endpoint::Completions };
                let text = prose(&format!("{}", number % 40), 100 + (number as usize * 37) % 900);
                let reads_answer = number % 2 == 0;
                let options = match reads_answer {
                    true => json!({ "max_tokens": 5 + number % 60, "stream": number % 4 == 0, "n": 1 + number % 4 / 2 }),
                    // The answer is so long that its client disconnects before it is complete.
                    false => json!({ "max_tokens": 2_000, "stream": true, "ignore_eos": true }),
                };
                let request = endpoint.request(&model, &text, options);
                if reads_answer {
                    let answer = client.answer(endpoint.path(), &request).await?;
                    anyhow::ensure!(answer.status == 200, "request {number}: {answer:?}");
                    return anyhow::Ok(());
                }
                // Errors of these clients are ignored, because the clients do not read their answers.
                match number % 6 {
                    // The client disconnects before the first token, while the request is queued, prefilled or transferred.
                    1 => {
                        let disconnect_after = Duration::from_micros(number * 7_919 % 400_000);
                        let _ = tokio::time::timeout(disconnect_after, client.send(endpoint.path(), &request)).await;
                    }
                    3 => drop(client.send(endpoint.path(), &request).await?),
                    _ => {
                        let mut response = client.send(endpoint.path(), &request).await?;
                        for _ in 0..number % 20 {
                            response.chunk().await?;
                        }
                    }
                }
                Ok(())
            });
        }
        while let Some(ended) = clients.join_next().await {
            ended??;
        }
        cluster.assert_usage_reconciles(&client).await?;
        let cancelled = client.metric("tandem_frontend_cancelled_total", "").await?;
        assert!((60.0..=100.0).contains(&cancelled), "{prefill:?}: {cancelled} of about 100 cancelled requests were counted");
        cluster.stop().await;
    }
    Ok(())
}
