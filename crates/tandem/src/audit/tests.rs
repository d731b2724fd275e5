//! Tests with evidence that is consistent, and with every contradiction that must be found.

use super::*;

fn scheduled(prompt: &str, attempt: u32, worker: &str, tokens: u32, cached: u32) -> LedgerLine {
    LedgerLine::Scheduled {
        request_id: prompt.to_owned(),
        attempt,
        worker: worker.to_owned(),
        prompt: tokens,
        cached: Some(cached),
        computed: Some(tokens - cached),
        by_tier: [("device".to_owned(), cached)].into(),
        at: None,
        model: String::new(),
        account: String::new(),
    }
}

fn ended(prompt: &str, attempt: u32, outcome: Outcome) -> LedgerLine {
    LedgerLine::Ended { request_id: prompt.to_owned(), attempt, worker: "d0".to_owned(), outcome }
}

fn answered(request: &str, prompts: usize, prompt_tokens: u64, cached_tokens: u64, source: CountSource) -> ClientLine {
    ClientLine {
        request_id: Some(request.to_owned()),
        usage: Some(ReportedUsage { prompts, prompt_tokens, cached_tokens, source }),
    }
}

fn metrics(change: &[(&str, &str)]) -> MetricSamples {
    let mut text = r#"# TYPE tandem_worker_kv_blocks gauge
tandem_frontend_request_cached_tokens_count 4
tandem_frontend_request_prompt_tokens_sum 400
tandem_frontend_request_cached_tokens_sum 160
tandem_frontend_cached_tokens_total{source="worker",tier="device"} 128
tandem_frontend_cached_tokens_total{source="router_estimate",tier="unknown"} 32
tandem_frontend_inflight_requests 0
tandem_router_bookings 0
tandem_worker_kv_capacity_blocks{worker="p0"} 100
tandem_worker_kv_blocks{worker="p0",state="free"} 60
tandem_worker_kv_blocks{worker="p0",state="cached"} 40
tandem_worker_kv_blocks{worker="p0",state="in_use"} 0
tandem_worker_prefix_cache_requests_total{worker="p0",result="hit"} 4
tandem_worker_prefix_cache_requests_total{worker="p0",result="miss"} 2
tandem_worker_prompt_tokens_total{worker="p0"} 600
tandem_worker_cached_tokens_total{worker="p0",tier="device"} 208
tandem_worker_ledger_lost_total{worker="p0"} 0
"#
    .to_owned();
    for (from, to) in change {
        assert!(text.contains(from), "{from}");
        text = text.replace(from, to);
    }
    let mut samples = MetricSamples::default();
    samples.add(&text);
    samples
}

/// Returns consistent evidence: a plain answer, an answer after a failed attempt, an answer with an estimate, an answer with a cached prefix, and a
/// client that disconnected.
fn agreeing() -> Evidence {
    use Outcome::{Cancelled, Failed, Superseded, Won};
    Evidence {
        client: vec![
            answered("a", 1, 100, 48, CountSource::Worker),
            answered("b", 1, 100, 64, CountSource::Worker),
            answered("c", 1, 100, 32, CountSource::RouterEstimate),
            answered("e", 1, 100, 16, CountSource::Worker),
            ClientLine { request_id: None, usage: None },
        ],
        ledger: vec![
            scheduled("a-0", 1, "p0", 100, 48),
            ended("a-0", 1, Won),
            // Attempt 1 failed and attempt 3 resumed the answer. The count of attempt 2 applies, because attempt 2 sent the first token.
            scheduled("b-0", 1, "p0", 100, 0),
            ended("b-0", 1, Failed),
            ended("b-0", 2, Won),
            scheduled("b-0", 2, "p0", 100, 64),
            ended("b-0", 3, Superseded),
            scheduled("c-0", 1, "p0", 100, 80),
            ended("c-0", 1, Won),
            scheduled("gone-0", 1, "p0", 100, 0),
            ended("gone-0", 1, Cancelled),
            scheduled("e-0", 1, "p0", 100, 16),
            ended("e-0", 1, Won),
        ],
        metrics: metrics(&[]),
        lost_workers: BTreeSet::new(),
        lost_frontend: false,
    }
}

