//! Tests of the frontend's HTTP API with a fake cluster.
#![expect(clippy::disallowed_methods, reason = "tasks end with the test's runtime, and real sockets take real time")]

mod answers;
mod bodies;
mod browsers;
mod connections;
mod dashboard;
mod failures;
mod late_count;
mod openapi;
mod refusals;
mod resumed;
mod routers;
mod sequences;
mod support;
mod templates;
mod tenants;
mod usage;
