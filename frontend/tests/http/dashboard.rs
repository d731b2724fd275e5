//! The dashboard's files, with their content security policy, and the dashboard's data.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tandem_proto::v1::{FailureReason, PrefillChunk, PrefillTimeline, finished::FinishReason, generate_reply};

/// Waits until this many prompts are recorded, and returns them.
async fn recorded(cluster: &Cluster, count: usize) -> Vec<Value> {
    for _ in 0..2000 {
        let (_, found) = cluster.get("/dashboard/requests").await;
        let records = found["requests"].as_array().expect("requests is a list").clone();
        if records.len() == count {
            return records;
        }
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    panic!("there are not {count} requests")
}

#[tokio::test]
async fn pages_load_only_files_of_this_server() {
    let cluster = Cluster::start().await;
    for (page, other, files_min) in [("dashboard", "chat", 10), ("chat", "dashboard", 5)] {
        let reply = cluster.send(Method::GET, &format!("/{page}"), &[], "").await;
        let policy = reply.header("content-security-policy").expect("the page has a content-security-policy header").to_owned();
        for part in ["default-src 'none'", "script-src 'self';", "style-src 'self';", "frame-ancestors 'none'", "base-uri 'none'"]
        {
            assert!(policy.contains(part), "{part} in {policy}");
        }
        assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
        let (status, html) = reply.text().await;
        assert_eq!(status, StatusCode::OK);
        assert!(html.contains(&format!("<a class=\"neighbour\" href=\"{other}\">")), "{page} has no link to {other}");
        // Every file that the page uses exists, has the same policy, and refers to no other server.
        let folder = format!("{page}/");
        let mut files: Vec<String> = html.split('"').filter(|text| text.starts_with(&folder)).map(str::to_owned).collect();
        assert!(files.len() >= 3, "{files:?}");
        let mut seen = 0;
        while let Some(file) = files.pop() {
            let reply = cluster.send(Method::GET, &format!("/{file}"), &[], "").await;
            assert_eq!(reply.header("content-security-policy"), Some(&*policy), "{file}");
            assert_eq!(reply.header("x-content-type-options"), Some("nosniff"), "{file}");
            let (status, text) = reply.text().await;
            assert_eq!(status, StatusCode::OK, "{file}");
            let imports = text.lines().filter_map(|line| line.strip_prefix("import ")?.split("'./").nth(1)?.split('\'').next());
            files.extend(imports.map(|name| format!("{folder}{name}")));
            let elsewhere = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!elsewhere.contains("http://") && !elsewhere.contains("https://"), "{file} refers to another server");
            seen += 1;
        }
        assert!(seen >= files_min, "the modules of {page} were not followed");
        let (status, error) = cluster.get(&format!("/{folder}other.js")).await;
        assert_eq!((status, &error["error"]["code"]), (StatusCode::NOT_FOUND, &json!("unknown_path")));
    }
}

