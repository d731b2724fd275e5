//! Why tokens of prompts were not cached: in each answer, on the dashboard and in the metrics, compared with the ledger.

use anyhow::Result;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tandem::settings::{PrefillPlace, UpSettings};
use tandem_tests::{Answer, Client, Endpoint, TestCluster, prose, sim_settings_with, start, wait_until};

/// A cluster, and the sums of what its clients have received.
struct Explained {
    cluster: TestCluster,
    client: Client,
    sums: BTreeMap<String, u64>,
    prompt_tokens: u64,
    cached_tokens: u64,
}

impl Explained {
    async fn start(settings: UpSettings) -> Result<Self> {
        let cluster = start(settings).await?;
        let client = Client::new(cluster.frontend());
        Ok(Self { cluster, client, sums: BTreeMap::new(), prompt_tokens: 0, cached_tokens: 0 })
    }

    /// Sends a prompt, and waits until the router knows the workers' caches. Checks that each token of the prompt was cached or has a
    /// cause, and returns the prompt's details.
    async fn ask(&mut self, text: &str, salt: &str) -> Result<Value> {
        let mut request = Endpoint::Completions.request(&self.cluster.model_id(), text, json!({ "max_tokens": 1 }));
        if !salt.is_empty() {
            request["cache_salt"] = json!(salt);
        }
        let answer = self.client.answer(Endpoint::Completions.path(), &request).await?;
        self.add(&answer)?;
        self.cluster.settle_events().await?;
        Ok(answer.details()["prefix"].clone())
    }

    fn add(&mut self, answer: &Answer) -> Result<()> {
        let prefix = &answer.details()["prefix"];
        let causes: BTreeMap<String, u64> = serde_json::from_value(prefix["uncached"].clone())?;
        let (prompt, cached) = (answer.usage("/prompt_tokens"), answer.cached_tokens());
        assert_eq!(causes.values().sum::<u64>() + cached, prompt, "{prefix}");
        assert!(prefix["possible_tokens"].as_u64() >= prefix["eligible_tokens"].as_u64(), "{prefix}");
        assert!(prefix["eligible_tokens"].as_u64() >= Some(cached), "{prefix}");
        causes.into_iter().for_each(|(cause, tokens)| *self.sums.entry(cause).or_default() += tokens);
        self.prompt_tokens += prompt;
        self.cached_tokens += cached;
        Ok(())
    }

    /// Checks that the sums of the answers equal those of the router's metrics, of the dashboard's history and of the ledger. Clients may
    /// see blocks of another namespace as new text.
    async fn end(self) -> Result<()> {
        self.cluster.assert_usage_reconciles(&self.client).await?;
        let text = self.client.get("/metrics").await?.1;
        let metric =
            |cause: &str| tandem_tests::sum(&text, "tandem_router_prefix_tokens_total", &format!("cause=\"{cause}\"")) as u64;
        assert_eq!(metric("found"), self.cached_tokens);
        for (cause, tokens) in &self.sums {
            let hidden = if cause == "new_text" { metric("other_namespace") } else { 0 };
            assert_eq!(metric(cause) + hidden, *tokens, "{cause}");
        }
        let computed = self.prompt_tokens - self.cached_tokens;
        assert_eq!(self.sums.values().sum::<u64>(), computed);
        let history: Value = serde_json::from_str(&self.client.get("/dashboard/history").await?.1)?;
        let sum = |field: &str| -> u64 {
            let workers = history["periods"].as_array().into_iter().flatten().filter_map(|period| period["workers"].as_object());
            workers.flat_map(|workers| workers.values()).filter_map(|sums| sums[field].as_u64()).sum()
        };
        assert_eq!((sum("facts_prompt_tokens"), sum("found_tokens")), (self.prompt_tokens, self.cached_tokens));
        self.cluster.stop().await;
        Ok(())
    }
}

