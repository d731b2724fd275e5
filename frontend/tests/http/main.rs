//! The frontend's HTTP as a client sees it, before a cluster that the test plays.

mod answers;
mod failures;
mod refusals;
mod support;
mod usage;
