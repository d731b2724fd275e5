//! Compares the router's index with SMG's `kv-index`, in one process and in turns (docs/scale.md). With the feature `dynamo`, also with the
//! `RadixTree` of `dynamo-kv-router`, which brings some hundred dependencies.
//!
//! `cargo run --release --manifest-path bench/index/Cargo.toml -- FOLDER` replays the recorded streams in the folder. Without a folder, only
//! the synthetic measurements are made.

#[cfg(feature = "dynamo")]
mod dynamo;
#[path = "../../router/tests/index_streams/stream.rs"]
mod stream;

use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash as PeerHash, StoredBlock};
use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};
use stream::{Expected, Op, Stream};
use tandem_kv::{Change, SequenceHash, StoredChain};
use tandem_router::{PrefixIndex, WorkerSlot};

const STREAMS: [&str; 5] = ["conv_w8_b16", "conv_w64_b16", "conv_w512_b16", "conv_w64_b64", "convdec_w64_b16"];
/// The replays of one stream. The fastest time of each operation counts, because other processes disturb single replays.
const ROUNDS: usize = 4;

trait Index {
    const NAME: &'static str;
    /// What only the thread that applies events has.
    type Writer: Send;
    /// An event, a prompt and an answer in the form that the index takes and returns. Conversions are not timed.
    type Event;
    type Prompt;
    type Answer;
    fn new(workers: u32) -> (Self, Self::Writer)
    where
        Self: Sized;
    fn event(worker: u32, change: &Change) -> Self::Event;
    fn apply(&self, writer: &mut Self::Writer, event: &Self::Event);
    fn prompt(prompt: &[SequenceHash]) -> Self::Prompt;
    fn overlap(&self, prompt: &Self::Prompt, workers: u32) -> Self::Answer;
    /// Returns the number of leading blocks of each worker.
    fn leading(answer: Self::Answer, workers: u32) -> Vec<u32>;
    /// Removes the worker. Returns the duration of the longest step.
    fn remove(&self, writer: &mut Self::Writer, worker: u32) -> Duration;
}

impl Index for PrefixIndex {
    const NAME: &'static str = "tandem";
    type Writer = ();
    type Event = (WorkerSlot, Change);
    type Prompt = Vec<SequenceHash>;
    type Answer = Vec<u32>;

    fn new(workers: u32) -> (Self, ()) {
        let index = PrefixIndex::new(3);
        for worker in 0..workers {
            assert_eq!(index.add_worker(), WorkerSlot(worker));
            index.set_owner(WorkerSlot(worker), 1);
        }
        (index, ())
    }

    fn event(worker: u32, change: &Change) -> Self::Event {
        (WorkerSlot(worker), change.clone())
    }

    fn apply(&self, (): &mut (), (worker, change): &Self::Event) {
        PrefixIndex::apply(self, *worker, change);
    }

    fn prompt(prompt: &[SequenceHash]) -> Self::Prompt {
        prompt.to_vec()
    }

    fn overlap(&self, prompt: &Self::Prompt, _: u32) -> Vec<u32> {
        PrefixIndex::overlap(self, prompt)
    }

    fn leading(answer: Vec<u32>, _: u32) -> Vec<u32> {
        answer
    }

    fn remove(&self, (): &mut (), worker: u32) -> Duration {
        let mut longest = timed(|| self.remove_worker(WorkerSlot(worker)));
        let mut more = true;
        while more {
            longest = longest.max(timed(|| more = self.sweep()));
        }
        longest
    }
}

enum PeerEvent {
    Stored { blocks: Vec<StoredBlock>, parent: Option<PeerHash> },
    Removed(Vec<PeerHash>),
    Cleared,
}

impl Index for ChainIndex {
    const NAME: &'static str = "kv-index";
    type Writer = Vec<ChainBlockMap>;
    type Event = (u32, PeerEvent);
    type Prompt = Vec<SequenceHash>;
    type Answer = Vec<u32>;

    fn new(workers: u32) -> (Self, Self::Writer) {
        let index = ChainIndex::with_max_workers(workers as usize);
        for worker in 0..workers {
            assert_eq!(index.intern_worker(&worker.to_string()).expect("the index has space for the worker"), worker);
        }
        (index, (0..workers).map(|_| ChainBlockMap::new()).collect())
    }

    fn event(worker: u32, change: &Change) -> Self::Event {
        let event = match change {
            Change::Stored(StoredChain { parent, sequence_hashes }) => {
                let block = |hash: &SequenceHash| StoredBlock { seq_hash: PeerHash(hash.0), content_hash: ContentHash(hash.0) };
                PeerEvent::Stored {
                    blocks: sequence_hashes.iter().map(block).collect(),
                    parent: parent.map(|hash| PeerHash(hash.0)),
                }
            }
            Change::Removed(hashes) => PeerEvent::Removed(hashes.iter().map(|hash| PeerHash(hash.0)).collect()),
            Change::Cleared => PeerEvent::Cleared,
        };
        (worker, event)
    }

