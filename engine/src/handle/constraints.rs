//! Compiles the constraints of requests, on threads that may block.

use crate::sampling::{MaskThreads, Prepared};
use crate::{Generate, Refusal};
use std::num::NonZero;
use std::sync::{Arc, OnceLock};
use std::thread::available_parallelism;
use tandem_grammar::{Constraint, Vocabulary};
use tokio::sync::Semaphore;

/// Maximum number of threads that compute masks. One mask takes some tens of microseconds.
const MASK_THREADS_MAX: usize = 8;

/// The vocabulary and the threads with which an engine compiles constraints. It is cheap to clone. No thread is started before the first constraint.
#[derive(Clone)]
pub(super) struct Constraints {
    vocabulary: Option<Arc<Vocabulary>>,
    threads: Arc<OnceLock<MaskThreads>>,
    compiling: Arc<Semaphore>,
}

impl Constraints {
    pub fn new(vocabulary: Option<Arc<Vocabulary>>) -> Self {
        Self { vocabulary, threads: Arc::default(), compiling: Arc::new(Semaphore::new(quarter_of_cores())) }
    }

    /// Compiles the constraint of a request.
    ///
    /// # Errors
    /// Fails if the constraint cannot be enforced, or if the engine has no vocabulary.
    pub async fn prepare(&self, constraint: Constraint, generate: &Generate) -> Result<Arc<Prepared>, Refusal> {
        let Some(vocabulary) = self.vocabulary.clone() else {
            return Err(Refusal::Unsupported("this worker's engine does not support constraints on the output".into()));
        };
        let threads = self.threads.get_or_init(|| MaskThreads::start(quarter_of_cores())).clone();
        let permit = Arc::clone(&self.compiling).acquire_owned().await.expect("the semaphore is never closed");
        let (stop_tokens, generated) = (generate.sampling.stop_token_ids.clone(), generate.generated.clone());
        let compile = move || {
            let _permit = permit;
            Prepared::new(&vocabulary, &constraint, &stop_tokens, &generated, threads)
        };
        Ok(Arc::new(tokio::task::spawn_blocking(compile).await.map_err(|_| Refusal::Gone)??))
    }
}

/// Returns a quarter of the number of cores. The device and the services need the other cores.
fn quarter_of_cores() -> usize {
    available_parallelism().map_or(1, NonZero::get).div_ceil(4).min(MASK_THREADS_MAX)
}
