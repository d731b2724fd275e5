//! Samples whose text has a constraint.
//!
//! The tokens that may follow are known as soon as a token is accepted. So separate threads compute the mask while the device runs the next step, and
//! the mask is ready when that step samples.

use crate::{Generated, Refusal};
use parking_lot::Mutex;
use std::sync::{Arc, mpsc};
use tandem_grammar::{Constraint, GrammarError, Mask, MatchError, Matcher, Vocabulary};
use tandem_kv::TokenId;

/// The state of one sample under its constraint. A clone does not change when the original changes.
pub(super) struct Constrained {
    state: Arc<Mutex<State>>,
    threads: MaskThreads,
    is_complete: bool,
}

struct State {
    matcher: Matcher,
    mask: Option<Result<Option<Mask>, MatchError>>,
}

impl State {
    fn mask(&mut self) -> &Result<Option<Mask>, MatchError> {
        self.mask.get_or_insert_with(|| self.matcher.mask())
    }
}

/// The initial states of a request's samples under its constraint.
pub(crate) struct Prepared {
    fresh: Matcher,
    /// The states of the samples that another worker has begun.
    resumed: Vec<(u32, Matcher)>,
    threads: MaskThreads,
}

/// Threads that compute masks. They end when the last clone of this value is dropped.
#[derive(Clone)]
pub(crate) struct MaskThreads(mpsc::Sender<Arc<Mutex<State>>>);

impl MaskThreads {
    pub fn start(count: usize) -> Self {
        // Each running sample has at most one entry in the queue.
        let (queue, work) = mpsc::channel::<Arc<Mutex<State>>>();
        let work = Arc::new(Mutex::new(work));
        for _ in 0..count {
            let work = Arc::clone(&work);
            let compute = move || {
                while let Ok(state) = { work.lock().recv() } {
                    state.lock().mask();
                }
            };
            std::thread::Builder::new().name("tandem-masks".to_owned()).spawn(compute).expect("the system can start a thread");
        }
        Self(queue)
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
        let new = Self { state: Arc::new(Mutex::new(State { matcher, mask: None })), threads, is_complete };
        new.compute();
        new
    }

    /// Lets another thread compute the mask. If no thread has begun when the mask is needed, the engine's thread computes it.
    fn compute(&self) {
        let _ = self.threads.0.send(Arc::clone(&self.state));
    }

    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Returns the tokens that may follow; `None` if all tokens may follow. Waits for a thread that is computing them.
    pub fn mask(&self) -> Result<Option<Mask>, MatchError> {
        self.state.lock().mask().clone()
    }

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
            self.compute();
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
