//! Tests that the usage which clients receive agrees with the metrics of the frontend and of the workers.

use anyhow::Result;
use serde_json::{Value, json};
use std::ops::AddAssign;
use std::time::Duration;
use tandem::settings::PrefillPlace;
use tandem_tests::{
    Answer, Client, Endpoint, TestCluster, prose, sim_settings, sim_settings_with, start, start_without_cached_tokens,
};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Usage {
    requests: u64,
    prompts: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    cached_tokens: u64,
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.prompts += other.prompts;
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.cached_tokens += other.cached_tokens;
    }
}

fn request(model: &str, number: u64) -> (Endpoint, Value, u64) {
    let length = 20 + (number as usize * 37) % 300;
    // Each text is used for several requests, so that some of its blocks are cached.
    let text = |salt: u64| prose(&format!("reconciled {}", salt % 23), length / 6);
    let ids: Vec<u64> = (0..length as u64).map(|position| (position * (1 + number % 7)) % 250).collect();
    let stream = number.is_multiple_of(2);
    let (endpoint, prompts, mut options) = match number / 2 % 9 {
        0 => (Endpoint::Chat, 1, json!({ "n": 3, "max_tokens": 9 })),
        1 => (Endpoint::Completions, 3, json!({ "prompt": [text(number), text(number), text(number + 1)], "n": 2 })),
        2 => (Endpoint::Completions, 1, json!({ "prompt": ids, "max_tokens": 1 })),
        3 => (Endpoint::Completions, 2, json!({ "prompt": [ids, [1, 2, 3]], "ignore_eos": true, "min_tokens": 3 })),
        // The prompt's logprobs are requested, so the cache is not read.
        4 => (Endpoint::Completions, 1, json!({ "echo": true, "logprobs": 2, "max_tokens": 4 })),
        5 => (Endpoint::Completions, 1, json!({ "echo": true, "max_tokens": 0 })),
        6 => (Endpoint::Chat, 1, json!({ "stop": ["e", "a"], "max_completion_tokens": 40, "temperature": 2 })),
        7 => (Endpoint::Chat, 1, json!({ "max_tokens": 30, "seed": number, "logprobs": true })),
        _ => (Endpoint::Completions, 1, json!({ "max_tokens": 60, "ignore_eos": true })),
    };
    if stream {
        options["stream"] = true.into();
        options["stream_options"] = json!({ "include_usage": true, "continuous_usage_stats": number.is_multiple_of(3) });
    }
    (endpoint, endpoint.request(model, &text(number), options), prompts)
}

fn usage_of(answer: &Answer, prompts: u64) -> Usage {
    assert!(answer.status == 200 && answer.done, "{answer:?}");
    Usage {
        requests: 1,
        prompts,
        prompt_tokens: answer.usage("/prompt_tokens"),
        completion_tokens: answer.usage("/completion_tokens"),
        cached_tokens: answer.cached_tokens(),
    }
}

async fn send_all(cluster: &TestCluster, client: &Client, numbers: std::ops::Range<u64>) -> Result<Usage> {
    let mut clients = tokio::task::JoinSet::new();
    for number in numbers {
        let (client, (endpoint, body, prompts)) = (client.clone(), request(&cluster.model_id(), number));
        clients.spawn(async move { anyhow::Ok(usage_of(&client.answer(endpoint.path(), &body).await?, prompts)) });
    }
    let mut usage = Usage::default();
    while let Some(ended) = clients.join_next().await {
        usage += ended??;
    }
    Ok(usage)
}

