//! The frontend's HTTP as a client sees it, before a cluster that the test plays.
#![expect(clippy::disallowed_methods, reason = "tasks end with the test's runtime, and real sockets take real time")]

mod answers;
mod bodies;
mod browsers;
mod connections;
mod dashboard;
mod failures;
mod refusals;
mod resumed;
mod routers;
mod sequences;
mod support;
mod templates;
mod tenants;
mod usage;
