//! Renders reports as one self-contained HTML page, with figures, and plots as SVG. It has the same design as the page at `/dashboard`.

use super::{
    ErrorCount, Fact, PlanSummary, Report, TimeSummary, WorkerShare,
    chart::{Axis, COLOURS, Chart, Series, chart, percentile_at},
    format::{decimal, percent, rounded_percent, whole},
    plan,
    text::{requests, sentences},
    timeline::Bin,
};
use minijinja::{AutoEscape, Environment, value::Serde};
use serde::Serialize;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
/// The maximum number of workers in the page's table, which would otherwise be too long to read. The JSON report lists all workers.
const WORKERS_MAX: usize = 256;
/// The maximum number of workers whose loads are shown as bars with names. The loads of more workers are shown as lines.
const BARS_MAX: usize = 24;
/// The maximum number of points in a line over time. More points would show single bursts and hide the trend.
const SPANS_MAX: usize = 60;
/// The minimum number of points in a line over time. A line has more points only if each of them covers at least ten requests.
const SPANS_MIN: usize = 6;

#[derive(Serialize)]
struct Page<'a> {
    title: &'a str,
    style: &'static str,
    plan: Option<PlanPart<'a>>,
    reports: Vec<ReportPart<'a>>,
    times: Vec<Vec<String>>,
    sections: Vec<Section>,
    workers: Vec<Vec<String>>,
}

/// The head of a page about a search for the smallest cluster.
#[derive(Serialize)]
struct PlanPart<'a> {
    result: &'a str,
    rows: Vec<Vec<String>>,
    chart: Option<Chart>,
    commands: &'a [String],
}

/// The section of the page about one report.
#[derive(Serialize)]
struct ReportPart<'a> {
    name: &'a str,
    colour: usize,
    facts: &'a [Fact],
    errors: &'a [ErrorCount],
    requests: String,
    sentences: Vec<String>,
    tiles: Vec<PageTile>,
}

/// A number that the page shows in large type.
#[derive(Serialize)]
struct PageTile {
    name: &'static str,
    value: String,
    about: String,
}

#[derive(Serialize)]
struct Section {
    title: &'static str,
    charts: Vec<Chart>,
    bars: Vec<BarChart>,
    note: &'static str,
}

/// A chart with a bar for each worker.
#[derive(Serialize)]
struct BarChart {
    title: String,
    colour: usize,
    /// The bars: for each worker its name, its value as text, and the length of its bar in percent of the longest bar.
    bars: Vec<(String, String, f64)>,
}

/// Returns a page about one run or a comparison of several runs. If `plan` is set, the page is about a search for the smallest cluster, and
/// the reports are those of the clusters that were found.
pub fn html(title: &str, plan: Option<&PlanSummary>, reports: &[Report]) -> String {
    let has_bars = reports.iter().all(|report| report.workers.len() <= BARS_MAX);
    let sections = [
        Section { title: "Percentiles", charts: percentiles(reports), bars: Vec::new(), note: "" },
        Section {
            title: "Course of the run",
            charts: course(reports),
            bars: Vec::new(),
            note: "Each point covers one of 6 to 60 equal spans of the run. Times to first token and hit rates are at the time at which their requests were due; spans without a request have no point.",
        },
        Section {
            title: "Balance",
            charts: if has_bars { Vec::new() } else { balance(reports) },
            bars: if has_bars { bars(reports) } else { Vec::new() },
            note: "Workers are in descending order of their load.",
        },
    ];
    let workers = match reports {
        [report] if report.workers.len() <= WORKERS_MAX => report.workers.iter().map(worker_row).collect(),
        _ => Vec::new(),
    };
    let page = Page {
        title,
        style: STYLE,
        plan: plan.map(plan_part),
        reports: reports.iter().enumerate().map(|(index, report)| part(index, report)).collect(),
        times: reports.iter().flat_map(|report| times(report, (reports.len() > 1).then_some(&*report.name))).collect(),
        sections: sections.into_iter().filter(|section| !section.charts.is_empty() || !section.bars.is_empty()).collect(),
        workers,
    };
    let mut templates = Environment::new();
    templates.set_auto_escape_callback(|_| AutoEscape::Html);
    templates.render_str(TEMPLATE, Serde(page)).expect("the template is a constant that fits its data") + "\n"
}

fn plan_part(plan: &PlanSummary) -> PlanPart<'_> {
    PlanPart { result: &plan.result, rows: plan::rows(plan), chart: plan::shares(plan), commands: &plan.commands }
}

fn part(index: usize, report: &Report) -> ReportPart<'_> {
    ReportPart {
        name: &report.name,
        colour: index % COLOURS,
        facts: &report.facts,
        errors: &report.errors,
        requests: requests(report),
        sentences: sentences(report),
        tiles: tiles(report),
    }
}

