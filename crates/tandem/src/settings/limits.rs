//! Limits on the resources that clients can use.

use super::common::with_commas;
use clap::Args;
use serde::Serialize;
use std::time::Duration;
use tandem_process::listen::Hosts;

/// The frontend's limits on connections, memory and sequences.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Limits")]
#[serde(rename_all = "kebab-case")]
pub struct LimitArgs {
    /// Limit on the sequences of one account (of --api-keys-file or --account-header) within --max-concurrent-requests; requests without an
    /// account are counted by client address, unless that address is in --trusted-proxies. Requests beyond the limit are refused with 429. 0 means no limit:
    /// set it where all clients connect through a proxy that is not in --trusted-proxies [default: half of --max-concurrent-requests, so
    /// that one client leaves capacity to others]
    #[arg(long, env = "TANDEM_MAX_SEQUENCES_PER_ACCOUNT", value_name = "N")]
    pub max_sequences_per_account: Option<u32>,

    /// Longest wait of a request for its prefill, or for a place and memory on its decode worker, in seconds; `off` or 0 means no limit. If the router
    /// expects a longer wait, the request is refused at once with 503 (by an endpoint picker: 429) and `Retry-After`; if the wait turns out longer, the request is refused a second
    /// after the limit, unless another worker can begin at once. The default is about as long as a reader waits for an answer that has not begun. Clients can set less
    /// with the header `x-max-wait`
    #[arg(long, env = "TANDEM_MAX_WAIT", value_name = "SECONDS", default_value = "10", value_parser = max_wait)]
    pub max_wait: f64,

    /// Size limit of a request body [default: 128 bytes for each token of the model's context, at least 4 MiB, at most 32 MiB: the longest
    /// prompt fits, and a body sent by mistake is refused]
    #[arg(long, env = "TANDEM_MAX_BODY_BYTES", value_name = "BYTES")]
    pub max_body_bytes: Option<usize>,

    /// Memory for all request bodies that are read or parsed at once, not counting the first 16 KiB of each; requests beyond the limit are
    /// refused with 503. The default holds eight of the longest bodies, and is little compared with a model
    #[arg(long, env = "TANDEM_MAX_BODIES_BYTES", value_name = "BYTES", default_value_t = 256 << 20)]
    pub max_bodies_bytes: usize,

    /// Memory for texts of earlier prompts and their tokens, so that the text between two special tokens is not tokenized again, such as a message of a
    /// conversation; 0: each prompt is tokenized in full. The default holds about 4 million tokens, and no other namespace of the prefix cache
    /// uses what one namespace has added
    #[arg(long, env = "TANDEM_ENCODING_CACHE_BYTES", value_name = "BYTES", default_value_t = 32 << 20)]
    pub encoding_cache_bytes: usize,

    /// How many connections may be open at once; further ones are closed with 503. The default is eight for each sequence of the default
    /// of --max-concurrent-requests, because most connections are idle; one takes 32 KiB at most until its request is admitted
    #[arg(long, env = "TANDEM_MAX_CONNECTIONS", value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub max_connections: u32,

    /// How many of the --max-connections connections one address (IPv6: one /64) may have open at once. The default is half of that
    /// flag's default, so that one client leaves capacity to others and a proxy has enough; addresses in --trusted-proxies are exempt. 0
    /// means no limit
    #[arg(long, env = "TANDEM_MAX_CONNECTIONS_PER_ADDRESS", value_name = "N", default_value_t = 4096)]
    pub max_connections_per_address: u32,

    /// The names under which the frontend answers.
    #[command(flatten)]
    #[serde(flatten)]
    pub hosts: HostArgs,
}

/// The names under which a process answers HTTP requests.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct HostArgs {
    /// Names that the `Host` header may have besides IP addresses, localhost and names that end in .localhost, separated by commas. The
    /// admin port (--admin-listen) refuses all other names with 421, because a web page could point a name of its own at it (DNS
    /// rebinding). So does the API's port on a loopback address, and on another address if names are set here
    #[arg(long, env = "TANDEM_ALLOWED_HOSTS", help_heading = "Process", value_name = "NAMES", value_delimiter = ',')]
    #[serde(serialize_with = "with_commas")]
    allowed_hosts: Vec<String>,
}

impl HostArgs {
    /// Returns the names that requests may have in the header `Host`.
    pub fn hosts(&self) -> Hosts {
        Hosts::new(self.allowed_hosts.iter().cloned())
    }
}

impl LimitArgs {
    /// Returns the longest time for which a request may wait in the queue; `None` if there is no limit.
    pub fn max_wait(&self) -> Option<Duration> {
        (self.max_wait > 0.0).then(|| Duration::from_secs_f64(self.max_wait))
    }

    /// Returns how many of `all` sequences one client may use; `None` if there is no limit.
    pub fn sequences_per_client(&self, all: u32) -> Option<usize> {
        match self.max_sequences_per_account.unwrap_or(all.div_ceil(2)) {
            0 => None,
            bound => Some(bound as usize),
        }
    }
}

/// Reads a number of seconds, at most a day; 0 for `off`.
fn max_wait(text: &str) -> Result<f64, &'static str> {
    let seconds = if text == "off" { Some(0.0) } else { text.parse().ok() };
    seconds.filter(|seconds| (0.0..=86_400.0).contains(seconds)).ok_or("write a number of seconds from 0 to 86400, or off")
}
