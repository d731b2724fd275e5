//! Tests of the crate's parts together.

mod simulation;
