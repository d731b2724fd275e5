//! Clients that send one request after the other. If a frontend ends, its clients use another frontend.

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

/// The number of different requests.
const DISTINCT: usize = 60;
/// How often each request is sent with the same salt, so that some prompts are cached and some are computed.
const TIMES: usize = 3;
/// The maximum number of requests that a client sends to get one answer.
const REQUESTS_MAX: usize = 6;
/// The pause before each repetition of a request, except the first repetition.
const PAUSE: Duration = Duration::from_millis(200);

/// The result of one request at its client.
pub struct ClientRecord {
    /// The number of the request, from 0 to `DISTINCT - 1`: requests with the same number differ at most in their salt.
    pub which: usize,
    pub answer_text: Option<AnswerText>,
    pub sent: Instant,
    pub arrivals: Vec<Instant>,
    /// How often the client repeated the request at another frontend.
    pub repeated: usize,
    /// A description of the failure, if there is no answer.
    pub problem: Option<String>,
}

/// Running clients.
pub struct Load {
    /// The number of the first request that is not sent.
    end: Arc<AtomicUsize>,
    /// The number of requests that have ended.
    pub ended: Arc<AtomicUsize>,
    clients: JoinSet<Vec<ClientRecord>>,
}

fn nth(number: usize, salt: &str) -> serde_json::Value {
    let which = number % DISTINCT;
    request(which, salt, 100 + which * 61 % 500, 40 + which * 37 % 160)
}

/// Returns all different requests, each once.
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

    /// Stops sending new requests, waits for those in flight, and returns all results.
    pub fn finish(self, rig: &Rig) -> Vec<ClientRecord> {
        self.end.store(0, Ordering::Relaxed);
        self.wait(rig)
    }

    /// Waits until all requests have been sent and answered, and returns all results.
    pub fn wait(self, rig: &Rig) -> Vec<ClientRecord> {
        rig.plan.runtime.block_on(self.clients.join_all()).into_iter().flatten().collect()
    }
}

/// Sends request `number`, and repeats it at another frontend if its frontend ends.
async fn complete(frontends: &[Client], number: usize, salt: &str) -> ClientRecord {
    let request = nth(number, &format!("{salt} {}", number / (DISTINCT * TIMES)));
    let sent = Instant::now();
    for repeated in 0.. {
        let outcome = frontends[repeated % frontends.len()].answer(Endpoint::Chat.path(), &request).await;
        if frontend_has_ended(&outcome) && repeated + 1 < REQUESTS_MAX {
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

/// Whether the frontend has ended: its connection broke or was refused, or it answered that it drains. Clients repeat a request after no
/// other failure.
fn frontend_has_ended(outcome: &Outcome) -> bool {
    match outcome {
        Ok(answer) => answer.status == 503 && answer.last()["error"]["code"] == "draining",
        Err(error) => error.downcast_ref::<reqwest::Error>().is_some(),
    }
}
