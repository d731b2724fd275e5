//! A router's view of its workers as a table. This module does no I/O.

use crate::text_table::{counted, text_table_with_gap};
use clap::ValueEnum;
use std::{cmp::Ordering, collections::HashMap, fmt::Write as _, time::Duration};
use tandem_proto::v1::{StepTotals, TierView, UnavailableWorker, WorkerView, WorkersReply};

/// The column by which the rows are sorted, and whether the order is descending.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SortOrder {
    pub by: Column,
    pub reverse: bool,
}

/// The columns, from left to right: texts first, which are aligned to the left, then numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Column {
    /// Worker id
    #[default]
    Worker,
    /// Prefill or decode, and of which model if there are several
    Role,
    /// Whether the router places requests on the worker
    Health,
    /// Requests that the router has placed on the worker and that have not ended
    Placed,
    /// Running sequences
    Running,
    /// Queued requests
    Queued,
    /// Share of prompt tokens found in the cache since the worker's start
    HitRate,
    /// Cached tokens that routers predicted: the tokens found, corrected by this router's prediction errors
    PredictedTokens,
    /// Cached tokens that were found
    CachedTokens,
    /// Free blocks
    FreeBlocks,
    /// Cached blocks
    CachedBlocks,
    /// Blocks in use
    UsedBlocks,
    /// Prompt tokens computed per second
    PrefillRate,
    /// Tokens generated per second
    DecodeRate,
}

impl Column {
    pub(super) fn all() -> &'static [Self] {
        Self::value_variants()
    }

    /// Returns the two lines of the column's head; the second line of a text column is empty.
    pub(super) fn head(self) -> [&'static str; 2] {
        match self {
            Self::Worker => ["worker", ""],
            Self::Role => ["role", ""],
            Self::Health => ["health", ""],
            Self::Placed => ["placed", "requests"],
            Self::Running => ["running", "sequences"],
            Self::Queued => ["queued", "requests"],
            Self::HitRate => ["hit", "rate"],
            Self::PredictedTokens => ["predicted", "tokens"],
            Self::CachedTokens => ["cached", "tokens"],
            Self::FreeBlocks => ["free", "blocks"],
            Self::CachedBlocks => ["cached", "blocks"],
            Self::UsedBlocks => ["used", "blocks"],
            Self::PrefillRate => ["prefill", "tokens/s"],
            Self::DecodeRate => ["decode", "tokens/s"],
        }
    }

    /// The columns that a narrow terminal leaves out, the first one first.
    pub(super) const LEAST_IMPORTANT: [Self; 11] = [
        Self::PredictedTokens,
        Self::CachedTokens,
        Self::FreeBlocks,
        Self::CachedBlocks,
        Self::Placed,
        Self::UsedBlocks,
        Self::Role,
        Self::Running,
        Self::PrefillRate,
        Self::DecodeRate,
        Self::Queued,
    ];

    pub(super) fn is_text(self) -> bool {
        matches!(self, Self::Worker | Self::Role | Self::Health)
    }

    /// Returns the column that is `steps` to the right. The first column follows the last one.
    pub(super) fn step(self, steps: isize) -> Self {
        let at = (self as usize).wrapping_add_signed(steps + Self::all().len() as isize);
        Self::all()[at % Self::all().len()]
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Text(String),
    Count(f64),
    /// The cell holds a share from 0 to 1.
    Share(f64),
    /// The value is unknown, or has no meaning for the worker.
    Nothing,
}

impl Cell {
    fn rank(&self) -> f64 {
        match self {
            Self::Count(value) | Self::Share(value) => *value,
            Self::Text(_) | Self::Nothing => -1.0,
        }
    }

    fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Text(one), Self::Text(other)) => one.cmp(other),
            (one, other) => one.rank().total_cmp(&other.rank()),
        }
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Count(count) if *count >= 999_950.0 => write!(f, "{:.1}M", count / 1e6),
            Self::Count(count) if *count >= 99_950.0 => write!(f, "{:.0}k", count / 1e3),
            Self::Count(count) if *count >= 9_999.5 => write!(f, "{:.1}k", count / 1e3),
            Self::Count(count) => write!(f, "{count:.0}"),
            Self::Share(share) => write!(f, "{:.1}%", share * 100.0),
            Self::Nothing => f.write_str("-"),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct TextTable {
    pub(super) title: String,
    pub(super) rows: Vec<Vec<Cell>>,
    pub(super) notes: Vec<String>,
}