/// Runs clients that disconnect before the end of their answers. Returns two sums of prompt tokens: for clients that received a token, and
/// for clients that may not have received one.
async fn disconnect_clients(cluster: &TestCluster, client: &Client, clients: u64) -> Result<(u64, u64)> {
    let (mut scheduled, mut uncertain) = (0, 0);
    let mut clients_running = tokio::task::JoinSet::new();
    for number in 0..clients {
        let text = prose(&format!("reconciled {}", number % 23), 50);
        let waits_for_token = number.is_multiple_of(2);
        *(if waits_for_token { &mut scheduled } else { &mut uncertain }) += text.len() as u64;
        // The answer is so long that its client disconnects before the end.
        let options = json!({ "max_tokens": 20_000, "ignore_eos": true, "stream": waits_for_token });
        let body = Endpoint::Completions.request(&cluster.model_id(), &text, options);
        let client = client.clone();
        clients_running.spawn(async move {
            let reply = client.send(Endpoint::Completions.path(), &body);
            if waits_for_token {
                drop(reply.await?);
            } else {
                let _ = tokio::time::timeout(Duration::from_millis(number), reply).await;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = clients_running.join_next().await {
        ended??;
    }
    Ok((scheduled, uncertain))
}

async fn counted(client: &Client, name: &str, labels: &str) -> Result<u64> {
    Ok(client.metric(name, labels).await? as u64)
}

async fn usage_counted_by_frontend(client: &Client, source: &str) -> Result<Usage> {
    let frontend = async |name: &str, labels: &str| counted(client, &format!("tandem_frontend_{name}"), labels).await;
    let usage = Usage {
        requests: frontend("requests_total", "code=\"200\"").await?,
        prompts: frontend("request_cached_tokens_count", "").await?,
        prompt_tokens: frontend("prompt_tokens_total", "").await?,
        completion_tokens: frontend("completion_tokens_total", "").await?,
        cached_tokens: frontend("cached_tokens_total", &format!("source=\"{source}\"")).await?,
    };
    // The frontend's counters and histograms must have the same sums.
    assert_eq!(frontend("cached_tokens_total", "").await?, usage.cached_tokens);
    assert_eq!(frontend("request_cached_tokens_sum", "").await?, usage.cached_tokens);
    assert_eq!(frontend("request_prompt_tokens_sum", "").await?, usage.prompt_tokens);
    assert_eq!(frontend("request_completion_tokens_sum", "").await?, usage.completion_tokens);
    for histogram in ["request_cached_ratio", "request_prompt_tokens", "request_completion_tokens"] {
        assert_eq!(frontend(&format!("{histogram}_count"), "").await?, usage.prompts, "{histogram}");
    }
    Ok(usage)
}

async fn assert_counts_agree(cluster: TestCluster, place: PrefillPlace, source: &str) -> Result<()> {
    let client = Client::new(cluster.frontend());
    let workers = async |name: &str| counted(&client, &format!("tandem_worker_{name}"), "").await;

    let mut reported = send_all(&cluster, &client, 0..100).await?;
    // The next requests use the caches only if the router's index has the blocks.
    cluster.settle_events().await?;
    reported += send_all(&cluster, &client, 100..200).await?;
    assert!(reported.cached_tokens > 0, "{reported:?}");
    assert_eq!(usage_counted_by_frontend(&client, source).await?, reported, "{place:?}");
    // No attempt failed, so each prompt was prefilled on exactly one worker.
    assert_eq!(counted(&client, "tandem_frontend_attempts_failed_total", "").await?, 0);
    assert_eq!(workers("prompt_tokens_total").await?, reported.prompt_tokens, "{place:?}");
    assert_eq!(workers("prefix_cache_requests_total").await?, reported.prompts, "{place:?}");
    if source == "worker" {
        assert_eq!(workers("cached_tokens_total").await?, reported.cached_tokens, "{place:?}");
    }

    // The frontend's sums exclude refused and cancelled requests. The workers' sums include every request that they started.
    let (more, disconnected) = tokio::join!(send_all(&cluster, &client, 200..260), disconnect_clients(&cluster, &client, 40));
    reported += more?;
    let (scheduled, uncertain) = disconnected?;
    let refused = Endpoint::Chat.request(&cluster.model_id(), "x", json!({ "n": 0 }));
    assert_eq!(client.answer(Endpoint::Chat.path(), &refused).await?.status, 400);
    cluster.assert_idle().await?;
    assert_eq!(usage_counted_by_frontend(&client, source).await?, reported, "{place:?}");
    assert_eq!(counted(&client, "tandem_frontend_requests_total", "code=\"400\"").await?, 1);
    let cancelled = counted(&client, "tandem_frontend_cancelled_total", "").await?;
    assert_eq!(counted(&client, "tandem_frontend_requests_total", "code=\"499\"").await?, cancelled);
    assert!((20..=40).contains(&cancelled), "{place:?}: {cancelled}");
    assert_eq!(counted(&client, "tandem_frontend_attempts_failed_total", "").await?, 0);
    let begun = workers("prompt_tokens_total").await? - reported.prompt_tokens;
    assert!((scheduled..=scheduled + uncertain).contains(&begun), "{place:?}: {scheduled} + {uncertain}, {begun}");
    let checked = cluster.assert_usage_reconciles(&client).await?;
    assert_eq!(checked.answers as u64, reported.requests);
    assert_eq!(checked.estimates > 0, source != "worker");
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_agrees_with_metrics_wherever_prompts_are_prefilled() -> Result<()> {
    for prefill in [PrefillPlace::Remote, PrefillPlace::Local, PrefillPlace::Auto] {
        assert_counts_agree(start(sim_settings_with(prefill)).await?, prefill, "worker").await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn estimated_usage_agrees_with_metrics() -> Result<()> {
    let cluster = start_without_cached_tokens(sim_settings()).await?;
    assert_counts_agree(cluster, PrefillPlace::Auto, "router_estimate").await
}
