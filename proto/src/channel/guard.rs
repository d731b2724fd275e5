//! Authenticates calls: with the cluster's key, which every outgoing call carries as a bearer token, and with the role in the caller's
//! certificate, if the cluster has certificates. The key alone does not encrypt, so it hides nothing from a process that reads the network's
//! traffic.

use super::peer::PeerRole;
use crate::ClusterKey;
use std::{
    sync::Arc,
    task::{Context, Poll},
};
use tonic::{
    Request, Status,
    codegen::{BoxFuture, Service, http},
    service::Interceptor,
};
use tower_layer::Layer;

const AUTHORIZATION: &str = "authorization";

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

/// Refuses calls without the bearer token, and calls that the caller's role does not allow, before any service sees them.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) key: ClusterKey,
    /// Whether callers have certificates.
    pub(super) has_roles: bool,
    pub(super) on_refused: OnRefused,
}

impl Guard {
    fn check<B>(&self, call: &http::Request<B>) -> Result<(), Status> {
        if !self.key.admits(call.headers().get(AUTHORIZATION).map(http::HeaderValue::as_bytes)) {
            return Err(Status::unauthenticated(
                "the call does not carry this cluster's key; give all processes the same --cluster-key-file",
            ));
        }
        let role = call.extensions().get::<PeerRole>();
        if self.has_roles && !role.is_some_and(|role| role.may_call(call.uri().path())) {
            let role = role.map_or("no role", |role| role.name());
            return Err(Status::permission_denied(format!("the certificate of the caller ({role}) does not allow this call")));
        }
        Ok(())
    }
}

impl<S> Layer<S> for Guard {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { guard: self.clone(), inner }
    }
}

/// A service behind a [`Guard`].
#[derive(Clone)]
pub(super) struct Guarded<S> {
    guard: Guard,
    inner: S,
}

impl<S, B, R> Service<http::Request<B>> for Guarded<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    R: Default + Send + 'static,
{
    type Response = http::Response<R>;
    type Error = S::Error;
    type Future = BoxFuture<http::Response<R>, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, call: http::Request<B>) -> Self::Future {
        match self.guard.check(&call) {
            Ok(()) => Box::pin(self.inner.call(call)),
            Err(status) => {
                (self.guard.on_refused)();
                Box::pin(std::future::ready(Ok(status.into_http())))
            }
        }
    }
}
