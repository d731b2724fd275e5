//! Checks that the results of decoding, sampling and transfers are correct.

use super::{BLOCK, Outcome, STEPS, blocks, engine, generate, settings, speed::decode, transfers::transfer};
use std::{error::Error, fs};
use tandem_devices::cuda::CudaModel;
use tandem_engine::{Chunk, EngineHandle, Event, Logits, Sampling};
use tandem_kv::TokenId;

const GREEDY: usize = 32;
/// The number of concurrent sequences. Decode steps are padded to six rows for them.
const BATCH: usize = 5;
/// Two logits of a row count as equal if they differ by less than this many standard deviations of the row, as in bench/gpu.py.
const TIE: f64 = 5e-2;

fn likeliest(logits: &[f32]) -> TokenId {
    let largest = |best: usize, at: usize| if logits[at] > logits[best] { at } else { best };
    (0..logits.len()).fold(0, largest) as TokenId
}

pub(super) fn logits(model: &CudaModel, tokens: &str, chunk: &str, out: &str) -> Outcome<()> {
    let (mut tokens, len) = (tokens.split(',').map(str::parse).collect::<Result<Vec<TokenId>, _>>()?, chunk.parse::<usize>()?);
    let blocks = blocks(0, tokens.len() + GREEDY);
    let mut engine = engine(model, blocks.len() * BLOCK)?;
    let mut all = Vec::new();
    for (i, tokens) in tokens.chunks(len).enumerate() {
        let chunk = Chunk { tokens, start: (i * len) as u32, blocks: &blocks, logits: Logits::All };
        all.extend(engine.step(&[chunk])?.into_logits());
    }
    fs::write(out, all.iter().flat_map(|logit| logit.to_le_bytes()).collect::<Vec<u8>>())?;
    let mut next = likeliest(&all[all.len() - engine.describe().vocab_size..]);
    let mut greedy = Vec::new();
    for _ in 0..GREEDY {
        greedy.push(next.to_string());
        tokens.push(next);
        let start = tokens.len() - 1;
        let chunk = Chunk { tokens: &tokens[start..], start: start as u32, blocks: &blocks, logits: Logits::Last };
        next = likeliest(&engine.step(&[chunk])?.into_logits());
    }
    println!("{}", greedy.join(","));
    Ok(())
}

pub(super) fn replayed(model: &CudaModel) -> Outcome<()> {
    let mut plain = engine(model, 1_024)?;
    let handle = EngineHandle::start(engine(model, BATCH * 1_024)?, settings());
    // The prompts have different lengths. One of them is long enough for several attention partitions.
    let prompts: Vec<Vec<TokenId>> =
        (0..BATCH).map(|number| (0..40 + number * 150).map(|token| (token * 7 + number) as TokenId % 500).collect()).collect();
    let greedy = Sampling { temperature: 0.0, max_tokens: Some(STEPS as u32), ..Sampling::default() };
    let tokens: Vec<Vec<TokenId>> = tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
        let (mut jobs, mut all) = (Vec::new(), Vec::new());
        for (number, prompt) in prompts.iter().enumerate() {
            jobs.push(handle.generate(generate(number, prompt.clone(), greedy.clone())).await?);
        }
        for job in &mut jobs {
            let mut line = Vec::new();
            while line.len() < STEPS {
                match job.next().await {
                    Some(Event::Token { token, .. }) => line.push(token),
                    Some(Event::Scheduled { .. } | Event::Started(_)) => {}
                    other => return Err(format!("a sequence ended with {other:?}").into()),
                }
            }
            all.push(line);
        }
        drop(jobs);
        // The engine's thread must not be in a driver call when the process ends.
        handle.release().await;
        Ok::<_, Box<dyn Error>>(all)
    })?;
    for (prompt, line) in prompts.iter().zip(&tokens) {
        let (sequence, blocks) = ([&prompt[..], line].concat(), blocks(0, prompt.len() + STEPS));
        let chunk = Chunk { tokens: &sequence, start: 0, blocks: &blocks, logits: Logits::All };
        let logits = plain.step(&[chunk])?.into_logits();
        let rows = logits.chunks(plain.describe().vocab_size).skip(prompt.len() - 1);
        for (place, (row, token)) in rows.zip(line).enumerate() {
            let mean = row.iter().map(|logit| f64::from(*logit)).sum::<f64>() / row.len() as f64;
            let variance = row.iter().map(|logit| (f64::from(*logit) - mean).powi(2)).sum::<f64>() / row.len() as f64;
            let likeliest = likeliest(row);
            let [best, found] = [likeliest, *token].map(|token| f64::from(row[token as usize]));
            // The comparison is false if one of the logits is a NaN.
            let tied = best - found <= TIE * variance.sqrt();
            if !tied {
                return Err(format!("token {place} after {} of the prompt is {token}, not {likeliest}", prompt.len()).into());
            }
        }
    }
    println!("equal");
    Ok(())
}

pub(super) fn exercise(model: &CudaModel) -> Outcome<()> {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let random = Sampling { temperature: 0.8, top_p: 0.95, top_k: 40, min_p: 0.01, ..Sampling::default() };
    let (logprobs, logit_bias) = (Some(3), [(7, 1.5)].into());
    let penalised = Sampling {
        frequency_penalty: 0.3,
        presence_penalty: 0.2,
        repetition_penalty: 1.1,
        logprobs,
        logit_bias,
        ..random.clone()
    };
    for (batch, sampling) in [(1, &greedy), (BATCH, &random), (BATCH, &penalised)] {
        decode(model, batch, 150, sampling)?;
    }
    transfer(model)
}
