//! Tests of several models in one cluster: each model has its own workers, and all models share a router and a frontend.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tandem_devices::sim::{SimEngine, SimSettings};
use tandem_engine::EngineHandle;
use tandem_frontend::FrontendSettings;
use tandem_router::RouterSettings;
use tandem_tests::{
    Client,
    services::{Services, engine_settings, worker_settings},
};
use tandem_text::ServedModel;

/// Starts a prefill worker and a decode worker for each model of `with_workers`, a router, and a frontend that serves the models a and b.
async fn start(with_workers: &[&str]) -> Result<(Services, Client)> {
    let (services, sim) = (Services::default(), SimSettings { speedup: 1e3, ..Default::default() });
    let engine = || EngineHandle::start(Box::new(SimEngine::new(sim).in_real_time()), engine_settings());
    let mut workers = Vec::new();
    for model in with_workers {
        let settings = |role| worker_settings(&format!("{role}-{model}"), model);
        workers.push(services.prefill_worker(settings("prefill"), engine(), &sim).await?.to_string());
        workers.push(services.decode_worker(settings("decode"), engine()).await?.to_string());
    }
    let count = workers.len();
    let workers = workers.into_iter().collect();
    let router = services.router(RouterSettings { workers, ..Default::default() }).await?;
    let mut settings = FrontendSettings::new(router.to_string(), ServedModel::sim("a"));
    settings.models.push(ServedModel::sim("b"));
    let client = Client::new(services.frontend(settings).await?);
    services.ready(count, &client).await?;
    Ok((services, client))
}

async fn complete(client: &Client, model: &str) -> Result<(u16, Value)> {
    let prompt = "The prompt is the same for all models and has several blocks. ".repeat(4);
    let answer = client.answer("/v1/completions", &json!({ "model": model, "prompt": prompt, "max_tokens": 4 })).await?;
    Ok((answer.status, answer.frames.first().cloned().unwrap_or_default()))
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_answered_by_workers_of_their_model_and_caches_are_separate() -> Result<()> {
    let (services, client) = start(&["a", "b"]).await?;
    let listed: Value = serde_json::from_str(&client.get("/v1/models").await?.1)?;
    let ids: Vec<_> =
        listed["data"].as_array().context("the value is not a list")?.iter().map(|model| model["id"].clone()).collect();
    assert_eq!(ids, ["a", "b"]);
    assert_eq!(client.get("/v1/models/b").await?.0, 200);
    let ready: Value = serde_json::from_str(&client.get("/ready").await?.1)?;
    assert_eq!(ready, json!({ "status": "ready", "models": { "a": "ready", "b": "ready" } }));
    for (model, is_cached) in [("a", false), ("b", false), ("a", true), ("b", true)] {
        let (status, answer) = complete(&client, model).await?;
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().context("the value is not a count")?;
        ensure!((status, cached > 0) == (200, is_cached), "{model}: {answer}");
        assert_eq!(answer["model"], model);
    }
    let (status, refused) = complete(&client, "c").await?;
    assert_eq!((status, &refused["error"]["code"]), (404, &json!("model_not_found")));
    let metrics = services.metrics.render();
    for line in [
        r#"tandem_frontend_requests_total{endpoint="completions",model="a",code="200"} 2"#,
        r#"tandem_frontend_requests_total{endpoint="completions",model="b",code="200"} 2"#,
        r#"tandem_frontend_requests_total{endpoint="completions",model="",code="404"} 1"#,
        r#"tandem_router_worker_info{worker="decode-b",model="b"} 1"#,
    ] {
        ensure!(metrics.lines().any(|found| found == line), "{line} in {metrics}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn frontend_is_ready_while_one_of_its_models_has_workers() -> Result<()> {
    let (_services, client) = start(&["b"]).await?;
    let (status, ready) = client.get("/ready").await?;
    let ready: Value = serde_json::from_str(&ready)?;
    let expected = json!({ "a": "no worker serves a; the workers serve b", "b": "ready" });
    assert_eq!((status, &ready["status"], &ready["models"]), (200, &json!("ready"), &expected));
    assert_eq!(complete(&client, "b").await?.0, 200);
    let (status, refused) = complete(&client, "a").await?;
    assert_eq!((status, &refused["error"]["code"]), (503, &json!("no_worker")));
    Ok(())
}