impl TextTable {
    /// Builds the table of `now`, with rates over the time `elapsed` since `before`.
    pub(super) fn new(now: &WorkersReply, before: &WorkersReply, elapsed: Duration) -> Self {
        let instance = |worker: &WorkerView| worker.info.as_ref().map(|info| info.instance_id.clone());
        let earlier: HashMap<_, _> = before.workers.iter().filter_map(|worker| Some((instance(worker)?, worker))).collect();
        let rows = now.workers.iter().map(|worker| {
            let before = instance(worker).and_then(|instance| earlier.get(&instance).copied());
            let mut row = row(worker, before.and_then(|worker| worker.load.as_ref()?.steps), elapsed.as_secs_f64());
            if let (Some(info), true) = (&worker.info, now.models.len() > 1) {
                let loras = if info.loras.is_empty() { String::new() } else { format!(" and {} LoRAs", info.loras.len()) };
                row[Column::Role as usize] = Cell::Text(format!("{} of {}{loras}", info.role().name(), info.model));
            }
            row
        });
        let absent = now.unavailable.iter().map(|absent| {
            let mut row = vec![Cell::Nothing; Column::all().len()];
            row[Column::Worker as usize] = Cell::Text(name(absent).to_owned());
            row[Column::Role as usize] = Cell::Text("?".to_owned());
            row[Column::Health as usize] =
                Cell::Text(if absent.incompatible { "incompatible" } else { "unreachable" }.to_owned());
            row
        });
        let identity = now.identity.clone().unwrap_or_default();
        let models: Vec<&str> = now.models.iter().filter_map(|model| Some(&*model.identity.as_ref()?.model)).collect();
        let models = if models.is_empty() { "nothing yet".to_owned() } else { models.join(", ") };
        let mut title = format!("{} serves {models}", identity.cluster);
        let requests = counted(now.bookings, "request");
        write!(title, ": {} of {} workers, {requests} running", now.workers.len(), now.known_workers)
            .expect("writing to a string does not fail");
        if now.peers > 0 {
            write!(title, ", {} by {}", now.peer_bookings, counted(now.peers, "other router"))
                .expect("writing to a string does not fail");
        }
        let reasons = now.unavailable.iter().map(|absent| match &*absent.worker_id {
            "" => format!("{}: {}", absent.address, absent.reason),
            id => format!("{id} at {}: {}", absent.address, absent.reason),
        });
        let notes = now.unavailable_reason.iter().cloned().chain(reasons).chain(now.workers.iter().flat_map(notes)).collect();
        Self { title, rows: rows.chain(absent).collect(), notes }
    }

    /// Sorts the rows. Rows with equal values are ordered by worker id.
    pub(super) fn sort(&mut self, SortOrder { by, reverse }: SortOrder) {
        self.rows.sort_by(|one, other| one[Column::Worker as usize].order(&other[Column::Worker as usize]));
        self.rows.sort_by(|one, other| {
            let order = one[by as usize].order(&other[by as usize]);
            if reverse { order.reverse() } else { order }
        });
    }

    /// Formats the table as text of at most `width` columns, for scripts and reports, with the columns that fit.
    pub(super) fn plain(&self, width: usize, by: Column) -> String {
        let (columns, table) = self.fitted(width, by);
        let hidden: Vec<String> =
            Column::all().iter().filter(|column| !columns.contains(column)).map(|column| column.head().join(" ")).collect();
        let heads = columns.iter().map(|column| column.head().join("\n")).collect();
        let rows = table.rows.iter().map(|row| columns.iter().map(|&column| row[column as usize].to_string()).collect());
        let left = columns.iter().filter(|column| column.is_text()).count();
        let table = text_table_with_gap(std::iter::once(heads).chain(rows), left, 1);
        let hidden = (!hidden.is_empty()).then(|| format!("hidden columns: {}", hidden.join(", ")));
        let notes = self.notes.iter().cloned().chain(hidden).flat_map(|note| wrapped(&note, width));
        let notes: String = notes.map(|line| format!("{line}\n")).collect();
        let gap = if notes.is_empty() { "" } else { "\n" };
        format!("{}\n\n{table}{gap}{notes}", wrapped(&self.title, width).join("\n"))
    }

