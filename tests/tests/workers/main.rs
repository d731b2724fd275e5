//! A prefill and a decode worker as they run in production: sockets, gRPC, engines on their own threads.

mod abandoned;
mod devices;
mod failures;
mod harness;
mod local;
mod reach;
mod remote;
mod resume;
