//! Tests of whole reports: the figures, the text, the JSON and the page that are made from given outcomes.

use super::*;
use serde_json::Value;
use std::{sync::Arc, time::Duration};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Returns the outcome of an answered request. It is due at `due` and sent `late` later. Its first token arrives after another 100 ms,
/// followed by three tokens 10 ms apart.
fn answered(due: u64, late: u64, cached: CachedCount, worker: &str) -> RequestOutcome {
    let first = due + late + 100;
    let answer = MeasuredAnswer {
        first_token: Some(ms(first)),
        gaps: vec![Gap { length: ms(10), count: 3 }],
        prompt_tokens: Some(1_000),
        output_tokens: 4,
        cached,
        prefix: cached.tokens().map(|found| PrefixTokens {
            prompt_tokens: 1_000,
            possible_tokens: 900,
            eligible_tokens: 850,
            chosen_tokens: 800,
            found_tokens: found,
            uncached: [("evicted".to_owned(), 900 - found), ("new_text".to_owned(), 100)].into(),
        }),
        prefill_worker: Some(Arc::from(worker)),
        decode_worker: Some(Arc::from("decode-0")),
    };
    let expected = Expected { prompt_tokens: Some(1_000), output_tokens: Some(4) };
    RequestOutcome { due: ms(due), sent: ms(due + late), ended: ms(first + 30), expected, result: Ok(answer) }
}

fn failed(due: u64, class: FailureClass, message: &str) -> RequestOutcome {
    let failure = Failure { class, message: message.to_owned() };
    RequestOutcome { due: ms(due), sent: ms(due), ended: ms(due + 5), expected: Expected::default(), result: Err(failure) }
}

fn recorder(slo: Slo) -> Recorder {
    let mut recorder = Recorder::new(slo);
    recorder.add_worker("prefill-2", Roles { prefills: true, decodes: false });
    recorder.add(&answered(0, 0, CachedCount::Counted(800), "prefill-0"));
    recorder.add(&answered(1_000, 400, CachedCount::Estimated(300), "prefill-1"));
    recorder.add(&answered(1_000, 0, CachedCount::Unknown, "prefill-1"));
    recorder.add(&failed(1_200, FailureClass::Status(503), "busy <now> & later"));
    recorder.add(&failed(1_300, FailureClass::Status(503), "another"));
    recorder.add(&failed(1_400, FailureClass::CutStream, "cut"));
    recorder.add(&failed(1_865, FailureClass::Stopped, "stopped"));
    recorder
}

fn report() -> Report {
    let slo = Slo { ttft: Some(ms(200)), itl: Some(ms(10)), e2e: None };
    recorder(slo).report("run <1>", vec![Fact::new("speed", 2.5)])
}

#[test]
fn report_has_the_figures_of_its_outcomes() {
    let report = report();
    assert_eq!(report.seconds, 1.87);
    let Requests { sent, answered, failed, stopped, .. } = report.requests;
    assert_eq!((sent, answered, failed, stopped), (7, 3, 3, 1));
    let errors: Vec<_> = report.errors.iter().map(|error| (&*error.class, error.count, &*error.example)).collect();
    assert_eq!(errors, [("HTTP status 503", 2, "busy <now> & later"), ("cut stream", 1, "cut")]);
    let tokens = &report.tokens;
    assert_eq!((tokens.prompt, tokens.output, tokens.cached(), tokens.hit_rate()), (3_000, 12, 1_100, Some(0.55)));
    assert_eq!((tokens.cached_counted, tokens.cached_estimated, tokens.answers_without_cached), (800, 300, 1));
    assert_eq!((tokens.other_prompt_length, tokens.other_answer_length), (0, 0));
}

#[test]
fn lateness_counts_towards_the_time_to_first_token() {
    let report = report();
    let ttft = report.ttft.expect("tokens arrived");
    assert_eq!((ttft.count, ttft.max_ms, ttft.mean_ms), (3, 500.0, 700.0 / 3.0));
    assert_eq!(report.e2e.expect("answers ended").max_ms, 530.0);
    assert_eq!((report.late.requests, report.late.lateness.expect("requests were sent").max_ms), (1, 400.0));
}

#[test]
fn goodput_counts_answers_that_meet_all_service_levels() {
    let goodput = |slo| {
        let goodput = recorder(slo).report("", Vec::new()).goodput?;
        Some((goodput.requests, goodput.share))
    };
    assert_eq!(goodput(Slo::default()), None);
    for (slo, expected) in [
        // The late answer has a TTFT of 500 ms. Three requests failed. One request was stopped, so it is not counted in the share.
        (Slo { ttft: Some(ms(100)), ..Slo::default() }, 2),
        (Slo { ttft: Some(ms(99)), ..Slo::default() }, 0),
        (Slo { ttft: Some(ms(500)), itl: Some(ms(10)), e2e: Some(ms(530)) }, 3),
        (Slo { itl: Some(ms(9)), ..Slo::default() }, 0),
        (Slo { e2e: Some(ms(529)), ..Slo::default() }, 2),
    ] {
        assert_eq!(goodput(slo), Some((expected, expected as f64 / 6.0)), "{slo:?}");
    }
}