fn findings(change: impl FnOnce(&mut Evidence)) -> Vec<Finding> {
    let mut evidence = agreeing();
    change(&mut evidence);
    check(&evidence).1
}

#[test]
fn consistent_evidence_has_no_findings() {
    let (checked, findings) = check(&agreeing());
    assert_eq!(findings, []);
    assert_eq!(checked, Checked { answers: 4, estimates: 1, attempts: 7, workers: 1, unverified: 0 });
}

#[test]
fn every_contradiction_is_found() {
    type Change = Box<dyn Fn(&mut Evidence)>;
    let reported = |at: usize, change: fn(&mut ReportedUsage)| -> Change {
        Box::new(move |evidence| change(evidence.client[at].usage.as_mut().expect("the client record has usage")))
    };
    let counted =
        |from: &'static str, to: &'static str| -> Change { Box::new(move |evidence| evidence.metrics = metrics(&[(from, to)])) };
    let without = |at: usize| -> Change { Box::new(move |evidence| drop(evidence.ledger.remove(at))) };
    let cases: Vec<(&str, Change)> = vec![
        (
            "usage has 64 cached tokens, but the workers counted 48 for the winning attempts (attempt 1 on p0)",
            reported(0, |usage| usage.cached_tokens = 64),
        ),
        ("usage has 101 prompt tokens", reported(2, |usage| usage.prompt_tokens = 101)),
        ("an answer to 2 prompts, but the ledgers have a winning attempt for 1", reported(0, |usage| usage.prompts = 2)),
        ("an answer to 1 prompts, but the ledgers have a winning attempt for 0", without(1)),
        ("prompt b-0 attempt 2: the attempt won, but no ledger has its token counts", without(5)),
        ("prompt_tokens_total{worker=\"p0\"} is 600, but the sum of the worker's ledger is 500", without(2)),
        ("prompt a-0 attempt 1: counted 2 times", Box::new(|evidence| evidence.ledger.push(scheduled("a-0", 1, "p0", 1, 0)))),
        (
            "does not add up",
            Box::new(|evidence| {
                evidence.ledger[0] = LedgerLine::Scheduled {
                    request_id: "a-0".to_owned(),
                    attempt: 1,
                    worker: "p0".to_owned(),
                    prompt: 100,
                    cached: Some(48),
                    computed: Some(100),
                    by_tier: [("device".to_owned(), 48)].into(),
                    at: None,
                    model: String::new(),
                    account: String::new(),
                }
            }),
        ),
        (
            "requests in the ledgers (such as x-y) that are in no client file: 2; of clients that disconnected",
            Box::new(|evidence| {
                for prompt in ["x-y-0", "z-0"] {
                    evidence.ledger.extend([scheduled(prompt, 1, "p0", 9, 0), ended(prompt, 1, Outcome::Won)]);
                }
            }),
        ),
        (
            "request_cached_tokens_count is 5, but the finished answers in the client files add up to 4",
            counted("tokens_count 4", "tokens_count 5"),
        ),
        ("request_prompt_tokens_sum is 399", counted("prompt_tokens_sum 400", "prompt_tokens_sum 399")),
        ("request_cached_tokens_sum is 161", counted("cached_tokens_sum 160", "cached_tokens_sum 161")),
        ("frontend_cached_tokens_total is 127", counted("\"device\"} 128", "\"device\"} 127")),
        (
            "prefix_cache_requests_total{worker=\"p0\"} is 7, but the sum of the worker's ledger is 6",
            counted("\"hit\"} 4", "\"hit\"} 5"),
        ),
        ("cached_tokens_total{worker=\"p0\"} is 209", counted("\"device\"} 208", "\"device\"} 209")),
        ("has lost 3 lines", counted("lost_total{worker=\"p0\"} 0", "lost_total{worker=\"p0\"} 3")),
        ("60 free + 39 cached + 0 in use blocks are not its capacity of 100", counted("\"cached\"} 40", "\"cached\"} 39")),
        ("state=\"in_use\"} is 1 although no request should be running", counted("\"in_use\"} 0", "\"in_use\"} 1")),
        ("tandem_router_bookings is 1 although", counted("bookings 0", "bookings 1")),
        ("tandem_frontend_inflight_requests is 2 although", counted("inflight_requests 0", "inflight_requests 2")),
        (
            "worker p9 is in the ledger but not in the metrics",
            Box::new(|evidence| {
                evidence.ledger.push(scheduled("gone-0", 2, "p9", 100, 0));
            }),
        ),
    ];
    for (expected, change) in cases {
        let found: Vec<String> = findings(|evidence| change(evidence)).iter().map(ToString::to_string).collect();
        assert!(found.iter().any(|finding| finding.contains(expected)), "{expected}: {found:#?}");
    }
}

