//! Compiles the constraints of requests, on threads that may block.

use crate::sampling::{MaskThreads, Prepared, compile};
use crate::{Generate, Refusal};
use lru::LruCache;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::num::NonZero;
use std::sync::{Arc, Weak};
use std::thread::available_parallelism;
use std::time::Duration;
use tandem_grammar::{Constraint, Matcher, Vocabulary};
use tandem_kv::TokenId;
use tokio::sync::{Notify, OnceCell, OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// The time limit for one constraint.
const COMPILE_MAX: Duration = Duration::from_secs(1);

/// The time for which a request waits until its constraint is compiled. It is shorter than the time limit for a first token, so that a worker with
/// many constraints refuses requests and does not seem to hang.
const TURN_WAIT_MAX: Duration = Duration::from_secs(10);

/// Maximum number of compiled constraints in the cache, and of the bytes of their texts. A compiled constraint takes up to about 100 times the memory
/// of its text.
const COMPILED_MAX: usize = 64;
const COMPILED_TEXT_MAX: usize = 512 << 10;

/// Maximum number of threads that compute masks. One mask takes some tens of microseconds.
const MASK_THREADS_MAX: usize = 8;

/// The vocabulary and the threads with which an engine compiles constraints. It is cheap to clone. No thread is started before the first constraint.
#[derive(Clone)]
pub(super) struct Constraints {
    vocabulary: Option<Arc<Vocabulary>>,
    threads: Arc<Mutex<Option<MaskThreads>>>,
    turns: Arc<Turns>,
    compiled: Arc<Mutex<Compiled>>,
    /// Set when the vocabulary's tables are built. Building them takes longer than the compilation of a constraint, and is not part of its
    /// time limit.
    built: Arc<OnceCell<()>>,
    wake: Arc<Notify>,
}

/// The cache of compiled constraints. The least recently used one is evicted first.
struct Compiled {
    by_key: LruCache<Key, Arc<Matcher>>,
    text_bytes: usize,
}

/// The key of a compiled constraint. It includes the account, so that no account can find out, by timing its requests, what another account has
/// compiled.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    account: Arc<str>,
    constraint: Constraint,
    stop_tokens: Vec<TokenId>,
}

impl Compiled {
    fn insert(&mut self, key: Key, fresh: Arc<Matcher>) {
        self.text_bytes += key.constraint.text_bytes();
        let mut removed = self.by_key.push(key, fresh);
        loop {
            self.text_bytes -= removed.take().map_or(0, |(key, _)| key.constraint.text_bytes());
            if self.by_key.len() <= COMPILED_MAX && self.text_bytes <= COMPILED_TEXT_MAX {
                return;
            }
            removed = self.by_key.pop_lru();
        }
    }
}

impl Constraints {
    /// `wake` is notified whenever a mask has been computed.
    pub fn new(wake: Arc<Notify>) -> Self {
        let turns = Arc::new(Turns::new(quarter_of_cores()));
        let compiled = Arc::new(Mutex::new(Compiled { by_key: LruCache::unbounded(), text_bytes: 0 }));
        Self { vocabulary: None, threads: Arc::default(), turns, compiled, built: Arc::default(), wake }
    }

    pub fn set_vocabulary(&mut self, vocabulary: Arc<Vocabulary>) {
        self.vocabulary = Some(vocabulary);
    }

    /// Makes each mask be computed at once by the thread that requests it.
    pub fn compute_masks_at_once(&self) {
        *self.threads.lock() = Some(MaskThreads::none());
    }

    /// Compiles the constraint of a request, unless it is in the cache.
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
        let threads =
            self.mask_threads().map_err(|error| refused(&format!("the system cannot start a thread for it: {error}")))?;
        let account: Arc<str> = generate.account.as_str().into();
        let key = Key { account: Arc::clone(&account), constraint, stop_tokens: generate.sampling.stop_token_ids.clone() };
        let remembered = self.compiled.lock().by_key.get(&key).cloned();
        let fresh = match remembered {
            Some(fresh) => fresh,
            None => {
                let compiled = Arc::clone(&self.compiled);
                self.turns.run(&generate.account, move || compile_once(&vocabulary, key, &compiled)).await?
            }
        };
        // Replaying long answers may take longer than the time limit of a constraint.
        let generated = generate.generated.clone();
        let prepared = spawn_blocking(move || Prepared::new(fresh, &generated, threads, account)).await;
        prepared.unwrap_or_else(|_| Err(refused("the parser failed on it"))).map(Arc::new)
    }

    fn mask_threads(&self) -> io::Result<MaskThreads> {
        let mut threads = self.threads.lock();
        if let Some(threads) = &*threads {
            return Ok(threads.clone());
        }
        let started = MaskThreads::start(quarter_of_cores(), Arc::clone(&self.wake))?;
        Ok(threads.insert(started).clone())
    }
}