async fn check_causes(settings: UpSettings) -> Result<()> {
    let mut explained = Explained::start(settings).await?;
    let text = prose("why", 500);
    let new = explained.ask(&text, "").await?;
    assert_eq!((&new["nearest"], &new["known_tokens"]), (&Value::Null, &json!(0)), "{new}");
    assert!(new["uncached"]["new_text"].as_u64() > Some(300), "{new}");

    let again = explained.ask(&text, "").await?;
    assert_eq!(again["chosen_tokens"], again["possible_tokens"], "{again}");
    let tail = again["uncached"]["below_block"].as_u64();
    assert_eq!(
        (again["uncached"].as_object().map(serde_json::Map::len), tail.is_some_and(|tail| tail <= 16)),
        (Some(1), true),
        "{again}"
    );

    let salted = explained.ask(&text, "another tenant").await?;
    assert_eq!(salted["uncached"].get("other_namespace"), None, "a client does not see what others have sent: {salted}");
    let metrics = explained.client.get("/metrics").await?.1;
    let other_namespace = tandem_tests::sum(&metrics, "tandem_router_prefix_tokens_total", "cause=\"other_namespace\"");
    assert!(other_namespace > 300.0, "{other_namespace}");
    let recorded: Value = serde_json::from_str(&explained.client.get("/dashboard/requests").await?.1)?;
    let last = recorded["requests"].as_array().and_then(|requests| requests.last()).cloned().unwrap_or_default();
    assert_eq!(last["prefix"]["uncached"]["other_namespace"], other_namespace as u64, "the operator sees it: {last}");

    // The other end is new, and the nearest prefix is the beginning.
    let other = explained.ask(&format!("{}{}", &text[..text.len() / 2], prose("other", 100)), "").await?;
    assert_eq!(other["nearest"]["removed_s"], Value::Null, "{other}");
    assert!(other["nearest"]["tokens"].as_u64() > Some(100) && other["uncached"]["new_text"].as_u64() > Some(50), "{other}");

    explained.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn each_token_has_a_cause_on_simulated_workers() -> Result<()> {
    for prefill in [PrefillPlace::Remote, PrefillPlace::Local] {
        check_causes(sim_settings_with(prefill)).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_token_has_a_cause_with_the_real_model() -> Result<()> {
    let Some(settings) = tandem_tests::cpu_settings() else { return Ok(()) };
    check_causes(settings).await
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_prompts_are_named_with_the_worker_that_removed_them() -> Result<()> {
    let mut settings = sim_settings_with(PrefillPlace::Local);
    settings.worker.kv_capacity_tokens = Some(16_384);
    settings.decode_workers = 1;
    let mut explained = Explained::start(settings).await?;
    let text = prose("evicted", 1_000);
    explained.ask(&text, "").await?;
    for number in 0..20 {
        explained.ask(&prose(&format!("{number}"), 1_000), "").await?;
    }
    let request = Endpoint::Completions.request(&explained.cluster.model_id(), &text, json!({ "max_tokens": 1 }));
    wait_until("the prompt's blocks count as evicted, no longer as about to be reported", async || {
        let explanation = explained.client.explain(Endpoint::Completions.path(), &request).await?;
        Ok(explanation["prompts"][0]["prefix"]["uncached"]["evicted"].as_u64() > Some(500))
    })
    .await?;
    let evicted = explained.ask(&text, "").await?;
    assert!(evicted["uncached"]["evicted"].as_u64() > Some(500), "{evicted}");
    assert_eq!((&evicted["nearest"]["worker"], &evicted["nearest"]["lost"]), (&json!("decode-0"), &json!(false)), "{evicted}");
    assert!(evicted["nearest"]["removed_s"].as_u64().is_some_and(|seconds| seconds < 60), "{evicted}");
    explained.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_whose_prompts_begin_with_a_time_are_named() -> Result<()> {
    let mut explained = Explained::start(sim_settings_with(PrefillPlace::Local)).await?;
    let text = prose("clock", 500);
    for minute in 10..14 {
        explained.ask(&format!("It is 12:{minute} now, and the rest is as before. {text}"), "").await?;
    }
    let broken: Value = serde_json::from_str(&explained.client.get("/dashboard/breakers").await?.1)?;
    let client = &broken["clients"][0];
    assert_eq!((&client["prompts"], &client["broken_prompts"]), (&json!(4), &json!(3)), "{broken}");
    assert!(client["lost_tokens"].as_u64() > Some(3 * 400), "{broken}");
    assert_eq!(client["first_difference"][0]["prompts"], 3, "{broken}");
    wait_until("the metric shows the lost tokens", async || {
        let lost = explained.client.metric("tandem_frontend_broken_prefix_tokens_total", "").await?;
        Ok(Some(lost as u64) == client["lost_tokens"].as_u64())
    })
    .await?;
    explained.end().await
}
