//! Settings of frontends.

use super::{LimitArgs, TenantArgs};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

/// The settings of `tandem up` and of frontends.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Frontend")]
#[serde(rename_all = "kebab-case")]
pub struct FrontendArgs {
    /// How often one answer may resume on another worker after its worker was lost; 0: the answer ends with an error event. An answer that
    /// fails more often than the default is probably itself the reason that workers fail
    #[arg(long, env = "TANDEM_RESUMES", value_name = "N", default_value_t = 8)]
    pub resumes: u32,

    /// Number of recent requests that /dashboard shows, with token counts, workers and times but never their text; each takes a few KiB of
    /// memory. 0 turns the page off
    #[arg(long, env = "TANDEM_DASHBOARD_REQUESTS", value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(0..=4_096))]
    pub dashboard_requests: u32,

    /// File written by `tandem audit check --result FILE`; /dashboard and /metrics show its content [default: none]
    #[arg(long, env = "TANDEM_AUDIT_RESULT", value_name = "FILE")]
    pub audit_result: Option<PathBuf>,

    /// Limits on clients.
    #[command(flatten)]
    #[serde(flatten)]
    pub limits: LimitArgs,

    /// Accounts and trusted proxies.
    #[command(flatten)]
    #[serde(flatten)]
    pub tenants: TenantArgs,
}
