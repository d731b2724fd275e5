//! Clients that send one request after another. If a frontend ends, its clients use another frontend.

use crate::{
    requests::{AnswerText, answer_text, request},
    rig::{Outcome, Rig},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tandem_tests::{Client, Endpoint};
use tokio::{task::JoinSet, time::Instant};

const DISTINCT: usize = 60;
/// Each request is sent this many times with the same salt, so that some prompts are cached and some are computed.
const TIMES: usize = 3;
/// The maximum number of requests that a client sends to get one answer.
const REQUESTS_MAX: usize = 6;
/// The pause before each repetition of a request, except the first repetition.
const PAUSE: Duration = Duration::from_millis(200);

pub struct ClientRecord {
    /// The number of the request, from 0 to `DISTINCT - 1`. Requests with the same number differ at most in their salt.
    pub which: usize,
    pub answer_text: Option<AnswerText>,
    pub sent: Instant,
    pub arrivals: Vec<Instant>,
    /// The number of times that the client repeated the request at another frontend.
    pub repeated: usize,
    pub problem: Option<String>,
}

pub struct Load {
    end: Arc<AtomicUsize>,
    pub ended: Arc<AtomicUsize>,
    clients: JoinSet<Vec<ClientRecord>>,
}

fn nth(number: usize, salt: &str) -> serde_json::Value {
    let which = number % DISTINCT;
    request(which, salt, 100 + which * 61 % 500, 40 + which * 37 % 160)
}

pub fn distinct() -> Vec<serde_json::Value> {
    (0..DISTINCT).map(|number| nth(number, "undisturbed")).collect()
}

impl Load {
    /// Starts `clients` clients, distributed over all frontends, which send at most `requests` requests. `salt` must be unique.
    pub fn start(rig: &Rig, clients: usize, requests: usize, salt: &str) -> Self {
        let (next, ended, end) = (Arc::default(), Arc::default(), Arc::new(AtomicUsize::new(requests)));
        let mut running = JoinSet::new();
        for client in 0..clients {
            let mut frontends = rig.clients.clone();
            let others = frontends.len();
            frontends.rotate_left(client % others);
            let (next, ended, end): (Arc<AtomicUsize>, Arc<AtomicUsize>, _) =
                (Arc::clone(&next), Arc::clone(&ended), Arc::clone(&end));
            let salt = salt.to_owned();
            let work = async move {
                let mut records = Vec::new();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= end.load(Ordering::Relaxed) {
                        return records;
                    }
                    records.push(complete(&frontends, number, &salt).await);
                    ended.fetch_add(1, Ordering::Relaxed);
                }
            };
            running.spawn_on(work, rig.plan.runtime.handle());
        }
        Self { end, ended, clients: running }
    }

    pub fn finish(self, rig: &Rig) -> Vec<ClientRecord> {
        self.end.store(0, Ordering::Relaxed);
        self.wait(rig)
    }

    pub fn wait(self, rig: &Rig) -> Vec<ClientRecord> {
        rig.plan.runtime.block_on(self.clients.join_all()).into_iter().flatten().collect()
    }
}

/// Sends request `number`, and repeats it at another frontend if its frontend is down.
async fn complete(frontends: &[Client], number: usize, salt: &str) -> ClientRecord {
    let request = nth(number, &format!("{salt} {}", number / (DISTINCT * TIMES)));
    let sent = Instant::now();
    for repeated in 0.. {
        let outcome = frontends[repeated % frontends.len()].answer(Endpoint::Chat.path(), &request).await;
        if frontend_is_down(&outcome) && repeated + 1 < REQUESTS_MAX {
            tokio::time::sleep(PAUSE * u32::from(repeated > 0)).await;
            continue;
        }
        let answer_text = answer_text(&outcome);
        let problem =
            answer_text.is_none().then(|| format!("request {number} of {salt}, repeated {repeated} times: {outcome:?}"));
        let arrivals = outcome.map(|answer| answer.arrivals).unwrap_or_default();
        return ClientRecord { which: number % DISTINCT, answer_text, sent, arrivals, repeated, problem };
    }
    unreachable!("the last repetition returns")
}

/// Returns whether the frontend has ended or is being replaced: its connection broke or was refused, or it answered that it drains or starts.
/// Clients repeat a request after no other failure.
fn frontend_is_down(outcome: &Outcome) -> bool {
    match outcome {
        Ok(answer) => answer.status == 503 && matches!(answer.last()["error"]["code"].as_str(), Some("draining" | "starting")),
        Err(error) => error.downcast_ref::<reqwest::Error>().is_some(),
    }
}
