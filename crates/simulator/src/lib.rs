//! Simulates clusters in virtual time, with the placements of the real router.
//!
//! The index, the bookings, the costs and the prefix caches are those of a running cluster; devices are modelled by measured rates.
//! [`simulate`] runs any requests on a [`SimulatedCluster`], [`replay`] runs those of a trace, and [`plan`] searches the smallest cluster that
//! meets service levels. Equal input gives equal results.

mod cluster;
mod faults;
mod idle;
mod plan;
mod policy;
mod request;
mod scaling;
mod simulation;
mod trace;
mod worker;

pub use cluster::{SimulatedCluster, SimulatedDevice, SimulatedWorker, Size};
pub use faults::{Faults, Loss, RandomLosses};
pub use idle::IdleMisses;
pub use plan::{ClusterPlan, PlanSettings, Trial, plan};
pub use policy::RoutingRule;
pub use request::SimulatedRequest;
pub use scaling::{CountedRequests, ScalingRule, WorkerScaling};
pub use simulation::{Totals, simulate};
pub use trace::{FAULT_FACTS, Replay, SimulateError, replay};