    /// Returns the columns that fit into this width with a space between them, and the table, in which the beginnings of long names are left
    /// out if these columns do not fit either. The sort column `by` is always returned.
    pub(super) fn fitted(&self, width: usize, by: Column) -> (Vec<Column>, Self) {
        let (mut table, mut columns) = (self.clone(), Column::all().to_vec());
        let needed = |columns: &[Column]| columns.iter().map(|&column| self.width(column, by) + 1).sum::<usize>();
        for least in Column::LEAST_IMPORTANT.into_iter().filter(|column| *column != by) {
            if needed(&columns) <= width + 1 {
                break;
            }
            columns.retain(|column| *column != least);
        }
        let name_len_max = (self.width(Column::Worker, by) + width + 1).saturating_sub(needed(&columns));
        // Shorter names would not make the column narrower than its head.
        let name_len_max = name_len_max.max(Column::Worker.head()[0].len());
        for name in table.rows.iter_mut().map(|row| &mut row[Column::Worker as usize]) {
            let text = name.to_string();
            let excess = text.chars().count().saturating_sub(name_len_max);
            if excess > 0 {
                *name = Cell::Text(std::iter::once('…').chain(text.chars().skip(excess + 1)).collect());
            }
        }
        (columns, table)
    }

    /// Returns the width of a column. The head of the sort column `by` has an arrow.
    pub(super) fn width(&self, column: Column, by: Column) -> usize {
        let longest = self.rows.iter().map(|row| row[column as usize].to_string().chars().count()).max().unwrap_or(0);
        let [upper, lower] = column.head();
        longest.max(upper.len() + usize::from(column == by)).max(lower.len())
    }
}

/// Breaks a text at spaces into lines of at most `width` characters. A longer word is a line of its own.
pub(super) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is a line");
        if !last.is_empty() && last.chars().count() + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else {
            last.push_str(if last.is_empty() { "" } else { " " });
            last.push_str(word);
        }
    }
    lines
}

/// Returns the id that a worker had as a member, or else its address.
fn name(absent: &UnavailableWorker) -> &str {
    if absent.worker_id.is_empty() { &absent.address } else { &absent.worker_id }
}

fn row(worker: &WorkerView, before: Option<StepTotals>, seconds: f64) -> Vec<Cell> {
    let (info, load) = (worker.info.clone().unwrap_or_default(), worker.load.clone().unwrap_or_default());
    let placed = worker.placements.unwrap_or_default();
    let rate = |total: fn(&StepTotals) -> u64| match (&load.steps, &before) {
        (Some(now), Some(before)) if seconds > 0.0 => Cell::Count(total(now).saturating_sub(total(before)) as f64 / seconds),
        _ => Cell::Nothing,
    };
    let (hits, real, predicted) = match load.cache {
        Some(cache) if cache.prompt_tokens > 0 => {
            let predicted = (cache.cached_tokens + placed.overlap_over_tokens).saturating_sub(placed.overlap_under_tokens);
            let share = cache.cached_tokens as f64 / cache.prompt_tokens as f64;
            (Cell::Share(share), Cell::Count(cache.cached_tokens as f64), Cell::Count(predicted as f64))
        }
        _ => (Cell::Nothing, Cell::Nothing, Cell::Nothing),
    };
    Column::all()
        .iter()
        .map(|column| match column {
            Column::Worker => Cell::Text(info.worker_id.clone()),
            Column::Role => Cell::Text(info.role().name().to_owned()),
            Column::Health => Cell::Text(health(worker).to_owned()),
            Column::Placed => Cell::Count(worker.bookings.into()),
            Column::Running => Cell::Count(load.running_sequences.into()),
            Column::Queued => Cell::Count(load.waiting_requests.into()),
            Column::HitRate => hits.clone(),
            Column::PredictedTokens => predicted.clone(),
            Column::CachedTokens => real.clone(),
            Column::FreeBlocks => Cell::Count(load.free_blocks.into()),
            Column::CachedBlocks => Cell::Count(load.cached_blocks.into()),
            Column::UsedBlocks => Cell::Count(load.in_use_blocks.into()),
            Column::PrefillRate => rate(|steps| steps.prefilled_tokens),
            Column::DecodeRate => rate(|steps| steps.generated_tokens),
        })
        .collect()
}

