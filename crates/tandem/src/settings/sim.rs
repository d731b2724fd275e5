//! Settings of the simulated device.

use clap::Args;
use serde::Serialize;

/// The simulated device's cost model. The defaults are those of one large GPU with an 8B model.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Simulated device (--engine sim)")]
#[serde(rename_all = "kebab-case")]
pub struct SimArgs {
    /// Factor by which the simulated device is faster than the cost model says
    #[arg(long, env = "TANDEM_SIM_SPEEDUP", value_name = "FACTOR", default_value_t = 1.0, value_parser = positive)]
    pub sim_speedup: f64,

    /// Prompt tokens computed per second
    #[arg(long, env = "TANDEM_SIM_PREFILL_TOKENS_PER_SECOND", value_name = "RATE", default_value_t = 20_000.0, value_parser = positive)]
    pub sim_prefill_tokens_per_second: f64,

    /// Milliseconds added to every step that computes prompt tokens
    #[arg(long, env = "TANDEM_SIM_PREFILL_OVERHEAD_MS", value_name = "MS", default_value_t = 4.0, value_parser = not_negative)]
    pub sim_prefill_overhead_ms: f64,

    /// Milliseconds of a step that generates tokens
    #[arg(long, env = "TANDEM_SIM_DECODE_STEP_MS", value_name = "MS", default_value_t = 6.0, value_parser = not_negative)]
    pub sim_decode_step_ms: f64,

    /// Milliseconds added to a step that generates tokens, for each of its sequences
    #[arg(long, env = "TANDEM_SIM_DECODE_PER_SEQUENCE_MS", value_name = "MS", default_value_t = 0.1, value_parser = not_negative)]
    pub sim_decode_per_sequence_ms: f64,

    /// Bytes transferred for the KV of one token
    #[arg(long, env = "TANDEM_SIM_KV_BYTES_PER_TOKEN", value_name = "BYTES", default_value_t = 131_072.0, value_parser = not_negative)]
    pub sim_kv_bytes_per_token: f64,

    /// Bytes transferred between workers per second
    #[arg(long, env = "TANDEM_SIM_TRANSFER_BYTES_PER_SECOND", value_name = "RATE", default_value_t = 10e9, value_parser = positive)]
    pub sim_transfer_bytes_per_second: f64,
}

pub(super) fn positive(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|&number: &f64| number.is_finite() && number > 0.0).ok_or("write a number above 0")
}

fn not_negative(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|&number: &f64| number.is_finite() && number >= 0.0).ok_or("write a number of 0 or more")
}
