//! `tandem bench replay` and `tandem bench simulate` as processes.

use crate::{
    cluster::until,
    talk::metric,
    up::{Up, tandem},
};
use std::process::{Command, Output, Stdio};

fn row(at_ms: u64, ids: &str, tokens: u32) -> String {
    format!("{{\"timestamp\": {at_ms}, \"input_length\": {tokens}, \"output_length\": 8, \"hash_ids\": [{ids}]}}\n")
}

fn text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("the output is UTF-8");
    (text(&output.stdout), text(&output.stderr))
}

/// Writes a trace, and returns its folder and its path.
fn trace(rows: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let path = folder.path().join("trace.jsonl");
    std::fs::write(&path, rows).expect("the folder is writable");
    (folder, path.to_str().expect("the path is UTF-8").to_owned())
}

#[test]
fn replay_prints_the_report_and_writes_json_and_a_page() {
    let up = Up::start(&["--engine", "sim", "--sim-speedup", "100"], Stdio::inherit());
    let (folder, trace) = trace(&(row(0, "1, 2", 1_000) + &row(2_000, "1, 3", 700) + &row(4_000, "1, 2", 1_000)));
    let (url, json, html) = (format!("http://{}", up.address()), folder.path().join("r.json"), folder.path().join("r.html"));
    let files = ["--json", json.to_str().expect("the path is UTF-8"), "--html", html.to_str().expect("the path is UTF-8")];
    let args = ["bench", "replay", &trace, &url, "--speed", "10", "--ignore-eos", "--slo-ttft", "30000"];
    let output = tandem(&[&args[..], &files].concat()).output().expect("the binary runs");
    let (out, errors) = text(&output);
    assert!(output.status.success(), "{out}{errors}");
    assert_eq!(errors, "", "there is no progress bar without a terminal");
    for expected in [
        "replay of trace.jsonl",
        "3 requests in",
        "TTFT, ms",
        "tokens: 2,700 of prompts",
        "counted by workers",
        "had TTFT ≤ 30,000 ms",
    ] {
        assert!(out.contains(expected), "{expected:?} is not in\n{out}");
    }
    let parsed: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(json).expect("the file was written")).expect("it is JSON");
    let tokens = &parsed["reports"][0]["tokens"];
    assert_eq!((&tokens["prompt"], &tokens["output"]), (&2_700.into(), &24.into()), "{tokens}");
    assert!(tokens["cached_counted"].as_u64().is_some_and(|cached| cached >= 992), "{tokens}");
    let page = std::fs::read_to_string(html).expect("the file was written");
    assert!(page.contains("replay of trace.jsonl") && page.contains("<svg") && page.ends_with("</html>\n"), "{page}");
}

#[test]
fn interrupted_replay_prints_the_results_so_far() {
    let up = Up::start(&["--engine", "sim", "--sim-speedup", "100"], Stdio::inherit());
    let (_folder, trace) = trace(&(row(0, "1", 100) + &row(3_600_000, "2", 100)));
    let args = ["bench", "replay", &trace, &format!("http://{}", up.address())];
    let replay = tandem(&args).spawn().expect("the binary runs");
    until(
        "the first request has been answered",
        || metric(&up, "tandem_frontend_request_cached_tokens_count"),
        |count| *count >= Some(1.0),
    );
    assert!(Command::new("kill").args(["-INT", &replay.id().to_string()]).status().expect("kill runs").success());
    let output = replay.wait_with_output().expect("the process is a child of this one");
    let (out, _) = text(&output);
    // The frontend counts the answer before the tool has read its end.
    assert!(out.contains("1 request in") && (out.contains(": 1 answered") || out.contains("1 stopped in flight")), "{out}");
}