#[test]
fn only_uncertain_sums_may_differ() {
    let left = |evidence: &mut Evidence| evidence.client[3].usage = None;
    assert_eq!(findings(left), [], "the frontend may have finished an answer whose client disconnected");
    let finished_less =
        metrics(&[("tokens_count 4", "tokens_count 3"), ("_sum 400", "_sum 300"), ("_sum 160", "_sum 144"), ("} 128", "} 112")]);
    let not_finished = |evidence: &mut Evidence| (evidence.client[3].usage, evidence.metrics) = (None, finished_less.clone());
    assert_eq!(findings(not_finished), [], "the frontend may not have finished an answer whose client disconnected");
    assert_ne!(
        findings(|evidence| evidence.metrics = finished_less.clone()),
        [],
        "an answer that its client has received must be finished"
    );
    let counted_less = |evidence: &mut Evidence| (evidence.metrics, evidence.lost_frontend) = (finished_less.clone(), true);
    assert_eq!(findings(counted_less), [], "a killed frontend's counters are lost");
    let counted_more = metrics(&[("_sum 400", "_sum 600")]);
    let counted_more = |evidence: &mut Evidence| (evidence.metrics, evidence.lost_frontend) = (counted_more.clone(), true);
    assert_ne!(findings(counted_more), [], "the remaining counters must not exceed the sum");
    let lost = |evidence: &mut Evidence| {
        evidence.ledger.push(scheduled("gone-0", 2, "p9", 100, 0));
        evidence.lost_workers.insert("p9".to_owned());
    };
    assert_eq!(findings(lost), [], "a killed worker's counters are lost");
    let twice = |evidence: &mut Evidence| {
        evidence.ledger.push(ended("b-0", 1, Outcome::Won));
    };
    assert_eq!(findings(twice), [], "if two attempts have won, the later one is valid");
}

