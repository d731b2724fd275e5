//! `tandem bench rates`: measures the rates of a running server, as flags for `tandem bench simulate`.

use super::{bearer, replay::seconds, simulate::CHUNK_BUDGET};
use crate::{
    serve::{self, Signals},
    server::{KEY_VARIABLE, ServerArgs},
    text_table::text_table,
};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::{io::stderr, time::Duration};
use tandem_load::{AUTHORIZATION, HeaderMap, MeasuredRates, RateSettings};
use tandem_process::telemetry::tell;

/// The arguments of `tandem bench rates`.
#[derive(Args, Debug)]
pub struct RatesArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Id of the model [default: the first one that the server's /v1/models lists]
    #[arg(long, value_name = "ID")]
    model: Option<String>,
    /// Name of the environment variable that has the API key, for a server that needs one
    #[arg(long, value_name = "NAME", default_value = KEY_VARIABLE)]
    key_env: String,
    /// Prompt tokens that the workers compute in one step
    #[arg(long, value_name = "TOKENS", default_value_t = CHUNK_BUDGET, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    prefill_chunk_budget: u32,
    /// Tokens of the longest prompt. Prompts are doubled until one takes four seconds
    #[arg(long, value_name = "TOKENS", default_value_t = 8_192, value_parser = clap::value_parser!(u32).range(128..=1_048_576))]
    prompt_tokens_max: u32,
    /// Largest number of answers at the same time
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(2..=4_096))]
    batch_max: u32,
    /// Time limit for all measurements
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    timeout: Duration,
}

/// Measures the server, and prints the measurements and the flags, and on stderr each measurement as it is made. A signal ends the run.
///
/// # Errors
/// The server cannot be measured.
pub fn run(args: &RatesArgs) -> Result<()> {
    let place = args.server.place("tandem bench rates")?;
    place.check()?;
    let mut headers = HeaderMap::new();
    headers.extend(bearer(&args.key_env)?.map(|key| (AUTHORIZATION, key)));
    let settings = RateSettings {
        url: place.address.url().to_owned(),
        ca: place.authority()?,
        model: args.model.clone(),
        headers,
        prompt_tokens_max: args.prompt_tokens_max.into(),
        chunk_tokens: args.prefill_chunk_budget.into(),
        batch_max: args.batch_max as usize,
        timeout: args.timeout,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("the process cannot start threads")?;
    let measured = runtime.block_on(async {
        let mut signals = Signals::new().context("the process cannot receive signals")?;
        tokio::select! {
            measured = tandem_load::rates(&settings, |line| tell(stderr(), &(line + "\n"))) => Ok(measured?),
            () = signals.next() => bail!("stopped"),
        }
    });
    runtime.shutdown_background();
    serve::print(&text(&measured?, args.prefill_chunk_budget))
}

/// Returns the measurements as two tables, and the flags on the last line.
fn text(rates: &MeasuredRates, chunk_budget: u32) -> String {
    let number = |value: f64| format!("{value:.2}");
    let mut prompts = vec![["computed tokens", "TTFT ms"].map(str::to_owned).to_vec()];
    prompts.extend(rates.prompts.iter().map(|(tokens, ms)| vec![tokens.to_string(), number(*ms)]));
    let mut batches = vec![["answers at once", "ITL ms"].map(str::to_owned).to_vec()];
    batches.extend(rates.batches.iter().map(|(batch, ms)| vec![batch.to_string(), number(*ms)]));
    let divided = match rates.decode_workers {
        1 => String::new(),
        workers => {
            format!("\nThe answers were divided among {workers} workers. Measure a server with one worker for exact rates.\n")
        }
    };
    let noisy = match (rates.batches.first(), rates.batches.last()) {
        (Some((_, few)), Some((_, many))) if many < few => {
            "\nLarger batches were not slower, so the measurement is too noisy: repeat it on a machine that does nothing else.\n"
        }
        _ => "",
    };
    let flags = [
        ("sim-prefill-tokens-per-second", rates.prefill_tokens_per_second),
        ("sim-prefill-overhead-ms", rates.prefill_step_ms),
        ("sim-decode-step-ms", rates.decode_step_ms),
        ("sim-decode-per-sequence-ms", rates.decode_sequence_ms),
    ];
    let flags: String = flags.iter().map(|(flag, value)| format!("--{flag} {value:.3} ")).collect();
    format!(
        "{}\n{}{divided}{noisy}\nFor tandem bench simulate:\n{flags}--prefill-chunk-budget {chunk_budget}\n",
        text_table(prompts, 0),
        text_table(batches, 0)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_are_faster_in_larger_batches_are_called_noise() {
        let printed = |ms: [f64; 2]| {
            let rates = MeasuredRates {
                prefill_tokens_per_second: 900.0,
                prefill_step_ms: 1.0,
                decode_step_ms: 20.0,
                decode_sequence_ms: 0.0,
                prompts: vec![(128, 150.0)],
                batches: vec![(1.0, ms[0]), (32.0, ms[1])],
                decode_workers: 1,
            };
            text(&rates, 512)
        };
        assert!(printed([20.0, 15.0]).contains("too noisy") && !printed([20.0, 21.0]).contains("too noisy"));
    }
}
