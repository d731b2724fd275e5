//! The events in a worker's lifetime that its transfers depend on.

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use tandem_process::Shutdown;

/// The worker's shutdown, and the end of the draining worker's last request, until which communicators stay open. It is cheap to clone.
#[derive(Clone)]
pub struct Lifetime {
    pub(crate) shutdown: Shutdown,
    pub(crate) drained: Shared<BoxFuture<'static, ()>>,
}

impl Lifetime {
    /// Makes a lifetime. `drained` must resolve when the worker drains and no request runs any more.
    pub fn new(shutdown: Shutdown, drained: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { shutdown, drained: drained.boxed().shared() }
    }
}
