//! What a frontend takes from its clients at most.

use super::roles::with_commas;
use clap::Args;
use serde::Serialize;

/// Bounds on connections, memory and sequences, for the frontend.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Limits of the frontend")]
#[serde(rename_all = "kebab-case")]
pub struct LimitFlags {
    /// Sequences (prompts × n) served at once, over all requests; more are refused with 503, because a queue without an end only hides the
    /// overload
    #[arg(long, env = "TANDEM_MAX_CONCURRENT_REQUESTS", value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_concurrent_requests: u32,

    /// Of these, sequences of one account (--account-header; a request without one counts by its address): more are refused with 429.
    /// 0: one may take all [default: half of --max-concurrent-requests with --account-header, so that one account leaves room for
    /// others; 0 without, since all clients behind a proxy have one address]
    #[arg(long, env = "TANDEM_MAX_SEQUENCES_PER_ACCOUNT", value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sequences_per_account: Option<u32>,

    /// The longest request body [default: 128 bytes for each token of the model's context, at least 4 MiB, at most 32 MiB: room for the
    /// longest prompt, none for accidents]
    #[arg(long, env = "TANDEM_MAX_BODY_BYTES", value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_body_bytes: Option<usize>,

    /// Bytes of all bodies that are read or parsed at once, besides the first 16 KiB of each; more are refused with 503. Enough for eight of
    /// the longest, little beside a model
    #[arg(long, env = "TANDEM_MAX_BODIES_BYTES", value_name = "BYTES", default_value_t = 256 << 20)]
    pub max_bodies_bytes: usize,

    /// Connections open at once; further ones are closed with 503. Eight for each sequence of the default, since most idle; a connection
    /// takes 32 KiB at most before its request has sequences
    #[arg(long, env = "TANDEM_MAX_CONNECTIONS", value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub max_connections: u32,

    /// Of these, connections from one address (of IPv6, from one /64). Half of the default for all, so that one client leaves room for others
    /// while a proxy has enough; 0, no bound, where one proxy is the only client
    #[arg(long, env = "TANDEM_MAX_CONNECTIONS_PER_ADDRESS", value_name = "N", default_value_t = 4096)]
    pub max_connections_per_address: u32,

    /// Names that clients may call this server in `Host`, with commas between, besides IP addresses and localhost. A listener on a loopback
    /// address refuses all others, because a web page could reach it under a name of its own; one on another address refuses them when
    /// names are given here
    #[arg(long, env = "TANDEM_ALLOWED_HOSTS", value_name = "NAMES", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "with_commas")]
    pub allowed_hosts: Vec<String>,
}

impl LimitFlags {
    /// The bound on the sequences of one client; `None`: there is none.
    pub fn sequences_per_client(&self, with_accounts: bool) -> Option<usize> {
        let default = if with_accounts { self.max_concurrent_requests.div_ceil(2) } else { 0 };
        match self.max_sequences_per_account.unwrap_or(default) {
            0 => None,
            bound => Some(bound as usize),
        }
    }
}