#[test]
fn balance_includes_workers_without_requests() {
    let report = report();
    // The computed tokens of the workers are 200, then 700 plus the 1,000 tokens of the prompt whose cached tokens are not known, and 0.
    assert_eq!(
        report.balance,
        Some(Balance { computed_max_to_mean: Some(1_700.0 * 3.0 / 1_900.0), output_max_to_mean: Some(1.0) })
    );
    let names: Vec<&str> = report.workers.iter().map(|worker| &*worker.name).collect();
    assert_eq!(names, ["decode-0", "prefill-0", "prefill-1", "prefill-2"]);
}

#[test]
fn unexpected_prompt_and_answer_lengths_are_counted() {
    let mut recorder = Recorder::default();
    let mut outcome = answered(0, 0, CachedCount::Unmarked(5), "w");
    outcome.expected = Expected { prompt_tokens: Some(999), output_tokens: Some(5) };
    recorder.add(&outcome);
    let tokens = recorder.report("", Vec::new()).tokens;
    assert_eq!((tokens.other_prompt_length, tokens.other_answer_length, tokens.cached_unmarked), (1, 1, 5));
}

#[test]
fn text_report_shows_times_tokens_errors_and_goodput() {
    let text = text(&report());
    for expected in [
        "run <1>",
        "speed  2.5",
        "7 requests in 1.87 s: 3 answered (1.60/s), 3 failed, 1 stopped in flight",
        "2 failures: HTTP status 503; the first one: busy <now> & later",
        "55.0% of prompts (800 counted by workers, 300 estimated); unknown for 1 answer",
        "cached on any worker 90.0%, on a worker that could compute the prompt 85.0%, expected on the chosen one 80.0%, found 55.0%",
        "not cached: evicted 35.0%, new text 10.0%",
        "goodput: 1.07/s: 2 requests, 33.3% of those that ended, had TTFT ≤ 200 ms, mean ITL ≤ 10.0 ms",
        "balance of 4 workers: busiest / mean 2.68 by computed prompt tokens, 1.00 by generated tokens",
        "1 request sent more than 10 ms late",
    ] {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    let row = |name: &str| {
        text.lines().find(|line| line.starts_with(name)).unwrap_or_default().split_whitespace().skip(2).collect::<Vec<_>>()
    };
    assert_eq!(row("TTFT"), ["233", "100", "500", "500", "500"]);
    assert_eq!(row("ITL"), ["10.0"; 5]);
}

#[test]
fn comparison_has_a_row_for_each_report() {
    let reports = [report(), Recorder::default().report("empty", Vec::new())];
    let table = comparison(&reports);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 4, "{table}");
    assert!(lines[2].starts_with("run <1>") && lines[2].contains("55.0%") && lines[2].contains("33.3%"), "{table}");
    assert!(lines[3].starts_with("empty"), "{table}");
    let heads = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(heads(lines[1])[..4], ["per", "s", "failed", "mean"]);
    // A column without a value in any report is omitted, such as failures and goodput.
    let answered_only = {
        let mut recorder = Recorder::new(Slo::default());
        recorder.add(&answered(0, 0, CachedCount::Counted(1), "w"));
        comparison(&[recorder.report("a", Vec::new())])
    };
    assert!(!answered_only.contains("failed") && !answered_only.contains("put"), "{answered_only}");
}

#[test]
fn comparison_of_plans_fits_into_a_terminal() {
    let mut report = report();
    report.name = "128 prefill, 128 decode".to_owned();
    (report.requests.failed, report.requests.answered_per_second) = (0, 1_234.0);
    for summary in [&mut report.ttft, &mut report.e2e].into_iter().flatten() {
        (summary.mean_ms, summary.p50_ms, summary.p99_ms) = (12_345.0, 12_345.0, 123_456.0);
    }
    report.itl.iter_mut().for_each(|itl| (itl.mean_ms, itl.p99_ms) = (34.5, 123.0));
    let table = comparison(&[report]);
    let widest = table.lines().map(|line| line.chars().count()).max();
    assert!(widest <= Some(120), "{widest:?}\n{table}");
}