#[tokio::test]
async fn dashboard_records_have_usage_and_times_but_no_text() {
    let mut cluster = Cluster::start().await;
    // The first attempt fails. The second attempt has a prefill worker.
    cluster.place(cluster.unreachable());
    cluster.place(cluster.remote(2, 16));
    let request = cluster.spawn_post(COMPLETIONS, completion(json!("a rare wisteria"), json!({ "max_tokens": 5 })));
    let call = cluster.call().await;
    call.begin(Some(32)).await;
    call.send(tokens(0, b"lil")).await;
    // The message with the prefill's chunks may arrive after the first token.
    let chunks =
        [(0.5, 1.0, 64), (1.5, 2.0, 8)].map(|(start_ms, duration_ms, tokens)| PrefillChunk { start_ms, duration_ms, tokens });
    call.send(generate_reply::Message::PrefillTimeline(PrefillTimeline { chunks: chunks.into() })).await;
    call.send(tokens(0, b"ac")).await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let answer = request.await.expect("the client task runs").json().await.1;
    let records = recorded(&cluster, 1).await;
    let record = &records[0];
    for (field, expected) in [
        ("number", json!(1)),
        ("endpoint", json!("completions")),
        ("streamed", json!(false)),
        ("status", json!(200)),
        ("prompt_tokens", answer["usage"]["prompt_tokens"].clone()),
        ("completion_tokens", json!(5)),
        ("cached_tokens", json!(32)),
        ("cached_tokens_source", json!("worker")),
        ("cached_tokens_by_tier", json!({ "device": 32 })),
        ("overlap_blocks", json!(2)),
        ("block_size", json!(16)),
        ("prefill_worker", json!("p0")),
        ("decode_worker", json!("d0")),
        ("request_id", answer["tandem"]["request_id"].clone()),
        ("kv_transfer_bytes", json!(4096)),
    ] {
        assert_eq!(record[field], expected, "{field}");
    }
    let steps = &record["steps"];
    let failed = steps["failed"].as_array().expect("failed is a list");
    assert_eq!((failed.len(), &failed[0]["reason"]), (1, &json!("unreachable")));
    let stages = ["requested_ms", "placed_ms", "scheduled_ms", "started_ms", "first_token_ms", "ended_ms"];
    let stages: Vec<f64> =
        stages.iter().map(|step| steps[step].as_f64().unwrap_or_else(|| panic!("{step} in {steps}"))).collect();
    assert!(stages.is_sorted() && stages[0] >= 0.0, "{steps}");
    assert!(failed[0]["at_ms"].as_f64().is_some_and(|at| stages[0] <= at && at <= stages[1]), "{steps}");
    let scheduled = steps["scheduled_ms"].as_f64().expect("the record has the time of scheduling");
    let chunks = steps["chunks"].as_array().expect("chunks is a list");
    let number = |chunk: &Value, field: &str| chunk[field].as_f64().expect("the chunk's field is a number");
    let listed = chunks.iter().map(|chunk| (number(chunk, "duration_ms"), number(chunk, "tokens")));
    assert_eq!(listed.collect::<Vec<_>>(), [(1.0, 64.0), (2.0, 8.0)]);
    // The times are compared with a tolerance, because conversions lose the last digits.
    for (chunk, begun) in chunks.iter().zip([0.5, 1.5]) {
        assert!((number(chunk, "start_ms") - scheduled - begun).abs() < 1e-6, "{steps}");
    }
    let text = records[0].to_string();
    assert!(!text.contains("wisteria") && !text.contains("lilac"), "{text}");
}