#[test]
fn only_counts_of_killed_workers_are_unverified() {
    let b = |line: &LedgerLine| {
        let (LedgerLine::Scheduled { request_id, .. } | LedgerLine::Ended { request_id, .. }) = line;
        request_id == "b-0"
    };
    // Each case has three fields: the remaining ledger lines of an answer with 100 prompt tokens, 64 of them cached; the finding if workers were
    // killed; and the number of answers that cannot be verified.
    let cases = [
        // The first decode worker was killed before it recorded `won`; another decode worker resumed the answer.
        (vec![scheduled("b-0", 1, "p0", 100, 64), ended("b-0", 2, Outcome::Superseded)], None, 0),
        (
            vec![scheduled("b-0", 1, "p0", 100, 48), ended("b-0", 2, Outcome::Superseded)],
            Some("counted 48 for the winning attempts (attempt 1 on p0)"),
            0,
        ),
        // Attempt 1 won. Attempt 2 may have won as well, because its outcome is lost.
        (vec![scheduled("b-0", 1, "p0", 100, 0), ended("b-0", 1, Outcome::Won), scheduled("b-0", 2, "p0", 100, 64)], None, 0),
        (
            vec![scheduled("b-0", 1, "p0", 100, 0), ended("b-0", 1, Outcome::Won), scheduled("b-0", 2, "p0", 100, 48)],
            Some("counted 0 to 48 for the winning attempts (attempt 1 on p0, attempt 2 on p0)"),
            0,
        ),
        // An attempt with an outcome other than `won` has not won.
        (vec![scheduled("b-0", 1, "p0", 100, 64), ended("b-0", 1, Outcome::Failed)], None, 1),
        // The line with the token count was lost with the killed worker.
        (vec![ended("b-0", 1, Outcome::Won)], None, 1),
        (vec![], None, 1),
    ];
    for (lines, expected, unverified) in cases {
        let mut evidence = agreeing();
        evidence.ledger.retain(|line| !b(line));
        evidence.ledger.extend(lines.clone());
        let without = check(&evidence);
        evidence.lost_workers.extend(["d0".to_owned(), "p0".to_owned()]);
        let (checked, findings) = check(&evidence);
        let findings: Vec<String> = findings.iter().map(ToString::to_string).collect();
        assert_eq!(checked.unverified, unverified, "{lines:?}");
        assert_eq!(findings.len(), usize::from(expected.is_some()), "{lines:?}: {findings:#?}");
        assert!(expected.is_none_or(|expected| findings[0].contains(expected)), "{lines:?}: {findings:#?}");
        // Without a killed worker each of these cases is a contradiction.
        let found =
            without.1.iter().any(|finding| ["request b:", "prompt b-0 "].iter().any(|of| finding.to_string().contains(of)));
        assert!(found && without.0.unverified == 0, "{lines:?}: {:#?}", without.1);
    }
}

#[test]
fn errors_in_files_name_file_and_line() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("the folder is writable");
        vec![path]
    };
    let client = file("client", "{\"request_id\":\"a\",\"usage\":{\"prompt_tokens\":5,\"cached_tokens\":0}}\n\n{}\n");
    let ledger = file(
        "ledger",
        &(serde_json::to_string(&ended("a-0", 1, Outcome::Won)).expect("the ledger line can be serialized") + "\n"),
    );
    let evidence = read(&client, &ledger, &file("metrics", "x 1\n")).expect("all lines are valid");
    assert_eq!(evidence.client, [answered("a", 1, 5, 0, CountSource::Worker), ClientLine { request_id: None, usage: None }]);
    assert_eq!(evidence.ledger, [ended("a-0", 1, Outcome::Won)]);
    assert_eq!(evidence.metrics.sum("x", ""), 1.0);
    let cut = file("cut", "{\"line\":\"ended\",\"request_id\":\"a-0\",\"att\n");
    assert_eq!(read(&client, &cut, &[]).expect("an incomplete last ledger line is ignored").ledger, []);
    assert!(read(&cut, &ledger, &[]).is_err(), "an incomplete line of a client is invalid");
    let bad =
        read(&file("bad", "{}\n{\"usage\":7}"), &ledger, &[]).expect_err("a line whose usage is a number is refused").to_string();
    assert!(bad.contains("bad line 2"), "{bad}");
    assert!(read(&[folder.path().join("none")], &ledger, &[]).is_err());
}

#[test]
fn ids_that_clients_chose_are_one_finding_that_says_what_to_record() {
    let renamed = |evidence: &mut Evidence, count: usize| {
        let ids = evidence.client.iter_mut().filter_map(|line| line.request_id.as_mut());
        ids.take(count).for_each(|id| *id = format!("mine-{id}"));
    };
    let all = findings(|evidence| renamed(evidence, 4));
    let wrong: Vec<String> =
        all.iter().map(ToString::to_string).filter(|text| text.contains("x-request-id of the response")).collect();
    assert!(matches!(&wrong[..], [only] if only.contains("4 answers, for example mine-a")), "{all:?}");
    assert!(!all.iter().any(|finding| matches!(finding, Finding::NoWinner { .. })), "{all:?}");
    let some = findings(|evidence| renamed(evidence, 3));
    assert_eq!(some.iter().filter(|finding| matches!(finding, Finding::NoWinner { .. })).count(), 3, "{some:?}");
    assert!(!some.iter().any(|finding| matches!(finding, Finding::UnknownIds { .. })), "{some:?}");
}
