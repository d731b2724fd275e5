//! Settings of routers.

use clap::Args;
use serde::Serialize;
use tandem_router::{PolicyKind, PrefillPlace};

/// The settings of routers.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Router")]
#[serde(rename_all = "kebab-case")]
pub struct RouterArgs {
    /// Which worker computes prompts
    #[arg(long, env = "TANDEM_PREFILL", value_enum, default_value_t)]
    pub prefill: PrefillPlace,

    /// How workers are chosen. The default weighs cached prefixes against load; the other policies exist for comparison
    #[arg(long, env = "TANDEM_POLICY", value_enum, default_value_t)]
    pub policy: PolicyKind,
}