#[test]
fn replay_reports_wrong_rows_and_servers_without_answers() {
    let up = Up::start(&["--engine", "sim"], Stdio::inherit());
    let at = up.address();
    let (_folder, wrong) = trace(&(row(0, "1", 100) + "nonsense"));
    for (args, expected) in [
        (
            &[&*wrong, at][..],
            "trace.jsonl, line 2: the row is not JSON (a trace has a JSON object a line, or one array of them): expected",
        ),
        (&[&*wrong, "--limit", "1", "http://127.0.0.1:9"], "no server answers at 127.0.0.1:9"),
        (&[&*wrong, "--limit", "1", at, "--model", "m", "--prompt", "ids"], "no request was answered"),
        (&[&*wrong, "--limit", "1", at, "--key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (&[&*wrong, "--speed", "2", "--concurrency", "1"], "cannot be used with"),
        (&[&*wrong, at, "--json", "/no/such/folder/r.json"], "/no/such/folder/r.json cannot be written"),
    ] {
        let output = tandem(&[&["bench", "replay"], args].concat()).output().expect("the binary runs");
        let (out, errors) = text(&output);
        assert!(!output.status.success() && errors.contains(expected), "{args:?}: {out}{errors}");
    }
}

/// Returns a trace of pairs of equal prompts.
fn pairs() -> (tempfile::TempDir, String) {
    let rows: String = (0..40).map(|number| row(number * 100, &format!("{}, {}", number / 2, number / 2 + 100), 1_000)).collect();
    trace(&rows)
}

fn simulate(args: &[&str]) -> Output {
    tandem(&[&["bench", "simulate"], args].concat()).output().expect("the binary runs")
}

#[test]
fn simulate_prints_the_report_and_writes_json_and_a_page() {
    let (folder, trace) = pairs();
    let (json, html) = (folder.path().join("s.json"), folder.path().join("s.html"));
    let files = ["--json", json.to_str().expect("the path is UTF-8"), "--html", html.to_str().expect("the path is UTF-8")];
    let args = [&[&*trace, "--prefill-workers", "1", "--decode-workers", "2", "--speed", "0.5", "--slo-e2e", "5000"], &files[..]]
        .concat();
    let (output, again) = (simulate(&args), simulate(&args));
    let (out, errors) = text(&output);
    assert!(output.status.success() && errors.is_empty(), "{out}{errors}");
    assert_eq!(output.stdout, again.stdout, "equal input has equal results");
    for expected in [
        "simulation of trace.jsonl",
        "1 prefill, 2 decode",
        "40 requests in",
        "40 answered",
        "had E2E ≤ 5,000 ms",
        "counted by workers",
    ] {
        assert!(out.contains(expected), "{expected:?} is not in\n{out}");
    }
    let parsed: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(json).expect("the file was written")).expect("it is JSON");
    assert_eq!(parsed["reports"][0]["tokens"]["output"], 320);
    assert!(std::fs::read_to_string(html).expect("the file was written").contains("<svg"));
}

#[test]
fn simulate_compares_policies_in_one_table() {
    let (_folder, trace) = pairs();
    let names = ["tandem", "round-robin", "random", "fewest-requests", "dynamo", "llm-d", "sglang"];
    let (out, errors) = text(&simulate(&[&trace, "--workers", "4", "--policy", &names.join(",")]));
    for name in names {
        assert!(out.lines().any(|line| line.starts_with(name)), "{name} is not in\n{out}{errors}");
    }
}

#[test]
fn plan_names_the_smallest_cluster_in_text_and_page() {
    let (folder, trace) = pairs();
    let html = folder.path().join("plan.html");
    let html = html.to_str().expect("the path is UTF-8");
    let (out, errors) = text(&simulate(&[&trace, "--plan", "--slo-ttft", "500", "--max-workers", "8", "--html", html]));
    let result = "Smallest cluster: 1 mixed (1 worker) for 99% within TTFT 500 ms";
    assert!(out.starts_with(&format!("{result}\n")), "{out}{errors}");
    assert!(out.lines().all(|line| line.chars().count() <= 120), "{out}");
    let page = std::fs::read_to_string(html).expect("the file was written");
    assert!(page.contains(result) && page.contains("Clusters tried") && page.contains("tandem router"), "{page}");
}

#[test]
fn plan_says_why_no_cluster_is_large_enough_and_writes_the_report() {
    // A prompt arrives every 10 ms and needs 55 ms.
    let rows: String = (0..200).map(|number| row(number * 10, &format!("{}, {}", 2 * number, 2 * number + 1), 1_024)).collect();
    let (folder, trace) = trace(&rows);
    let html = folder.path().join("plan.html");
    let html = html.to_str().expect("the path is UTF-8");
    for (args, expected, shown) in [
        (
            ["--slo-ttft", "700", "--max-workers", "4"],
            "no cluster of up to 4 workers meets the service levels for 99% of the requests: the nearest one, 4 mixed, meets them for ",
            "4 mixed",
        ),
        (
            ["--slo-ttft", "50", "--max-workers", "4"],
            "on an idle worker, 100.0% of the prompts need longer than 50 ms until their first token, so at most 0.0% can meet them; raise --slo-ttft,",
            "no cluster of any size",
        ),
    ] {
        let output = simulate(&[&[&*trace, "--plan", "--html", html][..], &args].concat());
        let (out, errors) = text(&output);
        assert!(!output.status.success() && errors.contains(expected), "{args:?}: {out}{errors}");
        let page = std::fs::read_to_string(html).expect("the file was written");
        assert!(page.contains(shown), "{page}");
    }
}

#[test]
fn simulate_refuses_wrong_flags_with_advice() {
    let (folder, trace) = pairs();
    let untimed = folder.path().join("untimed.jsonl");
    std::fs::write(&untimed, "{\"input_length\": 5, \"output_length\": 1, \"hash_ids\": []}\n").expect("the folder is writable");
    let untimed = untimed.to_str().expect("the path is UTF-8");
    for (args, expected) in [
        (&["/no/such/file"][..], "/no/such/file cannot be read"),
        (&[untimed], "set --concurrency"),
        (&[&*trace, "--workers", "0"], "--workers"),
        (&[&*trace, "--workers", "2", "--decode-workers", "1"], "cannot be used with"),
        (&[&*trace, "--prefill-workers", "2"], "--decode-workers"),
        (&[&*trace, "--decode-workers", "2"], "--prefill-workers"),
        (&[&*trace, "--prefill", "remote"], "set --prefill-workers"),
        (&[&*trace, "--policy", "nonsense"], "possible values: tandem, round-robin"),
        (&[&*trace, "--speed", "0"], "write a number above 0"),
        (&[&*trace, "--speed", "1e-300"], "over 10000 days"),
        (&[&*trace, "--speed", "2", "--concurrency", "1"], "cannot be used with"),
        (&[&*trace, "--limit", "0"], "--limit"),
        (&[&*trace, "--block-tokens", "16"], "are not a prompt of 1000 tokens"),
        (&[&*trace, "--kv-capacity-tokens", "511"], "smaller than a block of 512"),
        (&[&*trace, "--batch-max", "0"], "--batch-max"),
        (&[&*trace, "--prefill-chunk-budget", "0"], "--prefill-chunk-budget"),
        (&[&*trace, "--sim-prefill-tokens-per-second", "0"], "write a number above 0"),
        (&[&*trace, "--sim-prefill-tokens-per-second", "1e-300"], "over 10000 days"),
        (&[&*trace, "--sim-decode-step-ms", "1e300"], "--sim-decode-step-ms: write a smaller number"),
        (&[&*trace, "--slo-ttft", "0"], "write a number above 0"),
        (&[&*trace, "--lose", "worker-8@1"], "--lose: there is no worker worker-8; the workers are worker-0 to worker-7"),
        (&[&*trace, "--lose", "worker-0"], "as in worker-0@60+30"),
        (&[&*trace, "--slow", "prefill-0=2"], "--slow: there is no worker prefill-0"),
        (&[&*trace, "--slow", "worker-0=0"], "write a number above 0"),
        (&[&*trace, "--lost-for", "5"], "--lose-every"),
        (&[&*trace, "--plan", "--slo-ttft", "9", "--lose", "worker-0@1"], "cannot be used with"),
        (&[&*trace, "--slo-percent", "99"], "--plan"),
        (&[&*trace, "--max-workers", "9"], "--plan"),
        (&[&*trace, "--plan"], "set --slo-ttft, --slo-itl or --slo-e2e"),
        (&[&*trace, "--plan", "--slo-ttft", "9", "--slo-percent", "101"], "write a number above 0, up to 100"),
        (&[&*trace, "--plan", "--slo-ttft", "9", "--workers", "3"], "cannot be used with"),
        (&[&*trace, "--plan", "--slo-ttft", "9", "--policy", "dynamo"], "--plan needs --policy tandem"),
        (&[&*trace, "--plan", "--slo-ttft", "1", "--max-workers", "2"], "no cluster of any size meets the service levels"),
        (&[&*trace, "--json", "/no/such/folder/r.json"], "/no/such/folder/r.json cannot be written"),
    ] {
        let output = simulate(args);
        let (out, errors) = text(&output);
        assert!(!output.status.success() && errors.contains(expected), "{args:?}: {out}{errors}");
    }
}
