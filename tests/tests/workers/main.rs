//! A prefill and a decode worker as they run in production: sockets, gRPC, engines on their own threads.

mod abandoned;
mod access;
mod between;
mod devices;
mod failures;
mod forged;
mod harness;
mod local;
mod reach;
mod remote;
mod resume;
