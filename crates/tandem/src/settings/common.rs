//! Settings that every serving process has.

use super::{KeyArgs, TelemetryArgs};
use clap::{Args, builder::NonEmptyStringValueParser};
use serde::{Serialize, Serializer};
use std::{
    fmt::Display,
    net::{Ipv4Addr, SocketAddr},
};
use tandem_proto::channel;

/// The settings of `tandem up` and of every role.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Process")]
#[serde(rename_all = "kebab-case")]
pub struct CommonArgs {
    /// Address and port of the OpenAI API. The default accepts connections from this machine only, because clients need no API key unless
    /// --api-keys-file is set
    #[arg(long, env = "TANDEM_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:8000", value_parser = listen_address)]
    pub listen: SocketAddr,

    /// How long running requests may continue after SIGTERM or Ctrl-C, in seconds. The default is longer than most answers take
    #[arg(long, env = "TANDEM_GRACE_PERIOD", value_name = "SECONDS", default_value_t = 30)]
    pub grace_period: u64,

    /// Tokens in a KV block, the unit of prefix reuse; the same in the whole cluster. Smaller blocks match more of a prompt and cost more
    /// bookkeeping
    #[arg(long, env = "TANDEM_BLOCK_SIZE", value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub block_size: u32,

    /// The id that clients send as `model` [default: the name of the model's file or directory]
    #[arg(long, env = "TANDEM_SERVED_MODEL_NAME", value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
    pub served_model_name: Option<String>,

    /// The cluster key.
    #[command(flatten)]
    #[serde(flatten)]
    pub key: KeyArgs,

    /// Logs and traces.
    #[command(flatten)]
    #[serde(flatten)]
    pub telemetry: TelemetryArgs,
}

/// Serializes a list as one string with commas between its items, the form that its flag has on the command line. An empty list is left
/// out.
pub(super) fn with_commas<T: Display, S: Serializer>(list: &[T], serializer: S) -> Result<S::Ok, S::Error> {
    if list.is_empty() {
        return serializer.serialize_none();
    }
    serializer.serialize_str(&list.iter().map(T::to_string).collect::<Vec<_>>().join(","))
}

/// Parses host:port. A port alone is one of this machine.
pub(crate) fn address(text: &str) -> Result<String, &'static str> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok(format!("127.0.0.1:{port}"));
    }
    channel::endpoint(text).map(|_| text.to_owned()).map_err(|_| "write host:port")
}

/// Parses the address of a listener: IP and port. A port alone, or with `localhost`, is one of the loopback address.
pub(super) fn listen_address(text: &str) -> Result<SocketAddr, &'static str> {
    const ADVICE: &str = "write a port, localhost:PORT, or IP:PORT (0.0.0.0:PORT accepts connections from all hosts)";
    let port = text.strip_prefix("localhost:").unwrap_or(text).parse::<u16>();
    port.map(|port| (Ipv4Addr::LOCALHOST, port).into()).or_else(|_| text.parse()).map_err(|_| ADVICE)
}