    fn apply(&self, maps: &mut Self::Writer, (worker, event): &Self::Event) {
        let (worker, map) = (*worker, &mut maps[*worker as usize]);
        match event {
            PeerEvent::Stored { blocks, parent } => {
                self.apply_stored(worker, blocks, *parent, map).expect("the parent is known");
            }
            PeerEvent::Removed(hashes) => {
                self.apply_removed(worker, hashes, map);
            }
            PeerEvent::Cleared => self.apply_cleared(worker, map),
        }
    }

    fn prompt(prompt: &[SequenceHash]) -> Self::Prompt {
        prompt.to_vec()
    }

    fn overlap(&self, prompt: &Self::Prompt, workers: u32) -> Vec<u32> {
        let mut leading = vec![0; workers as usize];
        self.score_into(prompt, |hash| hash.0, false, |worker, blocks| leading[worker as usize] = blocks);
        leading
    }

    fn leading(answer: Vec<u32>, _: u32) -> Vec<u32> {
        answer
    }

    fn remove(&self, maps: &mut Self::Writer, worker: u32) -> Duration {
        let map = std::mem::take(&mut maps[worker as usize]);
        timed(|| self.remove_worker(worker, map))
    }
}

fn timed(action: impl FnOnce()) -> Duration {
    let started = Instant::now();
    action();
    started.elapsed()
}

/// The fastest time of each operation of a stream.
#[derive(Default)]
struct Times {
    queries: Vec<Duration>,
    changes: Vec<Duration>,
}

fn keep_fastest(times: &mut Vec<Duration>, at: usize, time: Duration) {
    match times.get_mut(at) {
        Some(fastest) => *fastest = time.min(*fastest),
        None => times.push(time),
    }
}

fn replay<I: Index>(stream: &Stream, times: &mut Times) {
    let (index, mut writer) = I::new(stream.workers);
    let (mut queries, mut changes) = (0, 0);
    for op in &stream.ops {
        match op {
            Op::Query { prompt, expected } => {
                // The hashes are in the processor's cache, as those of a request that was just received.
                let prompt = I::prompt(prompt);
                let started = Instant::now();
                let answer = index.overlap(&prompt, stream.workers);
                keep_fastest(&mut times.queries, queries, started.elapsed());
                assert_eq!(Expected::of(&I::leading(answer, stream.workers)), *expected, "{}", I::NAME);
                queries += 1;
            }
            Op::Change { worker, change } => {
                let event = I::event(*worker, change);
                keep_fastest(&mut times.changes, changes, timed(|| index.apply(&mut writer, &event)));
                changes += 1;
            }
        }
    }
}

fn blocks(op: &Op) -> usize {
    match op {
        Op::Change { change: Change::Stored(chain), .. } => chain.sequence_hashes.len(),
        Op::Change { change: Change::Removed(hashes), .. } => hashes.len(),
        _ => 0,
    }
}

/// Prints the figures and returns the mean time of a query and the time of the changes.
fn show(name: &str, stream: &Stream, mut times: Times) -> [f64; 2] {
    times.queries.sort();
    let ns = |time: Duration| time.as_nanos();
    let quantile = |per_mille: usize| ns(times.queries[times.queries.len() * per_mille / 1_000]);
    let mean = times.queries.iter().sum::<Duration>().as_nanos() as f64 / times.queries.len() as f64;
    let (changed, all) = (times.changes.iter().sum::<Duration>().as_secs_f64(), stream.ops.iter().map(blocks).sum::<usize>());
    let longest = times.changes.iter().max().expect("the stream has changes").as_secs_f64() * 1e3;
    println!(
        "  {name:9} lookup p50 {:5} p99 {:6} mean {mean:5.0} ns; {:4.1} M blocks/s; longest change {longest:.2} ms",
        quantile(500),
        quantile(990),
        all as f64 / changed / 1e6
    );
    [mean, changed]
}

fn streams(folder: &Path) {
    for name in STREAMS {
        let Some(stream) = Stream::read(folder, name) else {
            println!("{name}: no such stream");
            continue;
        };
        println!("{name}");
        let mut times = [Times::default(), Times::default(), Times::default()];
        for _ in 0..ROUNDS {
            replay::<PrefixIndex>(&stream, &mut times[0]);
            replay::<ChainIndex>(&stream, &mut times[1]);
            #[cfg(feature = "dynamo")]
            replay::<dynamo::Tree>(&stream, &mut times[2]);
        }
        let [own, peer, other] = times;
        let own = show(PrefixIndex::NAME, &stream, own);
        compare(own, show(ChainIndex::NAME, &stream, peer), ChainIndex::NAME);
        #[cfg(feature = "dynamo")]
        compare(own, show(dynamo::Tree::NAME, &stream, other), dynamo::Tree::NAME);
        #[cfg(not(feature = "dynamo"))]
        drop(other);
    }
}

