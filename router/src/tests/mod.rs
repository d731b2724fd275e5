//! Tests of several modules of the router together.

mod simulation;
