//! Moves KV blocks between engines: through host memory, by CUDA IPC from another process's memory, and over NCCL.

use super::{BLOCK, IDS, Options, Outcome, ROUNDS, blocks, engine, median, prefill};
use std::{
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
    time::Instant,
};
use tandem_devices::cuda::CudaModel;
use tandem_engine::{Chunk, Engine, Logits};
use tandem_kv::{BlockId, TokenId};

/// Returns a prompt whose number of tokens is the number in the text `tokens`.
fn prompt(tokens: &str) -> Outcome<Vec<TokenId>> {
    Ok((0..tokens.parse()?).map(|token| (token % IDS) as TokenId).collect())
}

/// Returns an engine that has computed the KV of all tokens of a prompt except the last one, in its first blocks. The engine's KV memory has
/// capacity for two more copies of these blocks.
fn computed(model: &CudaModel, tokens: &[TokenId]) -> Outcome<Box<dyn Engine>> {
    let mut engine = engine(model, 3 * tokens.len().next_multiple_of(BLOCK))?;
    prefill(&mut *engine, &tokens[..tokens.len() - 1], &blocks(0, tokens.len()))?;
    Ok(engine)
}

pub(super) fn source(model: &CudaModel, tokens: &str) -> Outcome<()> {
    let engine = computed(model, &prompt(tokens)?)?;
    let handle = engine.kv_memory().ok_or("this engine does not offer its memory to peers")?.ipc_handle()?;
    println!("{}", handle.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    // Waits until the other process closes the pipe.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

pub(super) fn transports(options: Options, model: &str, tokens: &str) -> Outcome<()> {
    let mut source = Command::new(std::env::current_exe()?)
        .args(["source", model, tokens])
        .args((!options.tuning).then_some("--untuned"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let tokens = prompt(tokens)?;
    let (mut engine, here) = (computed(&options.load(model)?, &tokens)?, blocks(0, tokens.len()));
    let mut line = String::new();
    BufReader::new(source.stdout.take().ok_or("the process has no output")?).read_line(&mut line)?;
    let digits: Vec<u8> = line.trim().chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    let handle: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair[pair.len() - 1]).collect();
    let memory = engine.kv_memory().ok_or("this engine does not offer its memory to peers")?;
    let ours = memory.open_peer(&memory.ipc_handle()?)?;
    let began = Instant::now();
    let theirs = memory.open_peer(&handle).map_err(|error| format!("{line}: {error}"))?;
    let open_seconds = began.elapsed().as_secs_f64();
    let [there, plain] = [1, 2].map(|times| blocks(times * here.len(), tokens.len()));
    let to = |blocks: &[BlockId]| here.iter().copied().zip(blocks.iter().copied()).collect::<Vec<_>>();
    let (mut copied, mut plainly) = (Vec::new(), Vec::new());
    for _ in 0..=ROUNDS {
        for (peer, blocks, seconds) in [(&theirs, &there, &mut copied), (&ours, &plain, &mut plainly)] {
            let (blocks, started) = (to(blocks), Instant::now());
            peer.copy(&blocks)?;
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    // The first round includes one-time initialisation.
    let [copied, plainly] = [copied, plainly].map(|seconds| median(seconds[1..].to_vec()));
    let start = tokens.len() - 1;
    let mut last = |blocks: &[BlockId]| {
        let chunk = Chunk { tokens: &tokens[start..], start: start as u32, blocks, logits: Logits::Last };
        engine.step(&[chunk]).map(|output| output.into_logits())
    };
    let equal = last(&here)? == last(&there)?;
    let began = Instant::now();
    drop(theirs);
    let close_seconds = began.elapsed().as_secs_f64();
    drop(source.stdin.take());
    source.wait()?;
    let bytes = here.len() * engine.describe().block_bytes;
    println!(
        r#"{{"what":"cuda_ipc","bytes":{bytes},"seconds":{copied},"plain_seconds":{plainly},"open_seconds":{open_seconds},"close_seconds":{close_seconds},"equal":{equal}}}"#
    );
    Ok(())
}

pub(super) fn nccl(model: &CudaModel) -> Outcome<()> {
    let (took, equal) = model.nccl_self_test(64 << 20)?;
    println!("{}, 64 MiB in {:.1} ms", if equal { "equal" } else { "DIFFERENT" }, took.as_secs_f64() * 1e3);
    Ok(())
}

pub(super) fn transfer(model: &CudaModel) -> Outcome<()> {
    let (mut from, mut to) = (engine(model, 1_024)?, engine(model, 1_024)?);
    let tokens: Vec<TokenId> = (0..200).map(|token| token * 7 % 90).collect();
    let (here, there) = (blocks(0, 200), blocks(20, 200));
    prefill(&mut *from, &tokens[..199], &here)?;
    let bytes = from.describe().block_bytes;
    let (mut sent, mut received) = (vec![0; bytes], vec![0; bytes]);
    for (here, there) in here.iter().zip(&there) {
        from.read_block(*here, &mut sent)?;
        to.write_block(*there, &sent)?;
        to.read_block(*there, &mut received)?;
        if sent != received {
            return Err(format!("block {} was received with other bytes", here.0).into());
        }
    }
    let last = |engine: &mut dyn Engine, blocks| {
        let chunk = Chunk { tokens: &tokens[199..], start: 199, blocks, logits: Logits::Last };
        engine.step(&[chunk]).map(|output| output.into_logits())
    };
    let (own, moved) = (last(&mut *from, &here)?, last(&mut *to, &there)?);
    if own != moved {
        return Err("decode on moved blocks differs from decode on the original ones".into());
    }
    println!("equal");
    Ok(())
}
