//! Samples whose text has a constraint.
//!
//! The tokens that may follow are known as soon as a token is accepted. So separate threads compute the mask while the device runs the next step, and
//! the mask is usually ready when that step samples. If it is late, the step gives this sample no token, and the sample takes part in no further
//! step until the mask is ready. So a constraint whose masks take long delays no other sample.

use crate::{Generated, Refusal};
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
    mpsc,
};
use tandem_grammar::{Constraint, GrammarError, Mask, MatchError, Matcher, Vocabulary};
use tandem_kv::TokenId;
use tokio::sync::Notify;

/// The state of one sample under its constraint. A clone does not change when the original changes.
pub(super) struct Constrained {
    state: Arc<Mutex<State>>,
    threads: MaskThreads,
    is_complete: bool,
    /// Whether a step has sampled before the mask was ready.
    is_late: AtomicBool,
}

/// Locked while a thread computes the mask.
struct State {
    matcher: Matcher,
    mask: Option<MaskResult>,
}

/// The tokens that may follow; `None` if all tokens may follow.
pub(crate) type MaskResult = Result<Option<Mask>, MatchError>;

/// The initial states of a request's samples under its constraint.
pub(crate) struct Prepared {
    fresh: Matcher,
    /// The states of the samples that another worker has begun.
    resumed: Vec<(u32, Matcher)>,
    threads: MaskThreads,
}

/// Threads that compute masks. They end when the last clone of this value is dropped.
#[derive(Clone)]
pub(crate) struct MaskThreads(Option<mpsc::Sender<Arc<Mutex<State>>>>);

impl MaskThreads {
    /// Starts `count` threads, which notify `wake` after each mask.
    pub fn start(count: usize, wake: Arc<Notify>) -> Self {
        Self::start_with(count, wake, Matcher::mask)
    }

    pub fn start_with(
        count: usize,
        wake: Arc<Notify>,
        mask: impl Fn(&mut Matcher) -> MaskResult + Clone + Send + 'static,
    ) -> Self {
        // Each running sample has at most one entry in the queue.
        let (queue, work) = mpsc::channel::<Arc<Mutex<State>>>();
        let work = Arc::new(Mutex::new(work));
        for _ in 0..count {
            let (work, wake, mask) = (Arc::clone(&work), Arc::clone(&wake), mask.clone());
            let compute = move || {
                while let Ok(state) = { work.lock().recv() } {
                    let mut state = state.lock();
                    state.mask = Some(mask(&mut state.matcher));
                    drop(state);
                    wake.notify_one();
                }
            };
            std::thread::Builder::new().name("tandem-masks".to_owned()).spawn(compute).expect("the system can start a thread");
        }
        Self(Some(queue))
    }

    /// Starts no threads: each mask is computed where it is requested. So the steps of a simulation do not depend on the speed of the machine.
    pub fn none() -> Self {
        Self(None)
    }
}

impl Prepared {
    /// Compiles a constraint, and replays the tokens of resumed samples. Blocks its thread for milliseconds or longer.
    ///
    /// # Errors
    /// Fails if the constraint cannot be enforced, or does not allow the tokens.
    pub fn new(
        vocabulary: &Vocabulary,
        constraint: &Constraint,
        stop_tokens: &[TokenId],
        generated: &[Generated],
        threads: MaskThreads,
    ) -> Result<Self, Refusal> {
        let fresh = vocabulary.compile(constraint, stop_tokens).map_err(|error| match error {
            GrammarError::Vocabulary { .. } => Refusal::Unsupported(error.to_string().into()),
            _ => Refusal::Unsupported(format!("the constraint on the output cannot be enforced: {error}").into()),
        })?;
        let replay = |Generated { sample, tokens }: &Generated| {
            let mut matcher = fresh.clone();
            tokens.iter().try_for_each(|token| matcher.accept(*token))?;
            Ok((*sample, matcher))
        };
        let resumed = generated.iter().map(replay).collect::<Result<_, MatchError>>().map_err(|error| refusal(&error))?;
        Ok(Self { fresh, resumed, threads })
    }

    fn of(&self, sample: u32) -> &Matcher {
        self.resumed.iter().find(|(resumed, _)| *resumed == sample).map_or(&self.fresh, |(_, matcher)| matcher)
    }

    pub(super) fn is_complete(&self, sample: u32) -> bool {
        self.of(sample).is_complete()
    }

    pub(super) fn start(&self, sample: u32) -> Constrained {
        Constrained::start(self.of(sample).clone(), self.threads.clone())
    }
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").finish_non_exhaustive()
    }
}

/// Returns the refusal of a request whose text cannot be continued.
pub(crate) fn refusal(error: &MatchError) -> Refusal {
    Refusal::Unsupported(format!("the constraint on the output cannot be enforced: {error}").into())
}

impl Constrained {
    fn start(matcher: Matcher, threads: MaskThreads) -> Self {
        let is_complete = matcher.is_complete();
        let state = Arc::new(Mutex::new(State { matcher, mask: None }));
        let new = Self { state, threads, is_complete, is_late: AtomicBool::new(false) };
        new.request_mask();
        new
    }

    fn request_mask(&self) {
        match &self.threads.0 {
            // The threads run as long as the sender exists.
            Some(queue) => _ = queue.send(Arc::clone(&self.state)),
            None => {
                let mut state = self.state.lock();
                state.mask = Some(state.matcher.mask());
            }
        }
    }

    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Returns whether the mask is computed. Never waits.
    pub fn is_ready(&self) -> bool {
        self.state.try_lock().is_some_and(|state| state.mask.is_some())
    }

    /// Returns whether the current step cannot sample, or has not sampled, from the mask. The step's token must then be discarded.
    pub fn take_late(&mut self) -> bool {
        std::mem::take(self.is_late.get_mut()) || !self.is_ready()
    }

    /// Returns the mask. Never waits: if the mask is not ready, all tokens may follow, and the sample is late.
    pub fn mask(&self) -> MaskResult {
        let ready = self.state.try_lock().and_then(|state| state.mask.clone());
        ready.unwrap_or_else(|| {
            self.is_late.store(true, Relaxed);
            Ok(None)
        })
    }

    /// Appends a token that was sampled from the mask, and requests the next mask.
    pub fn accept(&mut self, token: TokenId) -> Result<(), MatchError> {
        let mut state = self.state.lock();
        if let Some(Err(error)) = &state.mask {
            return Err(error.clone());
        }
        state.matcher.accept(token)?;
        state.mask = None;
        self.is_complete = state.matcher.is_complete();
        drop(state);
        if !self.is_complete {
            self.request_mask();
        }
        Ok(())
    }
}

impl Clone for Constrained {
    fn clone(&self) -> Self {
        Self::start(self.state.lock().matcher.clone(), self.threads.clone())
    }
}

impl std::fmt::Debug for Constrained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constrained").field("is_complete", &self.is_complete).finish_non_exhaustive()
    }
}