fn tiles(report: &Report) -> Vec<PageTile> {
    let mut tiles = vec![PageTile {
        name: "Answers per second",
        value: decimal(report.requests.answered_per_second),
        about: format!("{} of {} requests", whole(report.requests.answered), whole(report.requests.sent)),
    }];
    let times = [("TTFT, median", &report.ttft), ("ITL, median", &report.itl), ("E2E, median", &report.e2e)];
    tiles.extend(times.into_iter().filter_map(|(name, summary)| {
        let summary = summary.as_ref()?;
        Some(PageTile {
            name,
            value: format!("{} ms", decimal(summary.p50_ms)),
            about: format!("p99 {} ms", decimal(summary.p99_ms)),
        })
    }));
    tiles.extend(report.tokens.hit_rate().map(|rate| PageTile {
        name: "Hit rate",
        value: rounded_percent(rate),
        about: format!("{} of {} prompt tokens", whole(report.tokens.cached()), whole(report.tokens.prompt_with_cached)),
    }));
    tiles.push(PageTile {
        name: "Tokens per second",
        value: decimal(report.tokens.output_per_second),
        about: format!("and {} of prompts", decimal(report.tokens.prompt_per_second)),
    });
    tiles.extend(report.goodput.as_ref().map(|goodput| PageTile {
        name: "Goodput",
        value: percent(goodput.share),
        about: format!("{} requests per second", decimal(goodput.per_second)),
    }));
    tiles
}

/// Returns the report's rows in the table of times. If the page has several reports, `shown_name` is the report's name, which each row shows.
fn times(report: &Report, shown_name: Option<&str>) -> Vec<Vec<String>> {
    let rows = [("TTFT", &report.ttft), ("ITL", &report.itl), ("E2E", &report.e2e), ("Late start", &report.late.lateness)];
    let row = |(name, summary): (&str, &Option<TimeSummary>)| {
        let summary = summary.as_ref()?;
        let name = shown_name.map_or_else(|| name.to_owned(), |report| format!("{name}, {report}"));
        let times = [summary.mean_ms, summary.p50_ms, summary.p90_ms, summary.p99_ms, summary.max_ms];
        Some([name, whole(summary.count)].into_iter().chain(times.map(decimal)).collect())
    };
    rows.into_iter().filter_map(row).collect()
}

fn worker_row(worker: &WorkerShare) -> Vec<String> {
    let counts = [
        worker.prompts,
        worker.prompt_tokens,
        worker.cached_tokens,
        worker.computed_tokens(),
        worker.answers,
        worker.output_tokens,
    ];
    [worker.name.clone()].into_iter().chain(counts.map(whole)).collect()
}

fn percentiles(reports: &[Report]) -> Vec<Chart> {
    let of = |title, summary: fn(&Report) -> &Option<TimeSummary>| {
        let series: Vec<Series> = each(reports, |report| {
            let curve = summary(report).iter().flat_map(|summary| &summary.curve);
            vec![(false, curve.map(|(percent, ms)| (percentile_at(*percent), *ms)).collect())]
        });
        chart(title, &Axis::percentiles(), None, decimal, &series)
    };
    let charts = [
        of("Time to first token, ms", |report| &report.ttft),
        of("Time between two tokens, ms", |report| &report.itl),
        of("Time to the end of the answer, ms", |report| &report.e2e),
    ];
    charts.into_iter().flatten().collect()
}

