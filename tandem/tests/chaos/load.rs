//! Clients that ask one thing after the other, of whichever frontend there is.

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

/// Different requests; each comes three times with the same salt, so that caches matter and new prompts are computed.
const DISTINCT: usize = 60;
const TIMES: usize = 3;
/// The most requests that a client sends for one answer.
const ASKS_MAX: usize = 6;
const PAUSE: Duration = Duration::from_millis(200);

/// What one client has seen.
pub struct Seen {
    /// Which of the different requests it was.
    pub which: usize,
    pub answer_text: Option<AnswerText>,
    pub asked: Instant,
    pub arrivals: Vec<Instant>,
    /// Times it had to ask another frontend.
    pub asked_again: usize,
    /// What it had in place of an answer.
    pub problem: Option<String>,
}

/// Clients at work.
pub struct Load {
    /// Requests with this number or a higher one are not sent any more.
    end: Arc<AtomicUsize>,
    pub ended: Arc<AtomicUsize>,
    clients: JoinSet<Vec<Seen>>,
}

fn nth(number: usize, salt: &str) -> serde_json::Value {
    let which = number % DISTINCT;
    request(which, salt, 100 + which * 61 % 500, 40 + which * 37 % 160)
}

/// All of them once, for what answers must be.
pub fn distinct() -> Vec<serde_json::Value> {
    (0..DISTINCT).map(|number| nth(number, "undisturbed")).collect()
}

impl Load {
    /// Starts `clients` clients of all frontends, which end with the load or after `requests` requests. `salt` is unique.
    pub fn start(rig: &Rig, clients: usize, requests: usize, salt: &str) -> Self {
        let (next, ended, end) = (Arc::default(), Arc::default(), Arc::new(AtomicUsize::new(requests)));
        let mut asking = JoinSet::new();
        for client in 0..clients {
            let mut frontends = rig.clients.clone();
            let others = frontends.len();
            frontends.rotate_left(client % others);
            let (next, ended, end): (Arc<AtomicUsize>, Arc<AtomicUsize>, _) =
                (Arc::clone(&next), Arc::clone(&ended), Arc::clone(&end));
            let salt = salt.to_owned();
            let work = async move {
                let mut seen = Vec::new();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= end.load(Ordering::Relaxed) {
                        return seen;
                    }
                    seen.push(ask(&frontends, number, &salt).await);
                    ended.fetch_add(1, Ordering::Relaxed);
                }
            };
            asking.spawn_on(work, rig.plan.runtime.handle());
        }
        Self { end, ended, clients: asking }
    }

    /// Nobody begins anything any more; what everybody has seen.
    pub fn finish(self, rig: &Rig) -> Vec<Seen> {
        self.end.store(0, Ordering::Relaxed);
        self.rest(rig)
    }

    /// Waits for all requests that were to be asked.
    pub fn rest(self, rig: &Rig) -> Vec<Seen> {
        rig.plan.runtime.block_on(self.clients.join_all()).into_iter().flatten().collect()
    }
}

/// From the first frontend that does not go away meanwhile.
async fn ask(frontends: &[Client], number: usize, salt: &str) -> Seen {
    let request = nth(number, &format!("{salt} {}", number / (DISTINCT * TIMES)));
    let asked = Instant::now();
    for asked_again in 0.. {
        let outcome = frontends[asked_again % frontends.len()].ask(Endpoint::Chat.path(), &request).await;
        if has_ended(&outcome) && asked_again + 1 < ASKS_MAX {
            tokio::time::sleep(PAUSE * u32::from(asked_again > 0)).await;
            continue;
        }
        let answer_text = answer_text(&outcome);
        let problem =
            answer_text.is_none().then(|| format!("request {number} of {salt}, asked {asked_again} times more: {outcome:?}"));
        let arrivals = outcome.map(|answer| answer.arrivals).unwrap_or_default();
        return Seen { which: number % DISTINCT, answer_text, asked, arrivals, asked_again, problem };
    }
    unreachable!("the last time counts, whatever comes of it")
}

/// The frontend has: its connection broke or was refused, or it says that it drains. No other failure is a client's to mend.
fn has_ended(outcome: &Outcome) -> bool {
    match outcome {
        Ok(answer) => answer.status == 503 && answer.last()["error"]["code"] == "draining",
        Err(error) => error.downcast_ref::<reqwest::Error>().is_some(),
    }
}
