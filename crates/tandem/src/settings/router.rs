//! Settings of routers.

use super::worker::step_ms;
use clap::Args;
use serde::Serialize;
use std::time::Duration;
use tandem_router::{PolicyKind, PrefillPlace, ServiceLevels};

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

    /// Time to first token that 95 % of the requests are to have, in milliseconds. With this or --slo-itl, the router computes how many workers
    /// the load needs: `tandem plan --live`, the dashboard, and the metric tandem_router_wanted_workers for autoscalers
    #[arg(long, env = "TANDEM_SLO_TTFT", value_name = "MS", value_parser = step_ms)]
    pub slo_ttft: Option<f64>,
}

/// The service level of a router for the time between tokens.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[command(next_help_heading = "Router")]
#[serde(rename_all = "kebab-case")]
pub struct ItlArgs {
    /// Mean time between the tokens of an answer that 95 % of the answers are to have, in milliseconds, for the number of wanted workers
    #[arg(long, env = "TANDEM_SLO_ITL", value_name = "MS", value_parser = step_ms)]
    pub slo_itl: Option<f64>,
}

impl RouterArgs {
    /// Returns the service levels. `slo_itl` is the one for the time between tokens, in milliseconds.
    pub fn levels(&self, slo_itl: Option<f64>) -> ServiceLevels {
        let level = |ms: Option<f64>| ms.map(|ms| Duration::from_secs_f64(ms / 1e3));
        ServiceLevels { ttft: level(self.slo_ttft), itl: level(slo_itl) }
    }
}
