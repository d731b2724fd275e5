//! Tests of the frontend's HTTP API with a fake cluster.
#![expect(clippy::disallowed_methods, reason = "tasks end with the test's runtime, and real sockets take real time")]

mod agents;
mod agents_tools;
mod answers;
mod bodies;
mod browsers;
mod connections;
mod dashboard;
mod encrypted;
mod failures;
mod generate;
mod keys;
mod late_count;
mod logs;
mod messages;
mod openapi;
mod output_blocks;
mod parameters;
mod passthrough;
mod paths;
mod priorities;
mod refusals;
mod responses;
mod resumed;
mod routers;
mod sequences;
mod support;
mod templates;
mod tenants;
mod texts;
mod tools;
mod upstream;
mod usage;
mod wait;
