//! Samples whose text has a constraint.
//!
//! The tokens that may follow are known as soon as a token is accepted. So separate threads compute the mask while the device runs the next step, and
//! the mask is usually ready when that step samples. If it is late, the step gives this sample no token, and the sample takes part in no further
//! step until the mask is ready. So a constraint whose masks take long delays no other sample.

use super::masks::{MaskResult, MaskThreads, State};
use crate::{Generated, Refusal};
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};
use tandem_grammar::{Constraint, GrammarError, MatchError, Matcher, Vocabulary};
use tandem_kv::TokenId;

/// The state of one sample under its constraint. A clone does not change when the original changes.
pub(super) struct Constrained {
    state: Arc<Mutex<State>>,
    threads: MaskThreads,
    /// The account to which the time of the masks is charged.
    account: Arc<str>,
    is_complete: bool,
    /// Whether a step sampled this sequence's token before the mask was ready.
    is_late: AtomicBool,
}

/// The initial states of a request's samples under its constraint.
pub(crate) struct Prepared {
    fresh: Arc<Matcher>,
    /// The states of the samples that another worker has begun.
    resumed: Vec<(u32, Matcher)>,
    threads: MaskThreads,
    account: Arc<str>,
}

/// Compiles a constraint. Blocks its thread for milliseconds or longer.
///
/// # Errors
/// Fails if the constraint cannot be enforced.
pub(crate) fn compile(
    vocabulary: &Vocabulary,
    constraint: &Constraint,
    stop_tokens: &[TokenId],
) -> Result<Arc<Matcher>, Refusal> {
    vocabulary.compile(constraint, stop_tokens).map(Arc::new).map_err(|error| match error {
        GrammarError::Vocabulary { .. } => Refusal::Unsupported(error.to_string().into()),
        _ => Refusal::Unsupported(format!("the constraint on the output cannot be enforced: {error}").into()),
    })
}

impl Prepared {
    /// Replays the tokens of resumed samples on copies of `fresh`. Blocks its thread.
    ///
    /// # Errors
    /// Fails if the constraint does not allow the tokens.
    pub fn new(fresh: Arc<Matcher>, generated: &[Generated], threads: MaskThreads, account: Arc<str>) -> Result<Self, Refusal> {
        let replay = |Generated { sample, tokens }: &Generated| {
            let mut matcher = Matcher::clone(&fresh);
            tokens.iter().try_for_each(|token| matcher.accept(*token))?;
            Ok((*sample, matcher))
        };
        let resumed = generated.iter().map(replay).collect::<Result<_, MatchError>>().map_err(|error| refusal(&error))?;
        Ok(Self { fresh, resumed, threads, account })
    }

    fn of(&self, sample: u32) -> &Matcher {
        self.resumed.iter().find(|(resumed, _)| *resumed == sample).map_or(&self.fresh, |(_, matcher)| matcher)
    }

    pub(super) fn is_complete(&self, sample: u32) -> bool {
        self.of(sample).is_complete()
    }

    pub(super) fn start(&self, sample: u32) -> Constrained {
        Constrained::start(self.of(sample).clone(), self.threads.clone(), Arc::clone(&self.account))
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
    fn start(matcher: Matcher, threads: MaskThreads, account: Arc<str>) -> Self {
        let is_complete = matcher.is_complete();
        let state = Arc::new(Mutex::new(State { matcher, mask: None }));
        let new = Self { state, threads, account, is_complete, is_late: AtomicBool::new(false) };
        new.request_mask();
        new
    }

    fn request_mask(&self) {
        self.threads.request(&self.account, &self.state);
    }

    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Returns whether the mask is computed. Never waits.
    pub fn is_ready(&self) -> bool {
        self.state.try_lock().is_some_and(|state| state.mask.is_some())
    }

    /// Returns whether the mask was late for the current step, or is not ready yet. The step's token must then be discarded.
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
        Self::start(self.state.lock().matcher.clone(), self.threads.clone(), Arc::clone(&self.account))
    }
}

impl std::fmt::Debug for Constrained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constrained").field("is_complete", &self.is_complete).finish_non_exhaustive()
    }
}
