//! Tests of a router, a frontend and a decode worker with an external engine: clients must receive the engine's own count of cached tokens.

use super::*;
use serde_json::{Value, json};
use tandem::audit;
use tandem_frontend::FrontendSettings;
use tandem_process::discovery::MemberSource;
use tandem_router::RouterSettings;
use tandem_tests::{
    Answer, Client, Endpoint, prose,
    services::{Services, worker_settings},
    wait_until,
};
use tandem_text::ServedModel;
use tandem_worker::{Ledger, WorkerSettings};
use tempfile::TempDir;

const BLOCK_SIZE: u64 = 32;

struct Cluster {
    services: Services,
    client: Client,
    external: External,
    folder: TempDir,
}

impl Cluster {
    async fn start(fake: FakeSettings) -> Result<Self> {
        let (services, folder) = (Services::default(), tempfile::tempdir()?);
        let external = external(fake, |settings| settings.hash_key = HashKey::NONE).await?;
        let worker =
            WorkerSettings { ledger: Ledger::open(&folder.path().join("ledger"))?, ..worker_settings("decode-0", "fake") };
        let worker = services.decode_worker(worker, external.adapter.clone()).await?;
        let workers = MemberSource::List(vec![worker.to_string()]);
        let router = services.router(RouterSettings { workers, ..RouterSettings::default() }).await?;
        let model = ServedModel::sim("fake").with_context_length(4_096);
        let client = Client::new(services.frontend(FrontendSettings::new(router.to_string(), model)).await?);
        services.ready(1, &client).await?;
        Ok(Self { services, client, external, folder })
    }

    async fn answer(&self, endpoint: Endpoint, request: &Value) -> Result<Answer> {
        let (prompts, cached) = self.external.fake.counted();
        let answer = self.client.answer(endpoint.path(), request).await?;
        let counted = self.external.fake.counted();
        if request["n"] == 1 {
            let reported = (answer.usage("/prompt_tokens"), answer.cached_tokens());
            assert_eq!(reported, (counted.0 - prompts, counted.1 - cached), "{request}");
        }
        Ok(answer)
    }

    /// Waits until the usage that clients received, the worker's ledger and all metrics agree.
    async fn assert_usage_reconciles(&self) -> Result<audit::Checked> {
        let check = || -> Result<_> {
            let mut evidence = audit::read(&[], &[self.folder.path().join("ledger")], &[])?;
            evidence.client = self.client.lines();
            evidence.metrics.add(&self.services.metrics.render());
            Ok(audit::check(&evidence))
        };
        let agree = wait_until("usage reconciles", async || Ok(check()?.1.is_empty())).await;
        let (checked, findings) = check()?;
        agree.with_context(|| findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))?;
        Ok(checked)
    }
}

#[tokio::test]
async fn usage_has_the_engines_count_of_cached_tokens() -> Result<()> {
    let cluster = Cluster::start(FakeSettings::default()).await?;
    let (mut answers, stops) = (0, ["e", "t", "a", "o"]);
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        for (stream, samples, stopped) in
            [(false, 1, false), (true, 1, false), (false, 1, true), (true, 1, true), (false, 3, true), (true, 3, false)]
        {
            let name = format!("{endpoint:?} stream={stream} n={samples} stop={stopped}");
            let mut options = json!({ "n": samples, "temperature": 1, "seed": 5, "stream": stream, "max_tokens": 9 });
            if stream {
                options["stream_options"] = json!({ "include_usage": true });
            }
            if stopped {
                // The engine ignores stop strings; the frontend finds them in the text. Each generated token is a stop string with a
                // probability of 1/64.
                (options["stop"], options["max_tokens"]) = (json!(stops), json!(1_500));
            }
            let request = endpoint.request("fake", &prose(&name, 300), options);
            let cold = cluster.answer(endpoint, &request).await?;
            let warm = cluster.answer(endpoint, &request).await?;
            let reusable = (cold.usage("/prompt_tokens") - 1) / BLOCK_SIZE * BLOCK_SIZE;
            assert_eq!((cold.cached_tokens(), warm.cached_tokens()), (0, reusable), "{name}");
            assert!(reusable > 0);
            for answer in [&cold, &warm] {
                assert_eq!(answer.details()["cached_tokens_source"], "worker", "{name}");
                assert_eq!(answer.details()["cached_tokens_by_tier"]["device"], answer.cached_tokens(), "{name}");
                let generated = answer.usage("/completion_tokens");
                assert!(if stopped { generated < 1_500 * samples } else { generated == 9 * samples }, "{name}: {generated}");
                assert!(!stopped || !stops.iter().any(|stop| answer.text(0).contains(stop)), "{name}");
                answers += 1;
            }
            assert_eq!(cold.text(0), warm.text(0), "{name}");
            until("the engine has ended the stopped requests", || cluster.external.fake.running() == 0).await?;
        }
    }
    let checked = cluster.assert_usage_reconciles().await?;
    assert_eq!((checked.answers, checked.estimates), (answers, 0));
    // The router has compared the engine's counts with its predictions. Its predictions for prompts without cached tokens were exact.
    assert_eq!(cluster.client.metric("tandem_router_overlap_over_tokens_total", "").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn cached_tokens_that_the_engine_does_not_report_are_estimated() -> Result<()> {
    let cluster = Cluster::start(FakeSettings { reports_cached_tokens: false, ..FakeSettings::default() }).await?;
    for stop in [json!(null), json!(["e", "t", "a", "o"])] {
        let options = json!({ "max_tokens": 1_000, "temperature": 0, "stop": stop });
        let request = Endpoint::Completions.request("fake", &prose(&stop.to_string(), 300), options);
        let answer = cluster.client.answer(Endpoint::Completions.path(), &request).await?;
        assert_eq!((answer.cached_tokens(), &answer.details()["cached_tokens_source"]), (0, &json!("router_estimate")));
    }
    let checked = cluster.assert_usage_reconciles().await?;
    assert_eq!((checked.answers, checked.estimates), (2, 2));
    Ok(())
}

#[tokio::test]
async fn prompt_of_a_disconnected_client_is_counted_in_the_ledger() -> Result<()> {
    let cluster = Cluster::start(FakeSettings { step: Duration::from_millis(5), ..FakeSettings::default() }).await?;
    let options = json!({ "max_tokens": 1_500, "stream": true });
    let request = Endpoint::Completions.request("fake", &prose("disconnected", 300), options);
    let mut response = cluster.client.send(Endpoint::Completions.path(), &request).await?;
    response.chunk().await?.context("the answer did not begin")?;
    drop(response);
    until("the engine has ended the request", || cluster.external.fake.running() == 0).await?;
    wait_until("the prompt is counted", async || {
        Ok(cluster.client.metric("tandem_worker_prefix_cache_requests_total", "").await? == 1.0)
    })
    .await?;
    cluster.assert_usage_reconciles().await?;
    Ok(())
}