/// Compiles a constraint, unless another request of the account has compiled it while this one waited.
fn compile_once(vocabulary: &Vocabulary, key: Key, compiled: &Mutex<Compiled>) -> Result<Arc<Matcher>, Refusal> {
    let remembered = compiled.lock().by_key.get(&key).cloned();
    if let Some(fresh) = remembered {
        return Ok(fresh);
    }
    let fresh = compile(vocabulary, &key.constraint, &key.stop_tokens)?;
    compiled.lock().insert(key, Arc::clone(&fresh));
    Ok(fresh)
}

/// Limits the running compilations to one for each account, and to a maximum number in total. Accounts take turns.
struct Turns {
    /// One permit for each account that has a request which waits or is compiled.
    accounts: Mutex<HashMap<String, Weak<Semaphore>>>,
    /// The permits of running compilations. Only one request of an account waits for them at a time, so accounts receive them in turn.
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
        let turn = async { (acquire(self.of_account(account)).await, acquire(Arc::clone(&self.places)).await) };
        let (own, place) = timeout(TURN_WAIT_MAX, turn).await.map_err(|_| Refusal::Full)?;
        let place = Arc::new(Mutex::new(place));
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

/// If no request waits for a compilation any more, lets other accounts use its place, unless too many such threads run. The compilation's own
/// account must wait until the thread ends.
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
    use crate::{Generated, Sampling, handle::tests::generate};
    use std::sync::mpsc;
    use tandem_grammar::Kind;

    #[tokio::test(start_paused = true)]
    async fn first_constraint_of_an_account_is_compiled_before_the_second_of_another() {
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
    async fn dropped_compilation_frees_its_place_for_other_accounts() {
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
    async fn constraint_that_takes_too_long_is_refused_and_delays_only_its_own_account() {
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
        let (open_second, compiling) = overdue("also slow");
        expect_refusal(compiling).await;
        let blocked = turns.places.available_permits();
        assert_eq!(blocked, 0, "the number of overdue threads is bounded");
        // Time does not advance by itself while threads run.
        let (refused, ()) = tokio::join!(turns.run("slow", || Ok(())), async {
            tokio::task::yield_now().await;
            tokio::time::advance(TURN_WAIT_MAX * 2).await;
        });
        assert!(matches!(refused, Err(Refusal::Full)), "the account is not served in time");
        drop((open, open_second));
        turns.run("slow", || Ok(())).await.expect("the account is served when its thread has ended");
    }

    #[tokio::test]
    async fn constraint_is_compiled_once_for_each_account_and_set_of_stop_tokens() {
        let mut constraints = Constraints::new(Arc::default());
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        constraints.set_vocabulary(Arc::new(Vocabulary::new(bytes.chunks(1).map(|byte| (byte, false)), bytes.len())));
        let digits = Constraint::from(Kind::Regex("[0-9]+".to_owned()));
        let one = generate(4);
        let stop_token_ids = vec![b'x'.into()];
        let with_stop = Generate { sampling: Sampling { stop_token_ids, ..Sampling::default() }, ..one.clone() };
        let of_other = Generate { account: "other".to_owned(), ..one.clone() };
        let resumed = Generate { generated: vec![Generated { sample: 0, tokens: vec![b'7'.into()] }], ..one.clone() };
        for (generate, remembered) in [(&one, 1), (&one, 1), (&with_stop, 2), (&of_other, 3), (&resumed, 3)] {
            constraints.prepare(digits.clone(), generate).await.expect("the constraint is valid");
            assert_eq!(constraints.compiled.lock().by_key.len(), remembered);
        }
        let invalid = Constraint::from(Kind::Regex("(".to_owned()));
        constraints.prepare(invalid, &one).await.expect_err("a parenthesis is missing");
        assert_eq!(constraints.compiled.lock().by_key.len(), 3, "refusals are not remembered");
        for number in 0..2 * COMPILED_MAX {
            let long = if number > COMPILED_MAX { "x".repeat(COMPILED_TEXT_MAX / 8) } else { String::new() };
            let schema = format!(r#"{{"const":{number},"description":"{long}"}}"#);
            let constraint = Kind::JsonSchema { schema, lenient: false }.into();
            constraints.prepare(constraint, &one).await.expect("the constraint is valid");
            let compiled = constraints.compiled.lock();
            let text_bytes: usize = compiled.by_key.iter().map(|(key, _)| key.constraint.text_bytes()).sum();
            assert_eq!(text_bytes, compiled.text_bytes);
            assert!(compiled.by_key.len() <= COMPILED_MAX && text_bytes <= COMPILED_TEXT_MAX);
        }
        assert_eq!(constraints.compiled.lock().by_key.len(), 7, "an eighth long one exceeds the limit");
    }
}
