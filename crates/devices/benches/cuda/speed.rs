//! Measures the speed of kernels, of prompts and of decode steps.

use super::{CHUNK, IDS, Outcome, ROUNDS, STEPS, blocks, engine, generate, median, prefill, settings};
use std::time::Instant;
use tandem_devices::cuda::{CudaModel, Timing, TimingCase};
use tandem_engine::{Chunk, EngineHandle, Event, Logits, Sampling};
use tandem_kv::TokenId;

/// The number of rounds for prompts that take seconds.
const ROUNDS_OF_LONG: usize = 2;
/// A prompt with at least this many tokens takes seconds.
const LONG: usize = 32_768;

/// Returns the median duration of a decode step in the engine's loop, in seconds. The step decodes `batch` sequences of about `context`
/// tokens, and samples on the device.
pub(super) fn decode(model: &CudaModel, batch: usize, context: usize, sampling: &Sampling) -> Outcome<f64> {
    let engine = EngineHandle::start(engine(model, batch * (context + 2 * STEPS))?, settings());
    let prompt =
        |number: usize| (0..context - STEPS / 2).map(|position| ((number + position) % IDS) as TokenId).collect::<Vec<_>>();
    let endless = Sampling { max_tokens: None, ..sampling.clone() };
    tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
        let mut jobs = Vec::new();
        for number in 0..batch {
            jobs.push(engine.generate(generate(number, prompt(number), endless.clone())).await?);
        }
        // From the first token of the last sequence on, every step decodes all sequences.
        let last = jobs.last_mut().expect("a batch has at least one sequence");
        let mut line = Vec::new();
        while line.len() <= STEPS {
            match last.next().await {
                Some(Event::Token { .. }) => line.push(Instant::now()),
                Some(Event::Scheduled { .. } | Event::Started(_)) => {}
                other => return Err(format!("a sequence ended with {other:?}").into()),
            }
        }
        drop(jobs);
        // The engine's memory must be free for the next case, and its thread must not be in a driver call when the process ends.
        engine.release().await;
        Ok(median(line.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect()))
    })
}

/// Returns the parts of a case, which are separated by colons.
fn parts(case: &str) -> (&str, Vec<&str>) {
    let mut parts = case.split(':');
    (parts.next().unwrap_or_default(), parts.collect())
}

fn unknown(case: &str) -> String {
    format!("{case} is no case of this command")
}

pub(super) fn kernels(model: &CudaModel, cases: &[&str]) -> Outcome<()> {
    let case = |text: &&str| -> Outcome<TimingCase> {
        let (kind, numbers) = parts(text);
        let numbers = numbers.into_iter().map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        Ok(match (kind, &numbers[..]) {
            ("ceilings", &[width, copy_bytes]) => TimingCase::Ceilings { width, copy_bytes },
            ("prompt", &[before, new]) => TimingCase::Prompt { before, new },
            ("decode", &[batch, context]) => TimingCase::Decode { batch, context },
            _ => return Err(unknown(text).into()),
        })
    };
    let cases = cases.iter().map(case).collect::<Outcome<Vec<_>>>()?;
    model.measure(&cases, &mut |Timing { what, case, seconds, flop, bytes }| {
        println!(r#"{{"what":"{what}","case":"{case}","seconds":{seconds:e},"flop":{flop:e},"bytes":{bytes:e}}}"#);
    })?;
    Ok(())
}

pub(super) fn speed(model: &CudaModel, cases: &[&str]) -> Outcome<()> {
    for case in cases {
        let (kind, rest) = parts(case);
        match (kind, &rest[..]) {
            ("prefill", [tokens]) => prompt(model, tokens.parse()?)?,
            ("cached", [before, new]) => cached(model, before.parse()?, new.parse()?)?,
            ("decode", [batch, context, mode]) => {
                let sampling = match *mode {
                    "greedy" => Sampling { temperature: 0.0, ..Sampling::default() },
                    "drawn" => Sampling { temperature: 0.8, top_p: 0.95, top_k: 40, ..Sampling::default() },
                    _ => return Err(unknown(case).into()),
                };
                let (batch, context): (usize, usize) = (batch.parse()?, context.parse()?);
                let seconds = decode(model, batch, context, &sampling)?;
                println!(r#"{{"what":"decode","sampling":"{mode}","batch":{batch},"context":{context},"seconds":{seconds}}}"#);
            }
            _ => return Err(unknown(case).into()),
        }
    }
    Ok(())
}

fn tokens(len: usize) -> Vec<TokenId> {
    (0..len).map(|token| (token % IDS) as TokenId).collect()
}

fn prompt(model: &CudaModel, len: usize) -> Outcome<()> {
    let (mut engine, tokens, blocks) = (engine(model, len)?, tokens(len), blocks(0, len));
    // The first round includes one-time initialisation.
    prefill(&mut *engine, &tokens[..len.min(CHUNK)], &blocks)?;
    let rounds = if len < LONG { ROUNDS } else { ROUNDS_OF_LONG };
    let seconds = (0..rounds).map(|_| prefill(&mut *engine, &tokens, &blocks)).collect::<Outcome<Vec<_>>>()?;
    println!(r#"{{"what":"prefill","tokens":{len},"seconds":{}}}"#, median(seconds));
    Ok(())
}

/// Measures the time of computing `before` tokens of a prompt, and of `new` tokens after them.
fn cached(model: &CudaModel, before: usize, new: usize) -> Outcome<()> {
    let len = before + new;
    let (mut engine, tokens, blocks) = (engine(model, len)?, tokens(len), blocks(0, len));
    prefill(&mut *engine, &tokens[..before.min(CHUNK)], &blocks)?;
    let whole_seconds = prefill(&mut *engine, &tokens[..before], &blocks)?;
    let mut seconds = Vec::new();
    for _ in 0..=ROUNDS {
        let began = Instant::now();
        engine.step(&[Chunk { tokens: &tokens[before..], start: before as u32, blocks: &blocks, logits: Logits::Last }])?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    let seconds = median(seconds[1..].to_vec());
    println!(r#"{{"what":"cached","before":{before},"new":{new},"seconds":{seconds},"whole_seconds":{whole_seconds}}}"#);
    Ok(())
}
