//! Compiles the constraints of requests, on threads that may block.

use crate::sampling::{MaskThreads, Prepared};
use crate::{Generate, Refusal};
use std::num::NonZero;
use std::sync::{Arc, OnceLock};
use std::thread::available_parallelism;
use tandem_grammar::{Constraint, Vocabulary};
use tokio::sync::{Notify, Semaphore};

/// Maximum number of threads that compute masks. One mask takes some tens of microseconds.
const MASK_THREADS_MAX: usize = 8;

/// The vocabulary and the threads with which an engine compiles constraints. It is cheap to clone. No thread is started before the first constraint.
#[derive(Clone)]
pub(super) struct Constraints {
    vocabulary: Option<Arc<Vocabulary>>,
    threads: Arc<OnceLock<MaskThreads>>,
    compiling: Arc<Semaphore>,
    wake: Arc<Notify>,
}

impl Constraints {
    /// `wake` is notified whenever a mask has been computed.
    pub fn new(wake: Arc<Notify>) -> Self {
        let compiling = Arc::new(Semaphore::new(quarter_of_cores()));
        Self { vocabulary: None, threads: Arc::default(), compiling, wake }
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
    /// Fails if the constraint cannot be enforced, or if the engine has no vocabulary.
    pub async fn prepare(&self, constraint: Constraint, generate: &Generate) -> Result<Arc<Prepared>, Refusal> {
        let Some(vocabulary) = self.vocabulary.clone() else {
            return Err(Refusal::Unsupported("this worker's engine does not support constraints on the output".into()));
        };
        let threads = self.threads.get_or_init(|| MaskThreads::start(quarter_of_cores(), Arc::clone(&self.wake))).clone();
        let permit = Arc::clone(&self.compiling).acquire_owned().await.expect("the semaphore is never closed");
        let (stop_tokens, generated) = (generate.sampling.stop_token_ids.clone(), generate.generated.clone());
        let account = generate.account.as_str().into();
        let compile = move || {
            let _permit = permit;
            Prepared::new(&vocabulary, &constraint, &stop_tokens, &generated, threads, account)
        };
        Ok(Arc::new(tokio::task::spawn_blocking(compile).await.map_err(|_| Refusal::Gone)??))
    }
}

/// Returns a quarter of the number of cores. The device and the services need the other cores.
fn quarter_of_cores() -> usize {
    available_parallelism().map_or(1, NonZero::get).div_ceil(4).min(MASK_THREADS_MAX)
}
