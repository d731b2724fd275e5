//! Tests that involve several modules of the router.

mod simulation;