#[tokio::test]
async fn every_outcome_is_recorded_and_the_oldest_record_is_dropped_at_the_limit() {
    let mut cluster =
        Cluster::with(|settings| (settings.dashboard_requests, settings.attempts, settings.resumes) = (3, 1, 0)).await;
    // A request that is refused before it runs is only counted, not recorded.
    assert_eq!(cluster.post(CHAT, &chat(json!({ "max_tokens": -1 }))).await.status(), StatusCode::BAD_REQUEST);
    // In this request, the client disconnects before the first token.
    let request = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    request.abort();
    call.closed().await;
    let first = recorded(&cluster, 1).await.remove(0);
    let outcome = |record: &Value| {
        (record["status"].as_u64(), record["cached_tokens"].as_u64(), record["steps"]["first_token_ms"].is_f64())
    };
    assert_eq!((outcome(&first), first["number"].as_u64()), ((Some(499), None, false), Some(1)));
    assert_eq!((&first["decode_worker"], &first["streamed"]), (&Value::Null, &json!(true)));
    // In this request, no worker has capacity.
    cluster.place(tandem_proto::v1::route_reply::Message::Failure(failure(FailureReason::AtCapacity, "")));
    assert_eq!(cluster.post(CHAT, &chat(json!({}))).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(outcome(&recorded(&cluster, 2).await[1]), (Some(503), None, false));
    // In this request, the worker is lost after the first token, and the generation is not resumed.
    let request = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"a")).await;
    call.fail(tonic::Status::unavailable("x")).await;
    request.await.expect("the client task runs").text().await;
    assert_eq!(outcome(&recorded(&cluster, 3).await[2]), (Some(503), Some(0), true));
    // A request with two prompts has two records.
    let request = cluster.spawn_post(COMPLETIONS, completion(json!(["one", "two"]), json!({ "max_tokens": 1 })));
    for _ in 0..2 {
        let call = cluster.call().await;
        tokio::spawn(call.answer(Some(0), "x"));
    }
    assert_eq!(request.await.expect("the client task runs").status(), StatusCode::OK);
    let (_, found) = cluster.get("/dashboard/requests?after=3").await;
    let numbers = |found: &Value| {
        found["requests"]
            .as_array()
            .expect("requests is a list")
            .iter()
            .map(|record| record["number"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!((numbers(&found), &found["max"]), (vec![json!(4), json!(5)], &json!(3)));
    let (_, all) = cluster.get("/dashboard/requests").await;
    assert_eq!(numbers(&all), [3, 4, 5].map(|number| json!(number)), "the oldest requests are forgotten");
    assert_eq!(numbers(&cluster.get("/dashboard/requests?after=5").await.1), [] as [Value; 0]);
    assert_eq!(numbers(&cluster.get("/dashboard/requests?after=nonsense").await.1).len(), 3);
}

#[tokio::test]
async fn disconnected_client_is_recorded_with_the_number_of_tokens_sent() {
    let mut cluster = Cluster::start().await;
    let request = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"abc")).await;
    let mut reply = request.await.expect("the client task runs");
    while !reply.more().await.contains("abc") {}
    drop(reply);
    call.closed().await;
    let record = recorded(&cluster, 1).await.remove(0);
    assert_eq!((&record["status"], &record["completion_tokens"]), (&json!(499), &json!(3)));
    assert!(record["steps"]["first_token_ms"].is_f64());
}

#[tokio::test]
async fn dashboard_with_a_limit_of_0_records_is_not_served() {
    let cluster = Cluster::with(|settings| settings.dashboard_requests = 0).await;
    for path in ["/dashboard", "/dashboard/cluster", "/dashboard/requests", "/dashboard/main.js"] {
        assert_eq!(cluster.get(path).await.0, StatusCode::NOT_FOUND, "{path}");
    }
}

#[tokio::test]
async fn dashboard_shows_the_workers_or_why_the_cluster_is_unavailable() {
    let cluster = Cluster::start().await;
    let (_, seen) = cluster.get("/dashboard/cluster").await;
    assert_eq!((&seen["model"], &seen["unavailable_reason"], &seen["block_size"]), (&json!("m"), &Value::Null, &json!(16)));
    let workers = seen["workers"].as_array().expect("workers is a list").iter();
    let named: Vec<_> =
        workers.map(|worker| (worker["worker"].clone(), worker["role"].clone(), worker["cache"].clone())).collect();
    assert_eq!(named, [(json!("d0"), json!("decode"), Value::Null), (json!("p0"), json!("prefill"), Value::Null)]);
    assert_eq!(seen["routers"][0]["problem"], Value::Null);
    *cluster.decode_workers.lock().expect("no test panics with the lock") = 0;
    assert_eq!(cluster.get("/dashboard/cluster").await.1["unavailable_reason"], "no decode worker");
    let unreachable = Cluster::with(|settings| settings.routers = ["127.0.0.1:1".to_owned()].into_iter().collect()).await;
    let (status, seen) = unreachable.get("/dashboard/cluster").await;
    assert_eq!((status, &seen["workers"]), (StatusCode::OK, &json!([])));
    let problem =
        "no router is reachable at 127.0.0.1:1; start one, or correct --router, --etcd or the certificates (--cluster-cert)";
    assert_eq!((&seen["unavailable_reason"], &seen["routers"][0]["problem"]), (&json!(problem), &json!(problem)));
}

