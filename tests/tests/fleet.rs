//! Tests of `tandem up` for servers that are running already. The servers are fake vLLM servers, over real sockets.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::time::Duration;
use tandem::{
    Cluster, ServedProcess,
    settings::{EngineKind, PrefillPlace, UpSettings},
};
use tandem_proto::v1::{WorkersReply, WorkersRequest, router_client::RouterClient};
use tandem_tests::fake_vllm::{FakeSettings, FakeVllm, engine::next_token_of, tokenizer};
use tempfile::TempDir;
use tokio::time::timeout;

/// Time limit of every wait. Only a failing test waits this long.
const LIMIT: Duration = Duration::from_secs(30);

/// Fake vLLM servers, which run before the cluster starts.
struct Fleet {
    engines: Vec<FakeVllm>,
    settings: FakeSettings,
    folder: TempDir,
}

impl Fleet {
    async fn start(engines: usize) -> Result<Self> {
        Self::with(engines, |_| {}).await
    }

    async fn with(engines: usize, change: impl FnOnce(&mut FakeSettings)) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        tokenizer::write(folder.path())?;
        std::fs::write(folder.path().join("key"), "the secret of a cluster in front of a fleet")?;
        let mut settings = FakeSettings { root: Some(folder.path().to_owned()), ..FakeSettings::default() };
        change(&mut settings);
        let mut all = Vec::new();
        for _ in 0..engines {
            all.push(FakeVllm::start(settings.clone()).await?);
        }
        Ok(Self { engines: all, settings, folder })
    }

    fn settings(&self) -> UpSettings {
        let mut settings = UpSettings::defaults();
        settings.model.engine = EngineKind::Vllm;
        settings.common.listen = ([127, 0, 0, 1], 0).into();
        settings.common.key.cluster_key_file = Some(self.folder.path().join("key"));
        settings.worker.external.engine_url = self.engines.iter().map(FakeVllm::url).collect();
        settings
    }
}

async fn complete(cluster: &Cluster, prompt: &str) -> Result<Value> {
    complete_with(cluster, "fake", prompt).await
}