fn compare(own: [f64; 2], peer: [f64; 2], name: &str) {
    println!("  lookups take {:.2} of the time of {name}, changes {:.2}", own[0] / peer[0], own[1] / peer[1]);
}

fn chain(name: u64, len: u64) -> Change {
    let hashes = (0..len).map(|at| SequenceHash(tandem_kv::mix(name << 24 | at)));
    Change::Stored(StoredChain { parent: None, sequence_hashes: hashes.collect() })
}

/// Grows to 10 million blocks of 10 workers, which then leave. Prints the bytes, the longest call and the longest step of a leaving. The
/// fastest of three rounds counts for each call, because other processes disturb single calls.
fn growth<I: Index>() {
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").ok()?.split(' ').nth(1)?.parse::<f64>().ok()?;
        Some(pages * 4096.0)
    };
    let (mut calls, mut leaving, mut bytes) = (Vec::new(), Vec::new(), f64::NAN);
    for round in 0..3 {
        let before = resident();
        let (index, mut writer) = I::new(10);
        for name in 0..20_000 {
            let event = I::event((name % 10) as u32, &chain(name, 500));
            keep_fastest(&mut calls, name as usize, timed(|| index.apply(&mut writer, &event)));
        }
        if let (0, Some((after, before))) = (round, resident().zip(before)) {
            bytes = (after - before) / 1e7;
        }
        (0..10).for_each(|worker| keep_fastest(&mut leaving, worker as usize, index.remove(&mut writer, worker)));
    }
    let longest = |times: &[Duration]| times.iter().max().expect("there are calls").as_secs_f64() * 1e3;
    println!(
        "  {:9} longest call {:.2} ms; {bytes:.0} bytes a block; longest step of the least disturbed leaving {:.2} ms",
        I::NAME,
        longest(&calls),
        leaving.iter().min().expect("ten").as_secs_f64() * 1e3
    );
}

/// One thread stores and evicts, another one looks up, both as fast as they can for a second. Prints both rates.
fn threads<I: Index<Prompt = Vec<SequenceHash>> + Sync>() -> [f64; 2] {
    let ((index, mut writer), stop) = (I::new(64), AtomicBool::new(false));
    for name in 0..2_000 {
        index.apply(&mut writer, &I::event((name % 64) as u32, &chain(name, 500)));
    }
    let prompts: Vec<Vec<SequenceHash>> = (0..2_000).map(|name| hashes_of(&chain(name, 500))).collect();
    std::thread::scope(|scope| {
        let lookups = scope.spawn(|| {
            let mut count = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                let answer = index.overlap(&prompts[(count * 7) as usize % prompts.len()], 64);
                assert!(I::leading(answer, 64).iter().any(|blocks| *blocks == 500));
                count += 1;
            }
            count
        });
        let (started, mut applied) = (Instant::now(), 0);
        for name in 10_000.. {
            let (change, worker) = (chain(name, 500), (name % 64) as u32);
            index.apply(&mut writer, &I::event(worker, &change));
            index.apply(&mut writer, &I::event(worker, &Change::Removed(hashes_of(&change).into_iter().rev().collect())));
            applied += 1_000;
            if started.elapsed() > Duration::from_secs(1) {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        [lookups.join().expect("the lookups are right") as f64 / 1e6, f64::from(applied) / 1e6]
    })
}

fn hashes_of(change: &Change) -> Vec<SequenceHash> {
    match change {
        Change::Stored(chain) => chain.sequence_hashes.clone(),
        Change::Removed(_) | Change::Cleared => Vec::new(),
    }
}

fn main() {
    println!("10 workers of a million blocks each, in prompts of 500 blocks");
    growth::<PrefixIndex>();
    growth::<ChainIndex>();
    #[cfg(feature = "dynamo")]
    growth::<dynamo::Tree>();
    println!("one thread applies events, one looks up: M lookups/s and M blocks/s, best of {ROUNDS}");
    let best =
        |rates: Vec<[f64; 2]>| rates.into_iter().fold([0.0_f64; 2], |best, [one, other]| [best[0].max(one), best[1].max(other)]);
    let (own, peer) = (0..ROUNDS).map(|_| (threads::<PrefixIndex>(), threads::<ChainIndex>())).unzip();
    println!("  {:9} {:.2?}\n  {:9} {:.2?}", PrefixIndex::NAME, best(own), ChainIndex::NAME, best(peer));
    if let Some(folder) = std::env::args().nth(1) {
        streams(Path::new(&folder));
    }
}
