//! Compiles the constraints of requests, on threads that may block.

use crate::sampling::{MaskThreads, Prepared};
use crate::{Generate, Refusal};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::num::NonZero;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::available_parallelism;
use std::time::Duration;
use tandem_grammar::{Constraint, Vocabulary};
use tokio::sync::{Notify, OnceCell, OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// The time limit for one constraint.
const COMPILE_MAX: Duration = Duration::from_secs(1);

/// Maximum number of threads that compute masks. One mask takes some tens of microseconds.
const MASK_THREADS_MAX: usize = 8;

/// The vocabulary and the threads with which an engine compiles constraints. It is cheap to clone. No thread is started before the first constraint.
#[derive(Clone)]
pub(super) struct Constraints {
    vocabulary: Option<Arc<Vocabulary>>,
    threads: Arc<OnceLock<MaskThreads>>,
    turns: Arc<Turns>,
    /// Set when the vocabulary's tables are built, which takes longer than a constraint and is not part of its time.
    built: Arc<OnceCell<()>>,
    wake: Arc<Notify>,
}

impl Constraints {
    /// `wake` is notified whenever a mask has been computed.
    pub fn new(wake: Arc<Notify>) -> Self {
        let turns = Arc::new(Turns::new(quarter_of_cores()));
        Self { vocabulary: None, threads: Arc::default(), turns, built: Arc::default(), wake }
    }

    pub fn set_vocabulary(&mut self, vocabulary: Arc<Vocabulary>) {
        self.vocabulary = Some(vocabulary);
    }

    /// Lets masks be computed where they are requested, without threads.
    pub fn compute_masks_at_once(&self) {
        let _ = self.threads.set(MaskThreads::none());
    }

    /// Compiles the constraint of a request.
    ///
    /// # Errors
    /// Fails if the constraint cannot be enforced or takes too long to compile, or if the engine has no vocabulary.
    pub async fn prepare(&self, constraint: Constraint, generate: &Generate) -> Result<Arc<Prepared>, Refusal> {
        let Some(vocabulary) = self.vocabulary.clone() else {
            return Err(Refusal::Unsupported("this worker's engine does not support constraints on the output".into()));
        };
        let build = Arc::clone(&vocabulary);
        let built = self.built.get_or_try_init(|| async { spawn_blocking(move || build.build()).await });
        built.await.map_err(|_| Refusal::Gone)?;
        let threads = self.threads.get_or_init(|| MaskThreads::start(quarter_of_cores(), Arc::clone(&self.wake))).clone();
        let (stop_tokens, generated) = (generate.sampling.stop_token_ids.clone(), generate.generated.clone());
        let account = generate.account.as_str().into();
        let compile = move || Prepared::new(&vocabulary, &constraint, &stop_tokens, &generated, threads, account);
        self.turns.run(&generate.account, compile).await.map(Arc::new)
    }
}

/// Lets accounts take turns, with one running compilation each.
struct Turns {
    /// One permit for each account that has a request here.
    accounts: Mutex<HashMap<String, Weak<Semaphore>>>,
    /// The permits of running compilations. An account waits here with one request at a time, so they are given out in turn by account.
    places: Arc<Semaphore>,
    /// The permits of compilations that have exceeded the time limit. Their threads cannot be stopped.
    overdue: Arc<Semaphore>,
}

impl Turns {
    fn new(places: usize) -> Self {
        let [places, overdue] = [places, places].map(|permits| Arc::new(Semaphore::new(permits)));
        Self { accounts: Mutex::default(), places, overdue }
    }

    async fn run<T: Send + 'static>(
        &self,
        account: &str,
        compile: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let own = acquire(self.of_account(account)).await;
        let place = Arc::new(Mutex::new(acquire(Arc::clone(&self.places)).await));
        let held = Arc::clone(&place);
        let compiling = spawn_blocking(move || {
            let _permits = (own, held);
            compile()
        });
        let _abandoned = Abandoned { place, overdue: Arc::clone(&self.overdue) };
        match timeout(COMPILE_MAX, compiling).await {
            Ok(compiled) => compiled.unwrap_or_else(|_| Err(refused("the parser failed on it"))),
            Err(_) => Err(refused(&format!("compiling it takes longer than {} s; simplify it", COMPILE_MAX.as_secs()))),
        }
    }

    fn of_account(&self, account: &str) -> Arc<Semaphore> {
        let mut accounts = self.accounts.lock();
        accounts.retain(|_, permit| permit.strong_count() > 0);
        if let Some(permit) = accounts.get(account).and_then(Weak::upgrade) {
            return permit;
        }
        let permit = Arc::new(Semaphore::new(1));
        accounts.insert(account.to_owned(), Arc::downgrade(&permit));
        permit
    }
}

