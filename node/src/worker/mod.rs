//! What prefill and decode workers have in common: they tell about themselves and their cache ([`ControlService`]), count
//! ([`WorkerMetrics`]), account for every prompt ([`Ledger`]), and end their requests in order ([`Requests`]).

mod control;
mod ledger;
mod metrics;
mod requests;

pub use control::{ControlService, Watch, Watched};
pub use ledger::{Begun, Ledger, LedgerEntry, LedgerLine, Outcome, WorkerLedger};
pub use metrics::{Direction, TransferMetrics, WorkerMetrics};
pub use requests::{ClientGone, Replies, ReplySender, Requests};
