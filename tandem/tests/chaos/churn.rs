//! Thousands of requests while workers die all the time and a fifth of the clients leaves.

use crate::{
    requests::{AnswerText, answer_text, largest_gap, recovery, request, undisturbed},
    rig::{Rig, Shape},
    table::{Form, Memory, Row},
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tandem_tests::{Client, Endpoint};
use tokio::{task::JoinSet, time::Instant};

/// What differs from request to request: prompts, lengths, sampling. Each comes many times, so that caches matter.
const DISTINCT: usize = 100;
/// The workers that are killed in turn; `p0` and `d0` keep running, so that their memory can be measured.
const VICTIMS: [&str; 4] = ["d1", "p1", "d2", "p2"];

struct Scale {
    requests: usize,
    /// From here on memory must not grow.
    warm: usize,
    at_once: usize,
    kill_every: Duration,
    speedup: &'static str,
    gap_max: Duration,
}

const SHORT: Scale = Scale {
    requests: 1_000,
    warm: 300,
    at_once: 50,
    kill_every: Duration::from_millis(1_500),
    speedup: "1",
    gap_max: Duration::from_secs(1),
};
const LONG: Scale = Scale {
    requests: 5_000,
    warm: 1_000,
    at_once: 100,
    kill_every: Duration::from_secs(5),
    speedup: "0.8",
    gap_max: Duration::from_secs(1),
};

/// A request of the run, and whether its client stays.
fn nth(number: usize) -> (serde_json::Value, bool) {
    let which = number % DISTINCT;
    (request(which, "churn", 100 + which * 61 % 500, 40 + which * 37 % 160), number % 5 != 3)
}

/// What one client has seen of an answer it waited for.
struct Seen {
    which: usize,
    answer_text: Option<AnswerText>,
    asked: Instant,
    arrivals: Vec<Instant>,
}

/// Reads to the end, or goes away: before the first token, or after some pieces.
async fn ask(client: Client, number: usize) -> Option<Seen> {
    let (request, stays) = nth(number);
    let (path, asked) = (Endpoint::Chat.path(), Instant::now());
    if stays {
        let outcome = client.ask(path, &request).await;
        let answer_text = answer_text(&outcome);
        return Some(Seen {
            which: number % DISTINCT,
            answer_text,
            asked,
            arrivals: outcome.map(|answer| answer.arrivals).unwrap_or_default(),
        });
    }
    if number.is_multiple_of(2) {
        let patience = Duration::from_millis((number * 7 % 60) as u64);
        let _ = tokio::time::timeout(patience, client.send(path, &request)).await;
    } else if let Ok(mut response) = client.send(path, &request).await {
        for _ in 0..number % 40 {
            let _ = response.chunk().await;
        }
    }
    None
}

pub fn play(form: Form) -> (Row, Memory) {
    let scale = if form == Form::Short { SHORT } else { LONG };
    let args = ["--sim-speedup", scale.speedup, "--kv-capacity-tokens", "32768"].map(str::to_owned).to_vec();
    let mut rig = Rig::start(&Shape { prefill_workers: 3, decode_workers: 3, args, ..Shape::default() });
    // Alone, the remaining workers reach their highest load.
    VICTIMS.iter().for_each(|victim| rig.kill(victim));
    rig.plan.joined(&["d0", "p0"]);
    let expected = undisturbed(&rig.outcomes(rig.ask(&(0..DISTINCT).map(|number| nth(number).0).collect::<Vec<_>>())));
    VICTIMS.iter().for_each(|victim| rig.restart(victim));
    rig.whole();

    let (next, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut clients = JoinSet::new();
    for _ in 0..scale.at_once {
        let (client, next, ended) = (rig.clients[0].clone(), next.clone(), ended.clone());
        let asking = async move {
            let mut seen = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= scale.requests {
                    return seen;
                }
                seen.extend(ask(client.clone(), number).await);
                ended.fetch_add(1, Ordering::Relaxed);
            }
        };
        clients.spawn_on(asking, rig.plan.runtime.handle());
    }
    let (mut strikes, mut warm) = (Vec::new(), BTreeMap::new());
    let mut due = Instant::now() + scale.kill_every;
    let mut memory = rig.memory();
    while ended.load(Ordering::Relaxed) < scale.requests {
        if warm.is_empty() && ended.load(Ordering::Relaxed) >= scale.warm {
            warm = rig.memory();
        }
        if Instant::now() >= due {
            let victim = VICTIMS[strikes.len() % VICTIMS.len()];
            rig.kill(victim);
            strikes.push(Instant::now());
            // The others have all to do for a while.
            std::thread::sleep(scale.kill_every / 5);
            rig.restart(victim);
            due += scale.kill_every;
        }
        std::thread::sleep(Duration::from_millis(10));
        memory = rig.memory();
    }
    let seen: Vec<Seen> = rig.plan.runtime.block_on(clients.join_all()).into_iter().flatten().collect();
    let healed = Instant::now();
    rig.whole();
    let whole = healed.elapsed();
    let books = rig.close();
    assert!(strikes.len() >= VICTIMS.len(), "it ended after {} kills", strikes.len());
    let lived = |name: &&String| !VICTIMS.contains(&name.as_str());
    let resident = warm.keys().filter(lived).map(|name| (name.clone(), [warm[name], memory[name]])).collect();
    let wrong = |seen: &&Seen| seen.answer_text.as_ref().is_some_and(|answer_text| *answer_text != expected[seen.which]);
    let recoveries =
        seen.iter().flat_map(|seen| strikes.iter().filter_map(|struck| recovery(seen.asked, &seen.arrivals, *struck)));
    let row = Row {
        fault: format!("{} kills, one every {:?}; 20 % of the clients leave", strikes.len(), scale.kill_every),
        requests: scale.requests,
        failed: seen.iter().filter(|seen| seen.answer_text.is_none()).count(),
        asked_again: 0,
        resumed: rig.resumed(),
        retried: rig.retried(),
        wrong_texts: seen.iter().filter(wrong).count(),
        wrong_counts: books.wrong,
        unverified: books.unverified,
        leaked_blocks: books.leaked_blocks,
        largest_gap: seen.iter().map(|seen| largest_gap(&seen.arrivals)).max().unwrap_or_default(),
        gap_max: scale.gap_max,
        recovery: recoveries.max().unwrap_or_default(),
        whole,
        felt: rig.resumed() + rig.retried() > 0,
    };
    (row, Memory { at: [scale.warm, scale.requests], resident })
}