fn course(reports: &[Report]) -> Vec<Chart> {
    let spans = |report: &Report| (report.requests.sent / 10).clamp(SPANS_MIN as u64, SPANS_MAX as u64) as usize;
    let coarse = |report: &Report| Report { timeline: report.timeline.coarser(spans(report)), ..report.clone() };
    let reports: &[Report] = &reports.iter().map(coarse).collect::<Vec<_>>();
    let ends = reports.iter().map(|report| report.timeline.bin.as_secs_f64() * report.timeline.bins.len() as f64);
    let axis = Axis::seconds(ends.fold(0.0, f64::max));
    let line = |report: &Report, value: &dyn Fn(&Bin, f64) -> Option<f64>| -> Vec<(f64, f64)> {
        let seconds = report.timeline.bin.as_secs_f64();
        let bins = report.timeline.bins.iter().enumerate();
        bins.filter_map(|(index, bin)| Some(((index as f64 + 0.5) * seconds, value(bin, seconds)?))).collect()
    };
    let ratio = |part: f64, whole: u64| (whole > 0).then(|| part / whole as f64);
    let rates = each(reports, |report| {
        vec![
            (true, line(report, &|bin, seconds| Some(bin.due as f64 / seconds))),
            (false, line(report, &|bin, seconds| Some(bin.answered as f64 / seconds))),
        ]
    });
    let in_flight = each(reports, |report| {
        let mut open = 0.0;
        let points = line(report, &|_, _| Some(0.0));
        let points = points.into_iter().zip(&report.timeline.bins).map(|((at, _), bin)| {
            open += bin.due as f64 - bin.answered as f64 - bin.failed as f64;
            (at, open)
        });
        vec![(false, points.collect())]
    });
    let ttft = each(reports, |report| {
        let mean = line(report, &|bin, _| ratio(bin.ttft_sum_ms, bin.first_tokens));
        let longest = line(report, &|bin, _| (bin.first_tokens > 0).then_some(bin.ttft_max_ms));
        if reports.len() == 1 { vec![(false, mean), (true, longest)] } else { vec![(false, mean)] }
    });
    let output = each(reports, |report| vec![(false, line(report, &|bin, seconds| Some(bin.output_tokens as f64 / seconds)))]);
    let hits = each(reports, |report| vec![(false, line(report, &|bin, _| ratio(bin.cached_tokens as f64, bin.prompt_tokens)))]);
    let ttft_title = match reports {
        [_] => "Time to first token, ms: mean, and dashed the longest",
        _ => "Time to first token, ms: mean",
    };
    let charts = [
        chart("Answers per second, and dashed the requests that were due", &axis, None, decimal, &rates),
        chart("Requests in flight", &axis, None, decimal, &in_flight),
        chart(ttft_title, &axis, None, decimal, &ttft),
        chart("Generated tokens per second", &axis, None, decimal, &output),
        chart("Hit rate: cached divided by all prompt tokens", &axis, Some(1.0), percent, &hits),
    ];
    charts.into_iter().flatten().collect()
}

/// A load that the page compares between workers: its title, a function that returns whether a worker has this kind of load, and a function
/// that returns the load.
type WorkerLoad = (&'static str, fn(&WorkerShare) -> bool, fn(&WorkerShare) -> u64);

const LOADS: [WorkerLoad; 2] = [
    ("Computed prompt tokens by worker", |worker| worker.prefills, WorkerShare::computed_tokens),
    ("Generated tokens by worker", |worker| worker.decodes, |worker| worker.output_tokens),
];

/// Returns one chart for each kind of load. A chart has a line for each report, with the loads of the report's workers in descending order.
fn balance(reports: &[Report]) -> Vec<Chart> {
    let of = |(title, takes, load): WorkerLoad| {
        let mut most = 0;
        let series = each(reports, |report| {
            let mut loads: Vec<u64> = report.workers.iter().filter(|worker| takes(worker)).map(load).collect();
            loads.sort_unstable_by(|one, other| other.cmp(one));
            most = most.max(loads.len());
            vec![(false, loads.iter().enumerate().map(|(index, load)| (index as f64 + 1.0, *load as f64)).collect())]
        });
        let axis = Axis(vec![(1.0, "busiest".to_owned()), (most as f64, format!("{} workers", whole(most as u64)))]);
        chart(title, &axis, None, decimal, &series)
    };
    LOADS.into_iter().filter_map(of).collect()
}

/// Returns a bar chart for each kind of load and each report, with the busiest workers first.
fn bars(reports: &[Report]) -> Vec<BarChart> {
    let of = |(title, takes, load): WorkerLoad, at: usize, report: &Report| {
        let mut loads: Vec<(&str, u64)> =
            report.workers.iter().filter(|worker| takes(worker)).map(|worker| (&*worker.name, load(worker))).collect();
        loads.sort_by_key(|(_, load)| std::cmp::Reverse(*load));
        let most = loads.first().map(|(_, load)| *load).filter(|most| *most > 0)?;
        let title = if reports.len() > 1 { format!("{title}: {}", report.name) } else { title.to_owned() };
        let bar = |(name, load): (&str, u64)| (name.to_owned(), whole(load), (load as f64 / most as f64 * 1000.0).round() / 10.0);
        Some(BarChart { title, colour: at % COLOURS, bars: loads.into_iter().map(bar).collect() })
    };
    let numbered = || reports.iter().enumerate();
    LOADS.into_iter().flat_map(|measure| numbered().filter_map(move |(at, report)| of(measure, at, report))).collect()
}

/// Returns the chart lines of all reports. `lines` returns the lines of one report: whether a line is dashed, and its points.
fn each(reports: &[Report], mut lines: impl FnMut(&Report) -> Vec<(bool, Vec<(f64, f64)>)>) -> Vec<Series> {
    let numbered = reports.iter().enumerate();
    let all = numbered.flat_map(|(index, report)| {
        let of_report = lines(report).into_iter();
        of_report.map(move |(dashed, points)| Series { name: report.name.clone(), report: index, dashed, points })
    });
    all.collect()
}
