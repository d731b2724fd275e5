//! Tests of a whole cluster in one process.

mod burst;
mod cached_tokens;
mod cluster_key;
mod engine_events;
mod explain;
mod models;
mod reconcile;
mod same_bits;
mod slow_reader;
mod structured;
mod tools;
mod why;