/// Gives other accounts the place of a compilation that no request awaits any more, unless too many such threads run. The account of the compilation
/// waits for its thread.
struct Abandoned {
    place: Arc<Mutex<OwnedSemaphorePermit>>,
    overdue: Arc<Semaphore>,
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        if let Ok(overdue) = Arc::clone(&self.overdue).try_acquire_owned() {
            *self.place.lock() = overdue;
        }
    }
}

async fn acquire(semaphore: Arc<Semaphore>) -> OwnedSemaphorePermit {
    semaphore.acquire_owned().await.expect("the semaphore is never closed")
}

fn refused(why: &str) -> Refusal {
    Refusal::Unsupported(format!("the constraint on the output cannot be enforced: {why}").into())
}

/// Returns a quarter of the number of cores. The device and the services need the other cores.
fn quarter_of_cores() -> usize {
    available_parallelism().map_or(1, NonZero::get).div_ceil(4).min(MASK_THREADS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test(start_paused = true)]
    async fn account_with_one_constraint_is_served_before_the_second_of_another_account() {
        let turns = Turns::new(1);
        let order = Arc::new(Mutex::new(Vec::new()));
        let run = |account: &'static str| {
            let order = Arc::clone(&order);
            turns.run(account, move || {
                order.lock().push(account);
                Ok(())
            })
        };
        let (open, gate) = mpsc::channel::<()>();
        let first = turns.run("many", move || {
            let _ = gate.recv();
            Ok(())
        });
        // The gate opens when all requests wait.
        let (a, b, c, one, ()) = tokio::join!(first, run("many"), run("many"), run("one"), async { drop(open) });
        assert!([a, b, c, one].iter().all(Result::is_ok));
        assert_eq!(*order.lock(), ["one", "many", "many"]);
        drop(turns.of_account("another"));
        assert_eq!(turns.accounts.lock().len(), 1, "accounts without requests are forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn request_that_is_dropped_gives_its_place_to_other_accounts() {
        let turns = Turns::new(1);
        let (open, gate) = mpsc::channel::<()>();
        let first = turns.run("one", move || {
            let _ = gate.recv();
            Ok(())
        });
        tokio::select! {
            biased;
            _ = first => panic!("the gate is closed"),
            () = tokio::task::yield_now() => {}
        }
        turns.run("other", || Ok(())).await.expect("another account is served");
        drop(open);
    }

    #[tokio::test(start_paused = true)]
    async fn overdue_constraint_is_refused_and_delays_only_its_own_account() {
        let turns = Turns::new(1);
        let overdue = |account: &'static str| {
            let (open, gate) = mpsc::channel::<()>();
            let compile = move || {
                let _ = gate.recv();
                Ok(())
            };
            (open, turns.run(account, compile))
        };
        let expect_refusal = async |compiling| {
            let (refusal, ()) = tokio::join!(compiling, async {
                tokio::task::yield_now().await;
                tokio::time::advance(COMPILE_MAX * 2).await;
            });
            let refusal: Result<(), Refusal> = refusal;
            assert!(refusal.expect_err("the limit is exceeded").to_string().contains("longer than 1 s"));
        };
        let (open, compiling) = overdue("slow");
        expect_refusal(compiling).await;
        turns.run("other", || Ok(())).await.expect("another account is served");
        let mut waits = Box::pin(turns.run("slow", || Ok(())));
        assert!(std::future::poll_fn(|context| std::task::Poll::Ready(waits.as_mut().poll(context).is_pending())).await);
        let (open_second, compiling) = overdue("also slow");
        expect_refusal(compiling).await;
        let blocked = turns.places.available_permits();
        assert_eq!(blocked, 0, "the number of overdue threads is bounded");
        drop((open, open_second));
        waits.await.expect("the account is served when its thread has ended");
    }
}
