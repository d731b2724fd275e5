//! The lifetime of a worker, as far as its transfers depend on it.

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use tandem_node::Shutdown;

/// The worker's shutdown, and the end of its last request: communicators stay open until then. Cheap to clone.
#[derive(Clone)]
pub struct Lifetime {
    pub(crate) shutdown: Shutdown,
    /// Resolves when the worker drains and no request runs any more.
    pub(crate) drained: Shared<BoxFuture<'static, ()>>,
}

impl Lifetime {
    /// Makes a lifetime; `drained` resolves when the worker drains and no request runs any more.
    pub fn new(shutdown: Shutdown, drained: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { shutdown, drained: drained.boxed().shared() }
    }
}
