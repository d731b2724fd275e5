//! What a process tells of itself: logs and traces.

use clap::{Args, ValueEnum};
use serde::Serialize;
use tandem_node::telemetry;

/// The same for every role.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TelemetryFlags {
    /// What is logged to stderr: a level, or directives such as `tandem_router=debug,info`; `info` tells state changes and sampled requests only
    #[arg(long, env = "TANDEM_LOG", value_name = "FILTER", default_value = "info")]
    pub log: String,

    /// How it is logged: `json` is an object a line, for programs
    #[arg(long, env = "TANDEM_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,

    /// Send traces to this collector, in OTLP over gRPC, such as http://localhost:4317; OTEL_EXPORTER_OTLP_ENDPOINT says it, too
    /// [default: no traces are made]
    #[arg(long, env = "TANDEM_OTLP_ENDPOINT", value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub otlp_endpoint: Option<String>,

    /// The part of requests that is traced, from 0 to 1: enough to see what is common, too little to cost anything. Requests of
    /// trusted proxies with a sampled `traceparent` are always traced
    #[arg(long, env = "TANDEM_TRACE_SAMPLE_RATIO", value_name = "RATIO", default_value_t = 0.01, value_parser = ratio)]
    pub trace_sample_ratio: f64,
}

/// How lines of a log look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people
    #[default]
    Text,
    /// For programs
    Json,
}

impl From<LogFormat> for telemetry::LogFormat {
    fn from(format: LogFormat) -> Self {
        match format {
            LogFormat::Text => Self::Text,
            LogFormat::Json => Self::Json,
        }
    }
}

fn ratio(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or("write a number from 0 to 1")
}
