//! The command `tandem audit report`: sums up the ledgers, for invoices.
//!
//! Only a prompt's winning attempt is summed, which is the last attempt that sent the prompt's first token, so other attempts are not billed. A
//! prompt is not summed if its count or outcome is missing because a worker was killed before it had written that line. The report has the number of
//! such prompts. A prompt whose cached tokens the engine did not report is summed as computed, and counted in `unreported_prompts`.

use super::{Finding, attempts, winner};
use crate::text_table::text_table;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tandem_worker::LedgerLine;

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct SumKey {
    /// The day in UTC on which the prompt started; `-` if the ledger line has no time.
    day: String,
    /// The account; `-` if the request had none.
    account: String,
    model: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Sum {
    requests: u64,
    prompts: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    computed_tokens: u64,
    unreported_prompts: u64,
}

/// The sums over all ledgers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageReport {
    sums: BTreeMap<SumKey, Sum>,
    /// The number of prompts that are not summed, because the ledger lacks the outcome of an attempt or the counts of the winning attempt.
    unsettled: usize,
}

/// The error of ledgers whose lines contradict each other, so that they cannot be summed.
#[derive(Debug, thiserror::Error)]
#[error(
    "no sums are printed, because {count} lines of the ledgers contradict others (such as: {first}); \
     run `tandem audit check` to see all"
)]
pub struct Contradiction {
    count: usize,
    first: Finding,
}

/// Sums up the winning attempts of all prompts.
///
/// # Errors
/// Fails if lines of the ledger contradict each other.
pub fn report(ledger: &[LedgerLine]) -> Result<UsageReport, Contradiction> {
    let mut findings = Vec::new();
    let prompts = attempts(ledger, &mut findings);
    let scheduled: HashMap<(&str, u32), &LedgerLine> = ledger
        .iter()
        .filter_map(|line| match line {
            LedgerLine::Scheduled { request_id, attempt, .. } => Some(((request_id.as_str(), *attempt), line)),
            LedgerLine::Ended { .. } => None,
        })
        .collect();
    let mut report = UsageReport::default();
    let mut requests: BTreeMap<SumKey, BTreeSet<&str>> = BTreeMap::new();
    for (prompt, attempts) in &prompts {
        let mut uncounted = Vec::new();
        let Some(winner) = winner(prompt, attempts, false, &mut uncounted) else {
            report.unsettled += usize::from(!uncounted.is_empty() || attempts.values().any(|attempt| !attempt.ended));
            continue;
        };
        for count in &winner.counts {
            let Some(LedgerLine::Scheduled { at, model, account, cached, .. }) = scheduled.get(&(prompt, count.attempt)) else {
                continue;
            };
            let named = |name: &str| if name.is_empty() { "-".to_owned() } else { name.to_owned() };
            let day = at.map_or("-".to_owned(), day);
            let key = SumKey { day, account: named(account), model: named(model) };
            requests.entry(key.clone()).or_default().insert(super::request_of(prompt));
            let sum = report.sums.entry(key).or_default();
            sum.prompts += 1;
            sum.prompt_tokens += count.prompt;
            sum.cached_tokens += count.cached;
            sum.computed_tokens += count.prompt - count.cached;
            sum.unreported_prompts += u64::from(cached.is_none());
        }
    }
    for (key, requests) in requests {
        report.sums.entry(key).or_default().requests = requests.len() as u64;
    }
    let count = findings.len();
    match findings.into_iter().next() {
        Some(first) => Err(Contradiction { count, first }),
        None => Ok(report),
    }
}

/// Returns the date in UTC of a time in seconds since 1970; `-` if the time is out of range.
fn day(unix_seconds: u64) -> String {
    let time = i64::try_from(unix_seconds).ok().and_then(|seconds| jiff::Timestamp::from_second(seconds).ok());
    time.map_or_else(|| "-".to_owned(), |time| time.strftime("%F").to_string())
}

