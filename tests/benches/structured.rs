//! Measures structured outputs with a real model: whether every finished answer is valid, and the cost of the constraint. Each answer is
//! generated twice with the same number of tokens: under its schema, and without a constraint.
//!
//!     TANDEM_MODEL=$(tandem model fetch | tail -1) cargo bench -p tandem-tests --bench structured
#![expect(clippy::print_stdout, reason = "the figures are the benchmark's output")]

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::time::Duration;
use tandem_tests::{Answer, Client, Endpoint, cpu_settings, schemas, start};
use tokio::runtime::Builder;

const MAX_TOKENS: u32 = 256;

fn main() -> Result<()> {
    Builder::new_multi_thread().enable_all().build()?.block_on(run())
}

async fn run() -> Result<()> {
    let Some(settings) = cpu_settings() else { return Ok(()) };
    let cluster = start(settings).await?;
    let client = Client::new(cluster.frontend());
    let (mut finished, mut invalid, mut tokens) = (0, Vec::new(), 0);
    let (mut constrained_s, mut free_s) = (Duration::ZERO, Duration::ZERO);
    let schemas = schemas::all();
    for (seed, schema) in (0..).zip(&schemas) {
        let mut request = schema.request(&cluster.model_id(), MAX_TOKENS, seed);
        (request["stream"], request["stream_options"]) = (true.into(), json!({ "include_usage": true }));
        let constrained = answer(&client, &request).await?;
        let count = constrained.usage("/completion_tokens");
        if ended(&constrained) {
            finished += 1;
            invalid.extend(schema.check(&constrained.text(0)).err());
        }
        // If an answer has few tokens, the time from the first to the last one does not measure decoding.
        if count < 8 {
            continue;
        }
        (request["response_format"], request["max_tokens"], request["ignore_eos"]) = (Value::Null, count.into(), true.into());
        let free = answer(&client, &request).await?;
        ensure!(free.usage("/completion_tokens") == count, "{}: the answers have different lengths", schema.name);
        tokens += count - 1;
        constrained_s += decode_time(&constrained);
        free_s += decode_time(&free);
    }
    let per_token = |time: Duration| time.as_secs_f64() * 1e3 / tokens as f64;
    println!("{} schemas, at most {MAX_TOKENS} tokens each, one answer at a time:", schemas.len());
    println!("finished answers     {finished}");
    println!("of these invalid     {}", invalid.len());
    println!("decode time, free         {:.3} ms per token, {tokens} tokens", per_token(free_s));
    println!("decode time, constrained  {:.3} ms per token", per_token(constrained_s));
    println!("cost of the constraint    {:+.1} %", (constrained_s.as_secs_f64() / free_s.as_secs_f64() - 1.0) * 100.0);
    invalid.iter().for_each(|error| println!("INVALID: {error:#}"));
    cluster.stop().await;
    ensure!(invalid.is_empty(), "an answer is not valid");
    Ok(())
}

async fn answer(client: &Client, request: &Value) -> Result<Answer> {
    let answer = client.answer(Endpoint::Chat.path(), request).await?;
    ensure!(answer.status == 200 && answer.done, "{request}: {answer:?}");
    Ok(answer)
}

fn ended(answer: &Answer) -> bool {
    answer.frames.iter().any(|frame| frame["choices"][0]["finish_reason"] == "stop")
}

/// Returns the time from the first to the last chunk of the answer.
fn decode_time(answer: &Answer) -> Duration {
    let (first, last) = (answer.arrivals.first(), answer.arrivals.last());
    first.zip(last).map_or(Duration::ZERO, |(first, last)| last.duration_since(*first))
}
