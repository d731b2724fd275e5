//! `tandem audit report`: what the ledgers add up to, for invoices.
//!
//! Of each prompt the attempt that won counts, as in an audit: what was computed in vain is nobody's bill. A prompt of which a worker was killed
//! before it had written its line, the count or the outcome, is in no sum; how many there are is told.

use super::{Finding, attempts, winner};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Write as _,
};
use tandem_worker::LedgerLine;

/// How it is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Table,
    /// A list of objects.
    Json,
    /// For spreadsheets.
    Csv,
}

/// Whose, of what, and when.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Key {
    /// Of the prompt's beginning, in UTC; `-` for lines that do not say when.
    day: String,
    /// `-`: nobody said.
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
}

/// The sums of a ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    sums: BTreeMap<Key, Sum>,
    /// Prompts that may have won, or have won with a count that nobody has.
    unsettled: usize,
}

/// Books of which no sum can be taken.
#[derive(Debug, thiserror::Error)]
#[error("{count} lines contradict each other (such as: {first}); `tandem audit check` says more, and no sum is printed")]
pub struct Contradiction {
    count: usize,
    first: Finding,
}

/// Adds up what has won.
pub fn report(ledger: &[LedgerLine]) -> Result<Report, Contradiction> {
    let mut findings = Vec::new();
    let prompts = attempts(ledger, &mut findings);
    let said: HashMap<(&str, u32), &LedgerLine> = ledger
        .iter()
        .filter_map(|line| match line {
            LedgerLine::Scheduled { request_id, attempt, .. } => Some(((request_id.as_str(), *attempt), line)),
            LedgerLine::Ended { .. } => None,
        })
        .collect();
    let mut report = Report::default();
    let mut requests: BTreeMap<Key, BTreeSet<&str>> = BTreeMap::new();
    for (prompt, attempts) in &prompts {
        let mut uncounted = Vec::new();
        let Some(winner) = winner(prompt, attempts, false, &mut uncounted) else {
            report.unsettled += usize::from(!uncounted.is_empty() || attempts.values().any(|attempt| !attempt.ended));
            continue;
        };
        for count in &winner.counts {
            let Some(LedgerLine::Scheduled { at, model, account, .. }) = said.get(&(prompt, count.attempt)) else { continue };
            let named = |name: &str| if name.is_empty() { "-".to_owned() } else { name.to_owned() };
            let day = at.map_or("-".to_owned(), day);
            let key = Key { day, account: named(account), model: named(model) };
            requests.entry(key.clone()).or_default().insert(super::request_of(prompt));
            let sum = report.sums.entry(key).or_default();
            sum.prompts += 1;
            sum.prompt_tokens += count.prompt;
            sum.cached_tokens += count.cached;
            sum.computed_tokens += count.prompt - count.cached;
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

/// The date, of seconds since 1970 (days from civil, by Howard Hinnant).
fn day(unix_seconds: u64) -> String {
    let days = unix_seconds / 86_400 + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

const NAMES: [&str; 8] = ["day", "account", "model", "requests", "prompts", "prompt_tokens", "cached_tokens", "computed_tokens"];

impl Report {
    /// As text.
    pub fn print(&self, format: Format) -> String {
        match format {
            Format::Json => self.json(),
            Format::Csv => self.lines().iter().map(|line| line.each_ref().map(|cell| quoted(cell)).join(",") + "\n").collect(),
            Format::Table => self.table(),
        }
    }

    /// The names first.
    fn lines(&self) -> Vec<[String; 8]> {
        let line = |(key, sum): (&Key, &Sum)| {
            let Key { day, account, model } = key.clone();
            let [requests, prompts, tokens, cached, computed] =
                [sum.requests, sum.prompts, sum.prompt_tokens, sum.cached_tokens, sum.computed_tokens].map(|sum| sum.to_string());
            [day, account, model, requests, prompts, tokens, cached, computed]
        };
        [NAMES.map(str::to_owned)].into_iter().chain(self.sums.iter().map(line)).collect()
    }

    fn json(&self) -> String {
        #[derive(Serialize)]
        struct Line<'a> {
            #[serde(flatten)]
            key: &'a Key,
            #[serde(flatten)]
            sum: &'a Sum,
        }
        let lines: Vec<Line<'_>> = self.sums.iter().map(|(key, sum)| Line { key, sum }).collect();
        serde_json::to_string_pretty(&lines).expect("sums are plain values") + "\n"
    }

    fn table(&self) -> String {
        let lines = self.lines();
        let widths: Vec<usize> =
            (0..NAMES.len()).map(|at| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0)).collect();
        let mut text = String::new();
        for line in &lines {
            let cells = line.iter().zip(&widths).enumerate().map(|(at, (cell, width))| match at {
                0..3 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end()).expect("a string takes all");
        }
        text
    }

    /// What no sum can hold.
    pub fn note(&self) -> Option<String> {
        let note = "prompts are in no sum: a worker was killed before it had written what it counted, or whether they won";
        (self.unsettled > 0).then(|| format!("{} {note}", self.unsettled))
    }
}

/// As RFC 4180 has it.
fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_worker::Outcome;

    /// 2026-02-28 23:59:59 UTC.
    const FEBRUARY: u64 = 1_772_323_199;

    fn scheduled(prompt: &str, attempt: u32, [tokens, cached]: [u32; 2], account: &str, at: Option<u64>) -> LedgerLine {
        LedgerLine::Scheduled {
            request_id: prompt.to_owned(),
            attempt,
            worker: "p0".to_owned(),
            prompt: tokens,
            cached,
            computed: tokens - cached,
            by_tier: [("device".to_owned(), cached)].into(),
            at,
            model: "m,1".to_owned(),
            account: account.to_owned(),
        }
    }

    fn ended(prompt: &str, attempt: u32, outcome: Outcome) -> LedgerLine {
        LedgerLine::Ended { request_id: prompt.to_owned(), attempt, worker: "d0".to_owned(), outcome }
    }

    /// A batch, a retry, one who left, one on the next day, one whose worker was killed.
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
    fn what_has_won_is_summed_by_day_account_and_model() {
        let report = report(&ledger()).expect("nothing contradicts");
        assert_eq!(
            report.print(Format::Csv),
            "day,account,model,requests,prompts,prompt_tokens,cached_tokens,computed_tokens\n\
             -,-,\"m,1\",1,1,5,0,5\n\
             2026-02-28,-,\"m,1\",1,1,100,64,36\n\
             2026-02-28,acme,\"m,1\",1,2,150,48,102\n\
             2026-03-01,acme,\"m,1\",1,1,10,0,10\n"
        );
        let json: serde_json::Value = serde_json::from_str(&report.print(Format::Json)).expect("JSON");
        let expected = serde_json::json!({ "day": "2026-02-28", "account": "acme", "model": "m,1", "requests": 1, "prompts": 2,
            "prompt_tokens": 150, "cached_tokens": 48, "computed_tokens": 102 });
        assert_eq!((&json[2], json.as_array().map(Vec::len)), (&expected, Some(4)));
        let table = report.print(Format::Table);
        assert!(
            table.lines().nth(3).is_some_and(|line| line.split_whitespace().eq([
                "2026-02-28",
                "acme",
                "m,1",
                "1",
                "2",
                "150",
                "48",
                "102"
            ])),
            "{table}"
        );
        let note = |report: &Report| report.note().unwrap_or_default();
        assert!(note(&report).starts_with("1 prompts are in no sum"), "{}", note(&report));
        let mut killed = ledger();
        killed.push(ended("g-0", 1, Outcome::Won));
        let killed = super::report(&killed).expect("a count is missing, and nothing contradicts");
        assert_eq!((&killed.sums, note(&killed).get(..1)), (&report.sums, Some("2")));
        let nothing = super::report(&[]).expect("nothing");
        assert!(nothing.print(Format::Table).starts_with("day") && nothing.note().is_none());
    }

    #[test]
    fn books_that_contradict_themselves_give_no_sum() {
        let mut twice = ledger();
        twice.push(scheduled("a-0", 1, [100, 48], "acme", Some(FEBRUARY)));
        let error = report(&twice).expect_err("counted twice").to_string();
        assert!(error.contains("counted 2 times") && error.contains("tandem audit check"), "{error}");
    }

    #[test]
    fn days_are_those_of_the_calendar() {
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
