//! The attempts whose cached tokens the engine reports late. A client that calls `Finish` ends the generation of such an attempt and still receives
//! the report.

use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};
use tokio_util::sync::CancellationToken;

type AttemptKey = (String, u32);

/// The attempts of one worker whose clients may still call `Finish`.
#[derive(Clone, Default)]
pub(crate) struct Finishing(Arc<Mutex<HashMap<AttemptKey, CancellationToken>>>);

/// An attempt of the worker. Dropping this value removes the attempt from [`Finishing`].
pub(crate) struct FinishingAttempt {
    all: Finishing,
    key: AttemptKey,
    finish: CancellationToken,
}

impl Finishing {
    pub(crate) fn add(&self, request_id: &str, attempt: u32) -> FinishingAttempt {
        let (key, finish) = ((request_id.to_owned(), attempt), CancellationToken::new());
        self.0.lock().insert(key.clone(), finish.clone());
        FinishingAttempt { all: self.clone(), key, finish }
    }

    /// Requests the end of an attempt's generation. Does nothing if the attempt is unknown, because then it has already ended.
    pub(crate) fn finish(&self, request_id: String, attempt: u32) {
        if let Some(finish) = self.0.lock().get(&(request_id, attempt)) {
            finish.cancel();
        }
    }
}

impl FinishingAttempt {
    /// Resolves when the client requests the end of the generation.
    pub(crate) async fn finish_requested(&self) {
        self.finish.cancelled().await;
    }
}

impl Drop for FinishingAttempt {
    fn drop(&mut self) {
        self.all.0.lock().remove(&self.key);
    }
}
