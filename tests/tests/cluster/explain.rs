//! Tests of the explanation of a placement, over HTTP and on the command line.

use anyhow::Result;
use serde_json::json;
use tandem::settings::{PrefillPlace, UpSettings};
use tandem_tests::{Client, Endpoint, prose, sim_settings_with, start};

#[tokio::test(flavor = "multi_thread")]
async fn explanation_matches_the_placement_and_runs_no_prompt() -> Result<()> {
    let cluster = start(UpSettings { prefill_workers: 3, ..sim_settings_with(PrefillPlace::Remote) }).await?;
    let client = Client::new(cluster.frontend());
    let path = Endpoint::Completions.path();
    let request = Endpoint::Completions.request(&cluster.model_id(), &prose("why", 300), json!({ "max_tokens": 2 }));
    let cold = client.explain(path, &request).await?;
    assert!(cold["prompts"][0]["workers"].as_array().is_some_and(|workers| workers.len() == 4), "{cold:#}");
    assert_eq!(client.metric("tandem_worker_prompt_tokens_total", "").await?, 0.0, "no prompt was computed");

    let answer = client.answer(path, &request).await?;
    cluster.settle_events().await?;
    let holder = answer.details()["prefill_worker"].clone();
    let warm = client.explain(path, &request).await?["prompts"][0].clone();
    assert_eq!((&warm["prefill_worker"], &warm["decode_worker"]), (&holder, &json!("decode-0")), "{warm:#}");
    assert_eq!(warm["prompt_tokens"], answer.usage("/prompt_tokens"));
    let of = |name: &str| warm["workers"].as_array().into_iter().flatten().find(|worker| worker["worker"] == name).cloned();
    let chosen = of(holder.as_str().expect("the worker's name is a string")).expect("the explanation has the worker");
    assert_eq!(chosen["overlap_blocks"], warm["reusable_blocks"]);
    for other in ["prefill-0", "prefill-1", "prefill-2"].into_iter().filter(|name| holder != *name) {
        let other = of(other).expect("the explanation has the worker");
        assert_eq!(other["overlap_blocks"], 0);
        let ms = |worker: &serde_json::Value| worker["as_prefill"]["total_ms"].as_f64().expect("total_ms is a number");
        assert!(ms(&chosen) < ms(&other), "{warm:#}");
    }
    assert!(warm["explanation"].as_str().is_some_and(|verdict| verdict.contains("cheapest is")), "{warm:#}");

    // The command line must show the same explanation.
    let frontend = cluster.frontend().to_string();
    let text = request["prompt"].as_str().expect("the prompt is a string").to_owned();
    let run = |json: bool| {
        let mut args = vec!["tandem", "route", "explain", &frontend, "--prompt", &text];
        args.extend(json.then_some("--json"));
        let cli = tandem::cli::Cli::read(args.into_iter().map(Into::into).collect(), None)?;
        let tandem::cli::Command::Route { command: tandem::cli::RouteCommand::Explain(args) } = cli.command else {
            anyhow::bail!("the command is not route explain")
        };
        tandem::explain::run(args)
    };
    let table = tokio::task::block_in_place(|| run(false))?;
    for expected in ["prefill-0 prefills", "prefill-2 prefills", "decode-0 receives", "cheapest is"] {
        assert!(table.contains(expected), "{expected} in\n{table}");
    }
    let json: serde_json::Value = serde_json::from_str(&tokio::task::block_in_place(|| run(true))?)?;
    assert_eq!(json["prompts"][0]["prefill_worker"], holder);
    cluster.assert_idle().await?;
    cluster.stop().await;
    Ok(())
}
