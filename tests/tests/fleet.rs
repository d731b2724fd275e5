//! Tests of `tandem up` in front of servers that run before it starts: fake vLLM servers, over real sockets.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::time::Duration;
use tandem::{
    Cluster, Served,
    settings::{EngineKind, PrefillPlace, UpSettings},
};
use tandem_proto::v1::{WorkersReply, WorkersRequest, router_client::RouterClient};
use tandem_tests::fake_vllm::{FakeSettings, FakeVllm, engine::next_token, tokenizer};
use tempfile::TempDir;
use tokio::time::timeout;

/// Time limit of every wait. Only a failing test waits this long.
const LIMIT: Duration = Duration::from_secs(30);

/// Fake vLLM servers that run before the cluster starts.
struct Fleet {
    engines: Vec<FakeVllm>,
    settings: FakeSettings,
    _model: TempDir,
}

impl Fleet {
    async fn start(engines: usize) -> Result<Self> {
        let model = tempfile::tempdir()?;
        tokenizer::write(model.path())?;
        let settings = FakeSettings { root: Some(model.path().to_owned()), ..FakeSettings::default() };
        let mut all = Vec::new();
        for _ in 0..engines {
            all.push(FakeVllm::start(settings.clone()).await?);
        }
        Ok(Self { engines: all, settings, _model: model })
    }

    fn settings(&self) -> UpSettings {
        let mut settings = UpSettings::defaults();
        settings.model.engine = EngineKind::Vllm;
        settings.common.listen = ([127, 0, 0, 1], 0).into();
        settings.worker.external.engine_url = self.engines.iter().map(FakeVllm::url).collect();
        settings
    }
}

async fn complete(cluster: &Cluster, prompt: &str) -> Result<Value> {
    let body = json!({ "model": "fake", "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 0 });
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

/// Returns the instance id of a worker; `None` while the worker is not a member.
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

/// Returns the text with which the fake model continues `prompt`.
fn continuation(prompt: &str, tokens: usize) -> String {
    let mut all: Vec<u32> = prompt.bytes().map(u32::from).collect();
    for _ in 0..tokens {
        all.push(next_token(&all, None));
    }
    let bytes: Vec<u8> = all[prompt.len()..].iter().map(|token| *token as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_command_serves_a_running_fleet_and_routes_to_the_cached_prefix() -> Result<()> {
    let fleet = Fleet::start(2).await?;
    let cluster = Cluster::start(fleet.settings()).await?;
    assert_eq!(cluster.model_id, "fake");
    for document in 0..3 {
        let text = format!("document {document}: {}", "word ".repeat(60));
        let (computed, _) = sums(&fleet);
        assert_eq!(complete(&cluster, &text).await?["choices"][0]["text"], continuation(&text, 6));
        until("the index knows the prompt", async || {
            let indexed: u64 = view(&cluster).await?.workers.iter().map(|worker| worker.indexed_blocks).sum();
            Ok(indexed == 2 * fleet.engines.iter().map(|engine| engine.cached_blocks() as u64).sum::<u64>())
        })
        .await?;
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

/// Returns the number of prompt tokens of all engines, and how many of them the engines found in their caches.
fn sums(fleet: &Fleet) -> (u64, u64) {
    fleet.engines.iter().map(FakeVllm::counted).fold((0, 0), |(all, cached), (more, hits)| (all + more, cached + hits))
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_servers_hand_their_kv_to_decode_servers() -> Result<()> {
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
async fn restarted_server_is_a_new_instance_at_the_same_worker() -> Result<()> {
    let mut fleet = Fleet::start(1).await?;
    let cluster = Cluster::start(fleet.settings()).await?;
    let text = "a prompt of several blocks ".repeat(5);
    let before = complete(&cluster, &text).await?;
    let first = instance(&cluster, "decode-0").await?.context("the worker has joined")?;

    fleet.engines[0].pretend_restart();
    until("a new instance has joined", async || Ok(instance(&cluster, "decode-0").await?.is_some_and(|now| now != first)))
        .await?;
    assert_eq!(complete(&cluster, &text).await?["choices"], before["choices"]);

    let second = instance(&cluster, "decode-0").await?.context("the worker has joined")?;
    let port = fleet.engines.remove(0).port();
    until("the worker has left", async || Ok(instance(&cluster, "decode-0").await?.is_none())).await?;
    assert!(complete(&cluster, &text).await.is_err(), "there is no engine");
    fleet.engines.push(FakeVllm::start(FakeSettings { port, ..fleet.settings.clone() }).await?);
    until("a new instance has joined", async || Ok(instance(&cluster, "decode-0").await?.is_some_and(|now| now != second)))
        .await?;
    assert_eq!(complete(&cluster, &text).await?["choices"], before["choices"]);
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_of_several_models_are_one_cluster() -> Result<()> {
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
    let refused = Cluster::start(settings).await.err().context("no engine serves it")?;
    assert!(refused.to_string().contains("third"), "{refused}");
    Ok(())
}
