//! Settings of logs and traces.

use clap::Args;
use serde::Serialize;
use tandem_process::telemetry::LogFormat;

/// Logs and traces, for every role.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Logs and traces")]
#[serde(rename_all = "kebab-case")]
pub struct TelemetryArgs {
    /// Filter of the log on stderr: a level, or directives such as `tandem_router=debug,info`. The default logs changes of state and
    /// sampled requests
    #[arg(long, env = "TANDEM_LOG", value_name = "FILTER", default_value = "info")]
    pub log: String,

    /// Format of the log
    #[arg(long, env = "TANDEM_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,

    /// Send traces to this collector, in OTLP over gRPC, such as http://localhost:4317 [default: the value of OTEL_EXPORTER_OTLP_ENDPOINT,
    /// else no traces are sent]
    #[arg(long, env = "TANDEM_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,

    /// Share of requests that are traced, from 0 to 1. The default is a sample that has no measurable cost. Requests of trusted proxies
    /// with a sampled `traceparent` are always traced
    #[arg(long, env = "TANDEM_TRACE_SAMPLE_RATIO", value_name = "RATIO", default_value_t = 0.01, value_parser = ratio)]
    pub trace_sample_ratio: f64,
}

fn ratio(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or("write a number from 0 to 1")
}