async fn complete_with(cluster: &Cluster, model: &str, prompt: &str) -> Result<Value> {
    let body = json!({ "model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 0 });
    post(cluster, "/v1/completions", &body).await
}

async fn post(cluster: &Cluster, path: &str, body: &Value) -> Result<Value> {
    let url = format!("http://{}{path}", cluster.frontend);
    let answer = reqwest::Client::new().post(url).json(body).timeout(LIMIT).send().await?;
    let status = answer.status();
    let body: Value = answer.json().await?;
    anyhow::ensure!(status.is_success(), "{status}: {body}");
    Ok(body)
}

async fn view(cluster: &Cluster) -> Result<WorkersReply> {
    Ok(RouterClient::new(cluster.to_router()).workers(WorkersRequest {}).await?.into_inner())
}

async fn instance(cluster: &Cluster, worker_id: &str) -> Result<Option<String>> {
    let infos = view(cluster).await?.workers.into_iter().filter_map(|worker| worker.info);
    Ok(infos.into_iter().find(|info| info.worker_id == worker_id).map(|info| info.instance_id))
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let polling = async {
        while !holds().await? {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        anyhow::Ok(())
    };
    timeout(LIMIT, polling).await.with_context(|| format!("in vain: {what}"))?
}

/// Starts a server at the port of an earlier one, as soon as that one has released it.
async fn start_again(settings: FakeSettings) -> Result<FakeVllm> {
    let mut started = None;
    until("the port is free", async || {
        started = FakeVllm::start(settings.clone()).await.ok();
        Ok(started.is_some())
    })
    .await?;
    started.context("the server did not start")
}

/// Returns the text with which the fake model continues `prompt`.
fn continuation(prompt: &str, tokens: usize) -> String {
    continuation_of("", prompt, tokens)
}

/// Returns the text with which the fake model continues `prompt` when it uses a LoRA.
fn continuation_of(lora: &str, prompt: &str, tokens: usize) -> String {
    let mut all: Vec<u32> = prompt.bytes().map(u32::from).collect();
    for _ in 0..tokens {
        all.push(next_token_of(lora, &all, None));
    }
    let bytes: Vec<u8> = all[prompt.len()..].iter().map(|token| *token as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_of_running_servers_routes_to_the_server_with_the_cached_prefix() -> Result<()> {
    let fleet = Fleet::start(2).await?;
    let cluster = Cluster::start(fleet.settings()).await?;
    assert_eq!(cluster.model_id, "fake");
    for document in 0..3 {
        let text = format!("document {document}: {}", "word ".repeat(60));
        let (computed, _) = sums(&fleet);
        assert_eq!(complete(&cluster, &text).await?["choices"][0]["text"], continuation(&text, 6));
        indexed(&cluster, &fleet).await?;
        complete(&cluster, &text).await?;
        let (both, cached) = sums(&fleet);
        assert_eq!(both - computed, 2 * text.len() as u64, "each prompt ran on one engine");
        assert_eq!(cached, (document + 1) * ((text.len() as u64 - 1) / 32 * 32), "the second request went to the same engine");
    }
    let body =
        json!({ "model": "fake", "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 4, "temperature": 0 });
    let chat = post(&cluster, "/v1/chat/completions", &body).await?;
    assert_eq!(chat["choices"][0]["message"]["content"], continuation("user: hello\nassistant: ", 4));
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_cluster_finds_cached_prompts_if_its_key_is_the_same() -> Result<()> {
    let fleet = Fleet::start(1).await?;
    let text = "a prompt of several blocks ".repeat(5);
    let reusable = (text.len() as u64 - 1) / 32 * 32;
    for (key, cached) in [("key", 0), ("key", reusable), ("other", reusable)] {
        let mut settings = fleet.settings();
        std::fs::write(fleet.folder.path().join("other"), "the secret of quite another cluster")?;
        settings.common.key.cluster_key_file = Some(fleet.folder.path().join(key));
        let cluster = Cluster::start(settings).await?;
        complete(&cluster, &text).await?;
        cluster.stop().await;
        assert_eq!(sums(&fleet).1, cached, "{key}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn block_that_the_gpu_evicts_is_found_in_host_memory_and_counted_there() -> Result<()> {
    // The device holds five blocks of 32 tokens, a prompt has three full ones.
    let fleet = Fleet::with(1, |settings| (settings.blocks, settings.offloads) = (6, true)).await?;
    let cluster = Cluster::start(fleet.settings()).await?;
    let usage = async |text: &str| {
        let body = json!({ "model": "fake", "prompt": text, "max_tokens": 1, "temperature": 0 });
        let url = format!("http://{}/v1/completions", cluster.frontend);
        let request = reqwest::Client::new().post(url).header("x-tandem-details", "true").json(&body).timeout(LIMIT);
        let answer: Value = request.send().await?.json().await?;
        anyhow::Ok(answer["tandem"]["cached_tokens_by_tier"].clone())
    };
    let tiers = async || {
        let worker = view(&cluster).await?.workers.remove(0);
        anyhow::Ok(worker.tiers.into_iter().map(|tier| (tier.tier, tier.blocks)).collect::<Vec<_>>())
    };
    let texts = ["one", "two"].map(|name| format!("{name} {}", "word ".repeat(24)));
    for text in &texts {
        assert_eq!(usage(text).await?, json!({ "device": 0 }));
    }
    // Each of the engine's blocks is two of the cluster's.
    let all = [("device".to_owned(), 10), ("host".to_owned(), 12)];
    until("the router knows the blocks of both tiers", async || Ok(tiers().await? == all)).await?;
    let found = usage(&texts[0]).await?;
    assert_eq!((found["device"].as_u64().unwrap_or(0) + found["host"].as_u64().unwrap_or(0)), 96, "{found}");
    assert!(found["host"].as_u64().is_some_and(|tokens| tokens >= 32), "{found}");
    let metric = r#"tandem_frontend_cached_tokens_total{source="worker",tier="host"}"#;
    let metrics = reqwest::get(format!("http://{}/metrics", cluster.frontend)).await?.text().await?;
    assert!(metrics.contains(metric), "{metrics}");
    cluster.stop().await;
    Ok(())
}

/// Waits until the router knows all blocks in the engines' caches, and no engine has work. An engine's block consists of two blocks of the cluster.
async fn indexed(cluster: &Cluster, fleet: &Fleet) -> Result<()> {
    until("the index knows all cached blocks", async || {
        let view = view(cluster).await?;
        let indexed: u64 = view.workers.iter().map(|worker| worker.indexed_blocks).sum();
        let loads = view.workers.iter().filter_map(|worker| worker.load.as_ref());
        let is_idle = view.bookings == 0 && { loads }.all(|load| load.running_sequences == 0 && load.waiting_requests == 0);
        Ok(is_idle && indexed == 2 * fleet.engines.iter().map(|engine| engine.cached_blocks() as u64).sum::<u64>())
    })
    .await
}

/// Returns the number of prompt tokens of all engines, and how many of them the engines found in their caches.
fn sums(fleet: &Fleet) -> (u64, u64) {
    fleet.engines.iter().map(FakeVllm::counted).fold((0, 0), |(all, cached), (more, hits)| (all + more, cached + hits))
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_servers_pull_the_kv_of_prefill_servers() -> Result<()> {
    let fleet = Fleet::start(2).await?;
    let mut settings = fleet.settings();
    settings.prefill_engine_url = vec![settings.worker.external.engine_url.remove(0)];
    settings.router.prefill = PrefillPlace::Remote;
    let cluster = Cluster::start(settings).await?;
    let text = "a prompt of several blocks ".repeat(9);
    assert_eq!(complete(&cluster, &text).await?["choices"][0]["text"], continuation(&text, 6));
    assert_eq!(fleet.engines[0].counted().0, text.len() as u64);
    assert_eq!(fleet.engines[1].counted(), (0, 0), "the decode server computed no prompt");
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_server_is_a_new_instance_of_the_same_worker() -> Result<()> {
    let mut fleet = Fleet::start(1).await?;
    let cluster = Cluster::start(fleet.settings()).await?;
    let text = "a prompt of several blocks ".repeat(5);
    let before = complete(&cluster, &text).await?;
    let first = instance(&cluster, "decode-0").await?.context("the worker did not join")?;

    fleet.engines[0].pretend_restart();
    until("a new instance has joined", async || Ok(instance(&cluster, "decode-0").await?.is_some_and(|now| now != first)))
        .await?;
    assert_eq!(complete(&cluster, &text).await?["choices"], before["choices"]);

    let second = instance(&cluster, "decode-0").await?.context("the worker did not join")?;
    let port = fleet.engines.remove(0).port();
    until("the worker has left", async || Ok(instance(&cluster, "decode-0").await?.is_none())).await?;
    assert!(complete(&cluster, &text).await.is_err(), "no engine runs");
    fleet.engines.push(FakeVllm::start(FakeSettings { port, ..fleet.settings.clone() }).await?);
    until("a new instance has joined", async || Ok(instance(&cluster, "decode-0").await?.is_some_and(|now| now != second)))
        .await?;
    assert_eq!(complete(&cluster, &text).await?["choices"], before["choices"]);
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_returns_with_another_model_does_not_serve_under_the_old_name() -> Result<()> {
    let mut fleet = Fleet::start(1).await?;
    let cluster = Cluster::start(fleet.settings()).await?;
    let before = complete(&cluster, "hello").await?;
    let port = fleet.engines.remove(0).port();
    let settings = FakeSettings { port, ..fleet.settings.clone() };
    let other = start_again(FakeSettings { model: "other".to_owned(), ..settings.clone() }).await?;
    let reason = "the restarted engine serves the model other (loaded from";
    until("the router knows why the worker is not a member", async || {
        Ok(view(&cluster).await?.unavailable.iter().any(|worker| worker.reason.contains(reason)))
    })
    .await?;
    assert!(complete(&cluster, "hello").await.is_err(), "no engine serves the model");
    assert_eq!(other.seen().len(), 0, "the other model has computed nothing");
    drop(other);
    fleet.engines.push(start_again(settings).await?);
    until("the worker has joined again", async || Ok(instance(&cluster, "decode-0").await?.is_some())).await?;
    assert_eq!(complete(&cluster, "hello").await?["choices"], before["choices"]);
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_cluster_has_servers_of_several_models() -> Result<()> {
    let mut fleet = Fleet::start(1).await?;
    let other = FakeSettings { model: "other".to_owned(), ..fleet.settings.clone() };
    fleet.engines.push(FakeVllm::start(other).await?);
    let cluster = Cluster::start(fleet.settings()).await?;
    assert!(cluster.introduction().starts_with("fake, other are ready (on vLLM)"), "{}", cluster.introduction());
    let models = view(&cluster).await?.models.into_iter().map(|model| model.identity.map(|identity| identity.model));
    assert_eq!(models.collect::<Vec<_>>(), [Some("fake".to_owned()), Some("other".to_owned())]);
    for (at, model) in [(0, "fake"), (1, "other"), (1, "other")] {
        let before = fleet.engines[at].counted().0;
        let body = json!({ "model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0 });
        let answer = post(&cluster, "/v1/completions", &body).await?;
        assert_eq!((&answer["model"], &answer["choices"][0]["text"]), (&json!(model), &json!(continuation("hello", 4))));
        assert_eq!(fleet.engines[at].counted().0, before + 5, "the request ran on the engine of its model");
    }
    cluster.stop().await;
    let mut settings = fleet.settings();
    settings.frontend.extra_models = vec!["third=/models/third".parse().map_err(anyhow::Error::msg)?];
    let refused = Cluster::start(settings).await.err().context("a cluster without an engine for the model was not refused")?;
    assert!(refused.to_string().contains("third"), "{refused}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn loras_of_a_server_are_models_with_separate_caches() -> Result<()> {
    let mut fleet = Fleet::with(1, |settings| settings.loras = vec!["sql".to_owned(), "poem".to_owned()]).await?;
    fleet.engines.push(FakeVllm::start(FakeSettings { loras: Vec::new(), ..fleet.settings.clone() }).await?);
    let cluster = Cluster::start(fleet.settings()).await?;
    assert_eq!(listed(&cluster).await?, ["fake", "poem", "sql"]);
    let text = "a prompt of several blocks ".repeat(5);
    let reusable = (text.len() as u64 - 1) / 32 * 32;
    for cached in [0, reusable] {
        for model in ["sql", "poem", "fake"] {
            let answer = complete_with(&cluster, model, &text).await?;
            let lora = if model == "fake" { "" } else { model };
            assert_eq!(answer["choices"][0]["text"], continuation_of(lora, &text, 6), "{model}");
            assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], cached, "{model}");
            indexed(&cluster, &fleet).await?;
        }
    }
    let named: Vec<Value> = fleet.engines[0].seen().iter().map(|body| body["model"].clone()).collect();
    assert!(["sql", "poem"].iter().all(|lora| named.iter().filter(|name| *name == lora).count() == 2), "{named:?}");
    assert!(fleet.engines[1].seen().iter().all(|body| body["model"].is_null()), "the other server has no LoRAs");
    let refused = complete_with(&cluster, "other", &text).await.err().context("an unknown LoRA was not refused")?.to_string();
    assert!(refused.starts_with("404") && refused.contains("model_not_found"), "{refused}");

    fleet.engines[0].unload_lora("sql");
    cluster.stop().await;
    Ok(())
}

async fn listed(cluster: &Cluster) -> Result<Vec<Value>> {
    let listed: Value = reqwest::get(format!("http://{}/v1/models", cluster.frontend)).await?.json().await?;
    Ok(listed["data"].as_array().context("the value is not a list")?.iter().map(|model| model["id"].clone()).collect())
}

async fn until_listed(cluster: &Cluster, expected: &[&str]) -> Result<()> {
    let all = until("the list has changed", async || Ok(listed(cluster).await? == expected));
    timeout(Duration::from_secs(5), all).await.context("the list did not change within 5 s")?
}

#[tokio::test(flavor = "multi_thread")]
async fn loras_that_a_server_loads_and_unloads_are_served_meanwhile() -> Result<()> {
    let fleet = Fleet::start(2).await?;
    let [one, two] = &fleet.engines[..] else { anyhow::bail!("the number of servers is not two") };
    let cluster = Cluster::start(fleet.settings()).await?;
    let instances = (instance(&cluster, "decode-0").await?, instance(&cluster, "decode-1").await?);
    let text = "a prompt of several blocks ".repeat(5);
    let reusable = (text.len() as u64 - 1) / 32 * 32;
    let refused = async || {
        let answered = complete_with(&cluster, "sql", &text).await;
        let refused = answered.err().context("a LoRA that no server has was not refused")?.to_string();
        anyhow::ensure!(refused.starts_with("404") && refused.contains("model_not_found"), "{refused}");
        anyhow::Ok(())
    };
    complete(&cluster, &text).await?;
    refused().await?;

    one.load_lora("sql");
    until_listed(&cluster, &["fake", "sql"]).await?;
    for cached in [0, reusable] {
        let answer = complete_with(&cluster, "sql", &text).await?;
        assert_eq!(answer["choices"][0]["text"], continuation_of("sql", &text, 6));
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], cached);
        indexed(&cluster, &fleet).await?;
    }
    let of_lora = |engine: &FakeVllm| engine.seen().iter().filter(|body| body["model"] == "sql").count();
    assert_eq!([of_lora(one), of_lora(two)], [2, 0], "only one of the servers has the LoRA");

    // Until the router knows that the server has unloaded the LoRA, requests are refused by the server, or computed by another one.
    two.load_lora("sql");
    until("the router knows the second server's LoRA", async || {
        let workers = view(&cluster).await?.workers.into_iter().filter_map(|worker| worker.info);
        Ok(workers.filter(|info| info.loras == ["sql"]).count() == 2)
    })
    .await?;
    one.unload_lora("sql");
    let answer = complete_with(&cluster, "sql", &text).await?;
    assert_eq!((of_lora(two), &answer["choices"][0]["text"]), (1, &json!(continuation_of("sql", &text, 6))));
    two.unload_lora("sql");
    refused().await?;
    until_listed(&cluster, &["fake"]).await?;
    refused().await?;
    assert_eq!((instance(&cluster, "decode-0").await?, instance(&cluster, "decode-1").await?), instances, "nothing restarted");
    assert_eq!(complete(&cluster, &text).await?["usage"]["prompt_tokens_details"]["cached_tokens"], reusable);
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn lora_with_a_tokenizer_of_its_own_stays_listed_while_no_server_has_it() -> Result<()> {
    let fleet = Fleet::with(1, |settings| settings.loras = vec!["sql".to_owned()]).await?;
    let mut settings = fleet.settings();
    let own = format!("sql={}", fleet.folder.path().display());
    settings.frontend.extra_models = vec![own.parse().map_err(anyhow::Error::msg)?];
    let cluster = Cluster::start(settings).await?;
    complete_with(&cluster, "sql", "a prompt").await?;
    fleet.engines[0].unload_lora("sql");
    let refused =
        async || Ok(complete_with(&cluster, "sql", "a prompt").await.err().is_some_and(|why| why.to_string().starts_with("503")));
    until("the router knows that no server has the LoRA", refused).await?;
    assert_eq!(listed(&cluster).await?, ["fake", "sql"]);
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_and_decode_servers_compute_with_the_same_lora() -> Result<()> {
    let fleet = Fleet::with(2, |settings| settings.loras = vec!["sql".to_owned()]).await?;
    let mut settings = fleet.settings();
    settings.prefill_engine_url = vec![settings.worker.external.engine_url.remove(0)];
    settings.router.prefill = PrefillPlace::Remote;
    let cluster = Cluster::start(settings).await?;
    let text = "a prompt of several blocks ".repeat(9);
    assert_eq!(complete_with(&cluster, "sql", &text).await?["choices"][0]["text"], continuation_of("sql", &text, 6));
    for engine in &fleet.engines {
        assert!(engine.seen().iter().all(|body| body["model"] == "sql"));
    }
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn name_of_a_lora_cannot_be_that_of_another_model() -> Result<()> {
    let mut fleet = Fleet::with(1, |settings| settings.loras = vec!["sql".to_owned()]).await?;
    let mut named = fleet.settings();
    named.common.served_model_name = Some("sql".to_owned());
    fleet
        .engines
        .push(FakeVllm::start(FakeSettings { model: "sql".to_owned(), loras: Vec::new(), ..fleet.settings.clone() }).await?);
    for settings in [named, fleet.settings()] {
        let refused = Cluster::start(settings).await.err().context("two models with one name were not refused")?.to_string();
        assert!(refused.contains("sql is the name of a LoRA"), "{refused}");
    }
    Ok(())
}

/// The requests name their rank, so vLLM's own load balancer, which chooses a rank for other requests, is not used.
#[tokio::test(flavor = "multi_thread")]
async fn each_data_parallel_rank_of_a_server_is_a_worker() -> Result<()> {
    let fleet = Fleet::with(1, |settings| settings.ranks = 2).await?;
    let cluster = Cluster::start(fleet.settings()).await?;
    let engine = &fleet.engines[0];
    let mut ranks = Vec::new();
    for document in 0..4 {
        let text = format!("document {document}: {}", "word ".repeat(60));
        complete(&cluster, &text).await?;
        indexed(&cluster, &fleet).await?;
        let cached = |rank| engine.counted_of(rank).1;
        let before = [cached(0), cached(1)];
        complete(&cluster, &text).await?;
        let [.., first, second] = engine.seen_ranks()[..] else { anyhow::bail!("the number of requests is not two") };
        let rank = first.context("the request names no rank")?;
        assert_eq!(second, Some(rank), "the second request goes to the rank that has the prompt's blocks");
        let reusable = (text.len() as u64 - 1) / 32 * 32;
        assert_eq!([cached(rank), cached(1 - rank)], [before[rank] + reusable, before[1 - rank]]);
        ranks.push(rank);
    }
    assert!(ranks.contains(&0) && ranks.contains(&1), "both ranks are used: {ranks:?}");
    let ids = view(&cluster).await?.workers.into_iter().filter_map(|worker| worker.info).map(|info| info.worker_id);
    assert_eq!(ids.collect::<std::collections::BTreeSet<_>>(), ["decode-0", "decode-1"].map(str::to_owned).into());
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_with_many_ranks_ends_and_no_request_fails() -> Result<()> {
    let fleet = Fleet::with(2, |settings| (settings.ranks, settings.step) = (4, Duration::from_millis(20))).await?;
    let cluster = Cluster::start(fleet.settings()).await?;
    let prompts: Vec<String> = (0..24).map(|number| format!("prompt {number}")).collect();
    let asked = prompts.iter().map(|prompt| complete(&cluster, prompt));
    let ended = async {
        until("the server runs requests", async || Ok(fleet.engines[0].running() >= 4)).await?;
        fleet.engines[0].end();
        anyhow::Ok(())
    };
    tokio::try_join!(futures::future::try_join_all(asked), ended)?;
    cluster.stop().await;
    Ok(())
}

/// The questions are shorter than a block, so only blocks with the previous answer let the next prompt find its server.
#[tokio::test(flavor = "multi_thread")]
async fn conversation_stays_on_the_server_that_has_computed_its_answer_if_servers_publish_no_events() -> Result<()> {
    let fleet = Fleet::with(2, |settings| settings.events = false).await?;
    let cluster = Cluster::start(fleet.settings()).await?;
    let served = || fleet.engines.iter().map(|engine| engine.seen().len()).collect::<Vec<_>>();
    for conversation in 0..8_u32 {
        let mut tokens = vec![100 + conversation; 20];
        let mut turns = Vec::new();
        for indexed in 1..=3 {
            let before = served();
            let body = json!({
                "model": "fake", "prompt": tokens, "max_tokens": 45, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
            });
            let answer = post(&cluster, "/v1/completions", &body).await?;
            turns.push(usize::from(served()[0] == before[0]));
            tokens.extend(serde_json::from_value::<Vec<u32>>(answer["choices"][0]["token_ids"].clone())?);
            // 64 of a turn's 65 tokens have been computed. 32 tokens are two blocks of the cluster.
            let blocks = u64::from(conversation) * 12 + indexed * 4;
            until("the router knows the answer's blocks", async || {
                Ok(view(&cluster).await?.workers.iter().map(|worker| worker.indexed_blocks).sum::<u64>() == blocks)
            })
            .await?;
            tokens.extend([7; 20]);
        }
        assert!(turns.iter().all(|engine| *engine == turns[0]), "conversation {conversation} was served by engines {turns:?}");
    }
    cluster.stop().await;
    Ok(())
}
