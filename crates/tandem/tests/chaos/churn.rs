//! Sends thousands of requests while workers are killed repeatedly. The clients of a fifth of the requests disconnect.

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

/// The number of different requests. Each is sent many times, so that its prompt is in the cache after the first time.
const DISTINCT: usize = 100;
/// The workers that are killed one after another. `p0` and `d0` keep running, so that their memory can be measured.
const VICTIMS: [&str; 4] = ["d1", "p1", "d2", "p2"];

struct Scale {
    requests: usize,
    /// After this number of requests, memory must not grow any more.
    warm: usize,
    clients: usize,
    kill_every: Duration,
    speedup: &'static str,
    gap_max: Duration,
}

const SHORT: Scale = Scale {
    requests: 1_000,
    warm: 300,
    clients: 50,
    kill_every: Duration::from_millis(1_500),
    speedup: "1",
    gap_max: Duration::from_secs(1),
};
const LONG: Scale = Scale {
    requests: 5_000,
    warm: 1_000,
    clients: 100,
    kill_every: Duration::from_secs(5),
    speedup: "0.8",
    gap_max: Duration::from_secs(1),
};

fn nth(number: usize) -> (serde_json::Value, bool) {
    let which = number % DISTINCT;
    (request(which, "churn", 100 + which * 61 % 500, 40 + which * 37 % 160), number % 5 != 3)
}

struct ClientRecord {
    which: usize,
    answer_text: Option<AnswerText>,
    sent: Instant,
    arrivals: Vec<Instant>,
}

/// Sends a request. The client reads the whole answer, or disconnects before the first token or after some chunks. Returns `None` if the client
/// disconnected.
async fn complete(client: Client, number: usize) -> Option<ClientRecord> {
    let (request, reads_answer) = nth(number);
    let (path, sent) = (Endpoint::Chat.path(), Instant::now());
    if reads_answer {
        let outcome = client.answer(path, &request).await;
        let answer_text = answer_text(&outcome);
        return Some(ClientRecord {
            which: number % DISTINCT,
            answer_text,
            sent,
            arrivals: outcome.map(|answer| answer.arrivals).unwrap_or_default(),
        });
    }
    if number.is_multiple_of(2) {
        let disconnect_after = Duration::from_millis((number * 7 % 60) as u64);
        let _ = tokio::time::timeout(disconnect_after, client.send(path, &request)).await;
    } else if let Ok(mut response) = client.send(path, &request).await {
        for _ in 0..number % 40 {
            let _ = response.chunk().await;
        }
    }
    None
}

pub fn run(form: Form) -> (Row, Memory) {
    let scale = if form == Form::Short { SHORT } else { LONG };
    let args = ["--sim-speedup", scale.speedup, "--kv-capacity-tokens", "32768"].map(str::to_owned).to_vec();
    let mut rig = Rig::start(&Shape { prefill_workers: 3, decode_workers: 3, args, ..Shape::default() });
    // Killing all other workers gives `d0` and `p0` their highest load before memory is measured.
    VICTIMS.iter().for_each(|victim| rig.kill(victim));
    rig.plan.joined(&["d0", "p0"]);
    let expected = undisturbed(&rig.outcomes(rig.send_all(&(0..DISTINCT).map(|number| nth(number).0).collect::<Vec<_>>())));
    VICTIMS.iter().for_each(|victim| rig.restart(victim));
    rig.wait_until_connected();

    let (next, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut clients = JoinSet::new();
    for _ in 0..scale.clients {
        let (client, next, ended) = (rig.clients[0].clone(), next.clone(), ended.clone());
        let running = async move {
            let mut records = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= scale.requests {
                    return records;
                }
                records.extend(complete(client.clone(), number).await);
                ended.fetch_add(1, Ordering::Relaxed);
            }
        };
        clients.spawn_on(running, rig.plan.runtime.handle());
    }
    let (mut kills, mut warm) = (Vec::new(), BTreeMap::new());
    let mut due = Instant::now() + scale.kill_every;
    let mut memory = rig.memory();
    while ended.load(Ordering::Relaxed) < scale.requests {
        if warm.is_empty() && ended.load(Ordering::Relaxed) >= scale.warm {
            warm = rig.memory();
        }
        if Instant::now() >= due {
            let victim = VICTIMS[kills.len() % VICTIMS.len()];
            rig.kill(victim);
            kills.push(Instant::now());
            // The other workers serve all requests during this pause.
            std::thread::sleep(scale.kill_every / 5);
            rig.restart(victim);
            due += scale.kill_every;
        }
        std::thread::sleep(Duration::from_millis(10));
        memory = rig.memory();
    }
    let records: Vec<ClientRecord> = rig.plan.runtime.block_on(clients.join_all()).into_iter().flatten().collect();
    let last_restart = Instant::now();
    rig.wait_until_connected();
    let reconnected = last_restart.elapsed();
    let audit = rig.reconcile();
    assert!(kills.len() >= VICTIMS.len(), "the run ended after {} kills", kills.len());
    let was_never_killed = |name: &&String| !VICTIMS.contains(&name.as_str());
    let resident = warm.keys().filter(was_never_killed).map(|name| (name.clone(), [warm[name], memory[name]])).collect();
    let wrong =
        |record: &&ClientRecord| record.answer_text.as_ref().is_some_and(|answer_text| *answer_text != expected[record.which]);
    let recoveries = records
        .iter()
        .flat_map(|record| kills.iter().filter_map(|killed_at| recovery(record.sent, &record.arrivals, *killed_at)));
    let row = Row {
        fault: format!("{} kills, one every {:?}; 20 % of the clients leave", kills.len(), scale.kill_every),
        requests: scale.requests,
        failed: records.iter().filter(|record| record.answer_text.is_none()).count(),
        repeated: 0,
        resumed: rig.resumed(),
        retried: rig.retried(),
        wrong_texts: records.iter().filter(wrong).count(),
        wrong_counts: audit.findings,
        unverified: audit.unverified,
        leaked_blocks: audit.leaked_blocks,
        largest_gap: records.iter().map(|records| largest_gap(&records.arrivals)).max().unwrap_or_default(),
        gap_max: scale.gap_max,
        recovery: recoveries.max().unwrap_or_default(),
        reconnected,
        had_effect: rig.resumed() + rig.retried() > 0,
    };
    (row, Memory { at: [scale.warm, scale.requests], resident })
}
