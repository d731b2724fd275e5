//! Authenticates calls with the cluster's key: every outgoing call carries a bearer token, and every server checks it. This keeps out
//! processes without the key; it does not encrypt, so it hides nothing from a process that reads the network's traffic.

use crate::ClusterKey;
use std::sync::Arc;
use tonic::{
    Request, Status,
    service::{Interceptor, interceptor::InterceptedService},
    transport,
};

const AUTHORIZATION: &str = "authorization";

/// A connection whose calls carry the cluster's bearer token, if the cluster has a key. It is cheap to clone.
pub type Channel = InterceptedService<transport::Channel, Bearer>;

/// Adds the bearer token to calls.
#[derive(Clone, Debug)]
pub struct Bearer(pub(super) ClusterKey);

impl Interceptor for Bearer {
    fn call(&mut self, mut call: Request<()>) -> Result<Request<()>, Status> {
        if let Some(bearer) = self.0.bearer() {
            call.metadata_mut().insert(AUTHORIZATION, bearer.clone());
        }
        Ok(call)
    }
}

/// A function that is called for every refused call.
pub type OnRefused = Arc<dyn Fn() + Send + Sync>;

/// Refuses calls without the bearer token before any service sees them.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) key: ClusterKey,
    pub(super) on_refused: OnRefused,
}

impl Interceptor for Guard {
    fn call(&mut self, call: Request<()>) -> Result<Request<()>, Status> {
        if self.key.admits(call.metadata().get(AUTHORIZATION)) {
            return Ok(call);
        }
        (self.on_refused)();
        Err(Status::unauthenticated("the call does not carry this cluster's key; give all processes the same --cluster-key-file"))
    }
}