#[test]
fn json_has_all_figures() {
    let parsed: Value = serde_json::from_str(&json(None, &[report()])).expect("it is JSON");
    let report = &parsed["reports"][0];
    for (pointer, expected) in [
        ("/requests/sent", Value::from(7)),
        ("/ttft/max_ms", Value::from(500.0)),
        ("/tokens/cached_counted", Value::from(800)),
        ("/goodput/requests", Value::from(2)),
        ("/prefix/found_tokens", Value::from(1_100)),
        ("/prefix/uncached/evicted", Value::from(700)),
        ("/workers/1/name", Value::from("prefill-0")),
        ("/facts/0/value", Value::from("2.5")),
        ("/timeline/bin_seconds", Value::from(0.25)),
        ("/timeline/bins/4/due", Value::from(3)),
        ("/errors/0/class", Value::from("HTTP status 503")),
    ] {
        assert_eq!(report.pointer(pointer), Some(&expected), "{pointer}");
    }
}

/// Parses the page, which is also valid XML, and returns the texts of all its elements.
fn texts(page: &str) -> Vec<String> {
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(page, options).expect("the page is well-formed");
    let foreign = document
        .descendants()
        .filter(|node| node.has_tag_name("script") || node.attribute("src").is_some() || node.attribute("href").is_some());
    assert_eq!(foreign.count(), 0, "the page needs nothing else");
    document.descendants().filter(|node| node.is_text()).filter_map(|node| node.text()).map(str::to_owned).collect()
}

#[test]
fn page_is_well_formed_and_has_the_figures() {
    let page = html("Replay of <a & b>", None, &[report()]);
    let texts = texts(&page);
    for expected in [
        "Replay of <a & b>",
        "run <1>",
        "2 × HTTP status 503; the first one: busy <now> & later",
        "55.0%",
        "233",
        "p99 500 ms",
        "Time to first token, ms",
        "Hit rate: cached divided by all prompt tokens",
        "Computed prompt tokens by worker",
        "prefill-2",
        "1,100 of 2,000 prompt tokens",
    ] {
        assert!(texts.iter().any(|text| text == expected), "{expected:?} is not in {texts:?}");
    }
    assert!(page.matches("<svg").count() == 8, "{} plots", page.matches("<svg").count());
    assert_eq!(page.matches("class=\"bar ").count(), 4, "three workers compute prompts, and one generates");
}

#[test]
fn page_has_a_line_for_each_report_and_no_plot_without_outcomes() {
    let empty = Recorder::default().report("empty", Vec::new());
    let page = html("both", None, &[report(), empty.clone()]);
    assert!(texts(&page).iter().any(|text| text == "TTFT, run <1>"));
    assert!(page.contains("class=\"line c1"), "the second report has a line");
    let page = html("empty", None, &[empty]);
    texts(&page);
    assert!(!page.contains("<svg"), "there is nothing to plot");
}

#[test]
fn page_of_a_search_says_what_was_found_and_draws_what_was_tried() {
    let tried = |name: &str, workers, share: Option<f64>| TriedCluster {
        name: name.to_owned(),
        workers,
        is_split: name.contains("prefill"),
        share,
        meets: share >= Some(0.99),
    };
    let plan = PlanSummary {
        result: "Smallest cluster: <2> mixed".to_owned(),
        required_share: 0.99,
        tried: vec![tried("2 mixed", 2, Some(1.0)), tried("1 mixed", 1, None), tried("1 prefill, 1 decode", 2, Some(0.875))],
        commands: vec!["tandem up".to_owned()],
    };
    let page = html("plan", Some(&plan), &[report()]);
    let texts = texts(&page);
    for expected in ["Smallest cluster: <2> mixed", "tandem up\n", "87.5%", "below 50%", "1 prefill, 1 decode", "2 workers"] {
        assert!(texts.iter().any(|text| text == expected), "{expected:?} is not in {texts:?}");
    }
    let at = |name: &str| texts.iter().position(|text| text == name);
    assert!(at("1 mixed") < at("2 mixed"), "the table begins with the smallest cluster");
    let parsed: Value = serde_json::from_str(&json(Some(&plan), &[])).expect("it is JSON");
    assert_eq!((&parsed["plan"]["tried"][1]["share"], &parsed["reports"]), (&Value::Null, &Value::Array(Vec::new())));
}

#[test]
fn timeline_plot_has_a_point_for_every_ten_requests_and_at_least_six() {
    for (requests, spans) in [(12, 6), (100, 10), (2_000, 60)] {
        let mut recorder = Recorder::default();
        // One request is due every second, so the timeline has more bins than the plot has points.
        (0..requests).for_each(|at| recorder.add(&answered(at * 1_000, 0, CachedCount::Counted(1), "w")));
        let page = html("t", None, &[recorder.report("r", Vec::new())]);
        let figure = page.split("Requests in flight</figcaption>").nth(1).and_then(|rest| rest.split("</figure>").next());
        let path = figure.and_then(|figure| figure.split(" d=\"").nth(1)?.split('"').next()).expect("the figure has a line");
        let points = path.matches(['M', 'L']).count();
        assert!(points <= spans && 2 * points > spans, "{requests} requests: {points} points");
    }
}