#[tokio::test]
async fn dashboard_and_metrics_show_the_last_audit_result() {
    use tandem_frontend::AuditResult;
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let file = folder.path().join("audit");
    let cluster = Cluster::with(|settings| settings.audit_result = Some(file.clone())).await;
    let shown = async || cluster.get("/dashboard/cluster").await.1["audit"].clone();
    let scraped = async || cluster.send(Method::GET, "/metrics", &[], "").await.text().await.1;
    assert!(shown().await["problem"].as_str().is_some_and(|why| why.contains("cannot be read")));
    let text = scraped().await;
    assert!(
        text.lines().any(|line| line == "tandem_frontend_audit_timestamp_seconds 0"),
        "an alert can detect the missing audit: {text}"
    );
    assert!(!text.contains("tandem_frontend_audit_findings"), "an unknown number is not reported as 0");
    let result = AuditResult { findings: 2, answers: 60, ..AuditResult::default() }.now();
    result.write(&file).expect("the folder is writable");
    let text = scraped().await;
    for line in [
        "tandem_frontend_audit_findings 2".to_owned(),
        format!("tandem_frontend_audit_timestamp_seconds {}", result.checked_unix_s),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
    assert_eq!(shown().await, json!(result));
    AuditResult { findings: 0, ..result }.write(&file).expect("the folder is writable");
    assert!(scraped().await.contains("tandem_frontend_audit_findings 0"));
    std::fs::write(&file, "findings 0").expect("the folder is writable");
    assert!(shown().await["problem"].as_str().is_some_and(|why| why.contains("is not a result of")));
    assert_eq!(Cluster::start().await.get("/dashboard/cluster").await.1["audit"], Value::Null);
}

#[tokio::test]
async fn refused_requests_and_the_history_have_no_text() {
    let mut cluster = Cluster::start().await;
    for (path, body, code) in [
        (CHAT, chat(json!({ "max_tokens": -1 })), "invalid_value"),
        (COMPLETIONS, completion(json!("wisteria"), json!({ "model": "wisteria" })), "model_not_found"),
        ("/v1/messages", json!({ "wisteria": 1 }), "missing_required_parameter"),
    ] {
        let reply = cluster.post(path, &body).await;
        let (status, id) = (reply.status().as_u16(), reply.header("x-request-id").expect("each reply has an id").to_owned());
        let (_, found) = cluster.get("/dashboard/requests").await;
        let refusal = found["refusals"].as_array().expect("refusals is a list").last().expect("there is a refusal").clone();
        assert!(refusal["at_unix_ms"].is_u64());
        for (field, expected) in
            [("request_id", json!(id)), ("endpoint", json!(path)), ("status", json!(status)), ("code", json!(code))]
        {
            assert_eq!(refusal[field], expected, "{path}: {field}");
        }
    }
    // The name of a model in a path is the client's text.
    assert_eq!(cluster.get("/v1/models/wisteria").await.0, StatusCode::NOT_FOUND);
    cluster.place(cluster.remote(2, 16));
    let request = cluster.spawn_post(COMPLETIONS, completion(json!("wisteria"), json!({ "max_tokens": 1 })));
    cluster.call().await.answer(Some(32), "lilac").await;
    let answer = request.await.expect("the client task runs").json().await.1;
    recorded(&cluster, 1).await;
    let (_, history) = cluster.get("/dashboard/history").await;
    let sums = &history["periods"][0]["workers"]["p0"];
    let prompt_tokens = answer["usage"]["prompt_tokens"].clone();
    // The router of this test says nothing of prefixes.
    assert_eq!(
        *sums,
        json!({
            "prompts": 1, "prompt_tokens": prompt_tokens, "cached_tokens": 32, "overlap_blocks": 2, "known_prompts": 0,
            "facts_prompt_tokens": 0, "possible_tokens": 0, "eligible_tokens": 0, "chosen_tokens": 0, "found_tokens": 0, "uncached": {},
        }),
        "{history}"
    );
    for text in [cluster.get("/dashboard/requests").await.1.to_string(), history.to_string()] {
        assert!(!text.contains("wisteria") && !text.contains("lilac"), "{text}");
    }
}