impl UsageReport {
    /// Returns the sums as a JSON array of objects.
    pub fn json(&self) -> String {
        #[derive(Serialize)]
        struct Line<'a> {
            #[serde(flatten)]
            key: &'a SumKey,
            #[serde(flatten)]
            sum: &'a Sum,
        }
        let lines: Vec<Line<'_>> = self.sums.iter().map(|(key, sum)| Line { key, sum }).collect();
        serde_json::to_string_pretty(&lines).expect("sums can be serialized") + "\n"
    }

    /// Returns the sums as CSV (RFC 4180) with a header line.
    pub fn csv(&self) -> String {
        const NAMES: [&str; 9] = [
            "day",
            "account",
            "model",
            "requests",
            "prompts",
            "prompt_tokens",
            "cached_tokens",
            "computed_tokens",
            "unreported_prompts",
        ];
        let mut writer = csv::WriterBuilder::new().has_headers(false).from_writer(Vec::new());
        let written = writer.write_record(NAMES).and_then(|()| self.sums.iter().try_for_each(|line| writer.serialize(line)));
        written.expect("writing to memory does not fail");
        String::from_utf8(writer.into_inner().expect("writing to memory does not fail")).expect("the fields are UTF-8")
    }

    /// Returns the sums as a table of aligned columns.
    pub fn table(&self) -> String {
        let csv = self.csv();
        let records = csv::ReaderBuilder::new().has_headers(false).from_reader(csv.as_bytes()).into_records();
        text_table(records.flatten().map(|record| record.iter().map(str::to_owned).collect()), 3)
    }

    /// Returns a note with the number of prompts that are not summed, and the reason; `None` if there are no such prompts.
    pub fn note(&self) -> Option<String> {
        let note =
            "prompts are not summed, because a worker was killed before it wrote their token counts or outcome to its ledger";
        (self.unsettled > 0).then(|| format!("{} {note}", self.unsettled))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_worker::Outcome;

    /// The time 2026-02-28 23:59:59 UTC, in seconds since 1970.
    const FEBRUARY: u64 = 1_772_323_199;

    fn scheduled(prompt: &str, attempt: u32, [tokens, cached]: [u32; 2], account: &str, at: Option<u64>) -> LedgerLine {
        LedgerLine::Scheduled {
            request_id: prompt.to_owned(),
            attempt,
            worker: "p0".to_owned(),
            prompt: tokens,
            cached: Some(cached),
            computed: Some(tokens - cached),
            by_tier: [("device".to_owned(), cached)].into(),
            at,
            model: "m,1".to_owned(),
            account: account.to_owned(),
        }
    }

    fn ended(prompt: &str, attempt: u32, outcome: Outcome) -> LedgerLine {
        LedgerLine::Ended { request_id: prompt.to_owned(), attempt, worker: "d0".to_owned(), outcome }
    }

    /// Returns a ledger with six requests: one with two prompts, one retried, one cancelled, one on the next day, one whose worker was killed, and
    /// one without a time.
    fn ledger() -> Vec<LedgerLine> {
        use Outcome::{Cancelled, Failed, Superseded, Won};
        vec![
            scheduled("a-0", 1, [100, 48], "acme", Some(FEBRUARY)),
            scheduled("a-1", 1, [50, 0], "acme", Some(FEBRUARY)),
            ended("a-0", 1, Won),
            ended("a-1", 1, Won),
            scheduled("b-0", 1, [100, 0], "", Some(FEBRUARY)),
            ended("b-0", 1, Failed),
            scheduled("b-0", 2, [100, 64], "", Some(FEBRUARY)),
            ended("b-0", 2, Won),
            scheduled("b-0", 3, [120, 96], "", Some(FEBRUARY)),
            ended("b-0", 3, Superseded),
            scheduled("c-0", 1, [30, 0], "acme", Some(FEBRUARY)),
            ended("c-0", 1, Cancelled),
            scheduled("d-0", 1, [10, 0], "acme", Some(FEBRUARY + 1)),
            ended("d-0", 1, Won),
            scheduled("e-0", 1, [70, 0], "acme", Some(FEBRUARY)),
            scheduled("f-0", 1, [5, 0], "", None),
            ended("f-0", 1, Won),
        ]
    }

    #[test]
    fn winning_attempts_are_summed_by_day_account_and_model() {
        let report = report(&ledger()).expect("the ledger has no contradiction");
        assert_eq!(
            report.csv(),
            "day,account,model,requests,prompts,prompt_tokens,cached_tokens,computed_tokens,unreported_prompts\n\
             -,-,\"m,1\",1,1,5,0,5,0\n\
             2026-02-28,-,\"m,1\",1,1,100,64,36,0\n\
             2026-02-28,acme,\"m,1\",1,2,150,48,102,0\n\
             2026-03-01,acme,\"m,1\",1,1,10,0,10,0\n"
        );
        let json: serde_json::Value = serde_json::from_str(&report.json()).expect("the report is JSON");
        let expected = serde_json::json!({ "day": "2026-02-28", "account": "acme", "model": "m,1", "requests": 1, "prompts": 2,
            "prompt_tokens": 150, "cached_tokens": 48, "computed_tokens": 102, "unreported_prompts": 0 });
        assert_eq!((&json[2], json.as_array().map(Vec::len)), (&expected, Some(4)));
        let table = report.table();
        assert!(
            table.lines().nth(3).is_some_and(|line| line.split_whitespace().eq([
                "2026-02-28",
                "acme",
                "m,1",
                "1",
                "2",
                "150",
                "48",
                "102",
                "0"
            ])),
            "{table}"
        );
        let note = |report: &UsageReport| report.note().unwrap_or_default();
        assert!(note(&report).starts_with("1 prompts are not summed"), "{}", note(&report));
        let mut killed = ledger();
        killed.push(ended("g-0", 1, Outcome::Won));
        let killed = super::report(&killed).expect("a missing count is not a contradiction");
        assert_eq!((&killed.sums, note(&killed).get(..1)), (&report.sums, Some("2")));
        let nothing = super::report(&[]).expect("an empty ledger has no contradiction");
        assert!(nothing.table().starts_with("day") && nothing.note().is_none());
    }

    #[test]
    fn prompts_without_reported_cached_tokens_are_counted_separately() {
        let mut ledger = vec![
            scheduled("a-0", 1, [100, 48], "acme", Some(FEBRUARY)),
            ended("a-0", 1, Outcome::Won),
            scheduled("b-0", 1, [30, 0], "acme", Some(FEBRUARY)),
            ended("b-0", 1, Outcome::Won),
            scheduled("c-0", 1, [70, 0], "acme", Some(FEBRUARY)),
            ended("c-0", 1, Outcome::Cancelled),
        ];
        for line in &mut ledger[2..] {
            if let LedgerLine::Scheduled { cached, computed, by_tier, .. } = line {
                (*cached, *computed, *by_tier) = (None, None, BTreeMap::new());
            }
        }
        let csv = report(&ledger).expect("nothing contradicts").csv();
        assert_eq!(csv.lines().nth(1), Some(r#"2026-02-28,acme,"m,1",2,2,130,48,82,1"#));
    }

    #[test]
    fn report_of_contradicting_ledgers_fails() {
        let mut twice = ledger();
        twice.push(scheduled("a-0", 1, [100, 48], "acme", Some(FEBRUARY)));
        let error = report(&twice).expect_err("an attempt that was counted twice is refused").to_string();
        assert!(error.contains("counted 2 times") && error.contains("tandem audit check"), "{error}");
    }

    #[test]
    fn day_of_a_timestamp_is_its_utc_date() {
        for (seconds, expected) in [
            (0, "1970-01-01"),
            (86_399, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (FEBRUARY, "2026-02-28"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(day(seconds), expected, "{seconds}");
        }
    }
}
