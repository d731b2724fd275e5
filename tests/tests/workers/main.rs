//! Tests of prefill and decode workers as they run in production: with sockets, gRPC, and engines on their own threads.

mod abandoned;
mod access;
mod device_memory;
mod devices;
mod failures;
mod forged;
mod harness;
mod local;
mod relay;
mod remote;
mod resume;