/// Returns notes for the operator about a worker: the reason why it is unpaired, how its index is corrected, that its index is approximate, and its
/// tiers.
fn notes(worker: &WorkerView) -> Vec<String> {
    let Some(info) = &worker.info else { return Vec::new() };
    let assumed = "the router assumes its cache from the prompts routed to it, because its engine publishes no KV events";
    let approximate = info.approximate_index.then(|| assumed.to_owned());
    let notes = worker.unpaired_reason.iter().chain(&worker.index_note).cloned().chain(approximate).chain(tiers(&worker.tiers));
    notes.map(|note| format!("{}: {note}", info.worker_id)).collect()
}

/// Returns the number of blocks in each tier, and what loading them takes; `None` if there are none outside of the device.
fn tiers(tiers: &[TierView]) -> Option<String> {
    let text = |TierView { tier, blocks, load_ms_per_token }: &TierView| {
        let load = load_ms_per_token.map(|ms| format!(" ({ms:.3} ms to load a token)"));
        format!("{tier} {blocks}{}", load.unwrap_or_default())
    };
    (!tiers.is_empty()).then(|| format!("blocks by tier: {}", tiers.iter().map(text).collect::<Vec<_>>().join(", ")))
}

fn health(worker: &WorkerView) -> &'static str {
    match worker {
        WorkerView { circuit_open: true, .. } => "circuit_open",
        WorkerView { unpaired_reason: Some(_), .. } => "unpaired",
        _ => "healthy",
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use tandem_proto::v1::{CacheTotals, Identity, Load, ModelView, PlacementTotals, WorkerInfo, worker_info::Role};

    fn model(model: &str) -> ModelView {
        ModelView { identity: Some(Identity { model: model.to_owned(), ..Default::default() }), ..Default::default() }
    }

    /// Returns a router's view after `later` seconds: a prefill worker with many cache hits, a decode worker with an open circuit breaker,
    /// and an incompatible worker.
    pub(crate) fn cluster(later: u64) -> WorkersReply {
        let worker = |role: Role, worker_id: &str, running, circuit_open, cache, steps| WorkerView {
            info: Some(WorkerInfo {
                role: role.into(),
                worker_id: worker_id.to_owned(),
                instance_id: format!("{worker_id}'s"),
                ..Default::default()
            }),
            bookings: 3,
            load: Some(Load {
                running_sequences: running,
                free_blocks: 10,
                cached_blocks: 20,
                in_use_blocks: 2,
                waiting_requests: 1,
                cache: Some(cache),
                steps: Some(steps),
                ..Default::default()
            }),
            placements: Some(PlacementTotals { overlap_over_tokens: 100, overlap_under_tokens: 300, ..Default::default() }),
            circuit_open,
            ..Default::default()
        };

        let found = CacheTotals { prompt_tokens: 20_000, cached_tokens: 17_500, ..Default::default() };
        let prefilling = StepTotals { prefilled_tokens: 125 + later * 300, ..Default::default() };
        let generating = StepTotals { generated_tokens: 7 + later * 50, ..Default::default() };
        WorkersReply {
            workers: vec![
                worker(Role::Prefill, "p0", 4, false, found, prefilling),
                worker(Role::Decode, "d0", 9, true, CacheTotals::default(), generating),
            ],
            bookings: 6,
            identity: Some(Identity { cluster: "blue".to_owned(), ..Default::default() }),
            models: vec![model("m")],
            unavailable: vec![UnavailableWorker {
                address: "h:7100".to_owned(),
                reason: "another model".to_owned(),
                incompatible: true,
                ..Default::default()
            }],
            known_workers: 3,
            ..Default::default()
        }
    }

    pub(crate) fn table() -> TextTable {
        TextTable::new(&cluster(2), &cluster(0), Duration::from_secs(2))
    }

    #[test]
    fn plain_table_has_a_row_per_worker_with_rates() {
        let plain = table().plain(140, Column::Worker);
        let lines: Vec<Vec<&str>> = plain.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(plain.lines().next(), Some("blue serves m: 2 of 3 workers, 6 requests running"));
        let p0 = ["p0", "prefill", "healthy", "3", "4", "1", "87.5%", "17.3k", "17.5k", "10", "20", "2", "300", "0"];
        let d0 = ["d0", "decode", "circuit_open", "3", "9", "1", "-", "-", "-", "10", "20", "2", "0", "50"];
        assert_eq!(lines[4..6], [p0, d0]);
        assert_eq!(lines[6][..3], ["h:7100", "?", "incompatible"]);
        assert_eq!(plain.lines().last(), Some("h:7100: another model"));
        let starts: Vec<usize> =
            plain.lines().skip(4).take(3).filter_map(|line| line.find(" healthy").or(line.find(" circuit_open"))).collect();
        assert!(starts.windows(2).all(|pair| pair[0] == pair[1]), "columns are not aligned:\n{plain}");
    }

    #[test]
    fn plain_table_fits_into_its_width_and_says_what_it_lacks() {
        for width in [40, 80, 110, 120, 130] {
            let plain = table().plain(width, Column::Worker);
            let widest = plain.lines().map(|line| line.chars().count()).max().unwrap_or_default();
            assert!(widest <= width, "{widest} columns instead of {width}:\n{plain}");
            assert_eq!(plain.contains("\nhidden columns: "), width < 120, "{width}:\n{plain}");
        }
    }

    #[test]
    fn long_names_are_shortened_where_no_column_can_be_left_out() {
        let mut cluster = cluster(2);
        cluster.workers[0].info.as_mut().expect("it is set").worker_id = "prefill-worker-of-a-long-name-17".to_owned();
        let table = TextTable::new(&cluster, &cluster, Duration::from_secs(2));
        let plain = table.plain(40, Column::Worker);
        assert!(plain.contains("\n…er-of-a-long-name-17 healthy") && plain.contains("87.5%"), "{plain}");
        assert!(plain.lines().all(|line| line.chars().count() <= 40), "{plain}");
    }

    #[test]
    fn lost_worker_keeps_its_name() {
        let mut now = cluster(2);
        now.unavailable[0].worker_id = "one".to_owned();
        let table = TextTable::new(&now, &cluster(0), Duration::from_secs(2));
        assert_eq!(table.rows[2][Column::Worker as usize], Cell::Text("one".to_owned()));
        assert_eq!(table.notes, ["one at h:7100: another model"]);
    }

    #[test]
    fn notes_explain_unpaired_workers_and_approximate_indexes() {
        let mut now = cluster(2);
        now.workers[1].info.as_mut().expect("it is set").approximate_index = true;
        now.workers[0].unpaired_reason = Some("it has another family".to_owned());
        let table = TextTable::new(&now, &cluster(0), Duration::from_secs(2));
        let found = &table.notes[table.notes.len() - 2..];
        assert_eq!(found[0], "p0: it has another family");
        assert!(found[1].starts_with("d0: the router assumes its cache"), "{found:?}");
        assert_eq!(table.rows[0][Column::Health as usize], Cell::Text("unpaired".to_owned()));
    }

    #[test]
    fn table_names_the_models_of_workers_if_there_are_several() {
        let mut now = cluster(2);
        now.models.push(model("n"));
        now.workers[0].info.as_mut().expect("it is set").model = "n".to_owned();
        let table = TextTable::new(&now, &cluster(0), Duration::from_secs(2));
        assert!(table.title.starts_with("blue serves m, n: "), "{}", table.title);
        assert_eq!(table.rows[0][Column::Role as usize], Cell::Text("prefill of n".to_owned()));
    }

    #[test]
    fn restarted_worker_has_no_rate_yet() {
        let mut before = cluster(0);
        before.workers[0].info.as_mut().expect("the view has the worker's info").instance_id = "another".to_owned();
        let table = TextTable::new(&cluster(2), &before, Duration::from_secs(2));
        assert_eq!(table.rows[0][Column::PrefillRate as usize], Cell::Nothing);
        assert_eq!(table.rows[1][Column::DecodeRate as usize], Cell::Count(50.0));
    }

    #[test]
    fn rows_are_sorted_by_column_and_direction() {
        let order = |by, reverse| {
            let mut table = table();
            table.sort(SortOrder { by, reverse });
            table.rows.iter().map(|row| row[0].to_string()).collect::<Vec<_>>()
        };
        assert_eq!(order(Column::Worker, false), ["d0", "h:7100", "p0"]);
        assert_eq!(order(Column::Running, true), ["d0", "p0", "h:7100"]);
        assert_eq!(order(Column::HitRate, true), ["p0", "d0", "h:7100"]);
        assert_eq!(order(Column::FreeBlocks, true), ["d0", "p0", "h:7100"], "workers with equal values are sorted by name");
        let all = Column::all().iter().copied().fold(Column::Worker, |column, _| column.step(1));
        assert_eq!((all, Column::Worker.step(-1)), (Column::Worker, Column::DecodeRate));
        assert!(Column::all().iter().copied().enumerate().all(|(at, column)| column as usize == at));
    }
}
