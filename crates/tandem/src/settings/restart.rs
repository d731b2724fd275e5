//! Settings for restarts of routers and frontends while clients send requests.

use clap::Args;
use serde::Serialize;

/// What a frontend does while its routers or it itself restart.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Restarts")]
#[serde(rename_all = "kebab-case")]
pub struct RestartArgs {
    /// How long new requests wait while no router answers, in seconds; then they get 503. The default is longer than a router needs to
    /// restart. Waiting requests count for --max-concurrent-requests
    #[arg(long, env = "TANDEM_ROUTER_WAIT", value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=3_600))]
    pub router_wait: u32,

    /// How long a frontend that ends keeps connections open on which no request runs, in seconds, because a client may just be sending one.
    /// The default is longer than load balancers need to find out that the frontend ends
    #[arg(long, env = "TANDEM_DRAIN_IDLE", value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=3_600))]
    pub drain_idle: u32,

    /// Let another frontend listen on the same ports (SO_REUSEPORT), so that a new process serves before the old one ends. Both need the flag
    /// and the same user
    #[arg(long, env = "TANDEM_REUSE_PORT")]
    pub reuse_port: bool,
}

impl RestartArgs {
    /// Returns the settings of a frontend that ends together with its router and workers, so that no process could serve a late request.
    pub fn of_one_process() -> Self {
        Self { router_wait: 2, drain_idle: 0, reuse_port: false }
    }
}
