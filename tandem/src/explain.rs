//! `tandem route explain`: asks a running frontend where a prompt would go, and shows why.

use crate::http;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::{fmt::Write as _, path::PathBuf};

/// What is asked.
#[derive(clap::Args, Debug)]
pub struct ExplainArgs {
    /// The frontend, host:port
    #[arg(long, env = "TANDEM_FRONTEND", value_name = "ADDRESS", default_value = "127.0.0.1:8000")]
    pub frontend: String,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Whose cache is asked: the request's `cache_salt`
    #[arg(long, value_name = "SALT")]
    cache_salt: Option<String>,
    /// Print what the frontend says as it says it
    #[arg(long)]
    json: bool,
}

/// One of them.
#[derive(clap::Args, Debug)]
#[group(required = true, multiple = false)]
struct PromptArgs {
    /// The prompt's text, as /v1/completions takes it
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// A file with the prompt's text
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// The prompt's token ids
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    tokens: Option<Vec<u32>>,
}

/// The text to print.
pub fn run(args: ExplainArgs) -> Result<String> {
    let prompt: Value = match args.prompt {
        PromptArgs { file: Some(path), .. } => {
            std::fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))?.into()
        }
        PromptArgs { tokens: Some(tokens), .. } => tokens.into(),
        PromptArgs { prompt, .. } => prompt.into(),
    };
    let models = call(&args.frontend, "GET", "/v1/models", "")?;
    let mut body = json!({ "model": models["data"][0]["id"], "prompt": prompt, "max_tokens": 1 });
    if let Some(salt) = args.cache_salt {
        body["cache_salt"] = salt.into();
    }
    let answer = call(&args.frontend, "POST", "/v1/completions", &body.to_string())?;
    if args.json { Ok(format!("{answer:#}\n")) } else { Ok(table(&answer["prompts"][0])) }
}

/// What the frontend says, if it is one and does not refuse.
fn call(frontend: &str, method: &str, path: &str, body: &str) -> Result<Value> {
    let (status, body) = http::ask(frontend, method, path, "content-type: application/json\r\nx-tandem-explain: true\r\n", body)
        .with_context(|| format!("no frontend answers at {frontend}; start one, or say where with --frontend"))?;
    let body: Value = serde_json::from_str(&body).context("what answers is no frontend; say where it is with --frontend")?;
    if let Some(message) = body["error"]["message"].as_str() {
        bail!("the frontend refuses: {message}");
    }
    ensure!(status == Some(200), "the frontend answers {}", status.unwrap_or_default());
    Ok(body)
}

/// For people: a line for each use of each worker.
fn table(prompt: &Value) -> String {
    let mut text = format!(
        "{} tokens, {} blocks of {} that may be reused\n\n",
        prompt["prompt_tokens"], prompt["reusable_blocks"], prompt["block_size"]
    );
    let columns = ["total", "queue", "compute", "others", "transfer", "handoff", "streams"];
    let mut line = |first: &str, cells: &[String]| {
        let cells: String = cells.iter().map(|cell| format!("{cell:>10}")).collect();
        writeln!(text, "{first:<28}{cells}").expect("a string takes all");
    };
    let heads: Vec<String> = ["overlap", "predicted", "queued"].into_iter().chain(columns).map(str::to_owned).collect();
    line("", &heads);
    for worker in prompt["workers"].as_array().into_iter().flatten() {
        for (key, name) in [("as_prefill", "prefills"), ("as_decode", "receives"), ("alone", "does both")] {
            let cost = &worker[key];
            if cost.is_null() {
                continue;
            }
            let counts = ["overlap_blocks", "predicted_blocks", "queued_tokens"].map(|key| worker[key].to_string());
            let rank = cost["rank"].as_f64().filter(|rank| *rank != 0.0);
            let ms = columns.map(|part| format!("{:.1}", cost[format!("{part}_ms")].as_f64().unwrap_or_default()));
            let cells: Vec<String> = match rank {
                Some(rank) => counts.into_iter().chain([format!("#{rank:.1}")]).collect(),
                None => counts.into_iter().chain(ms).collect(),
            };
            line(&format!("{} {name}", worker["worker"].as_str().unwrap_or_default()), &cells);
        }
    }
    writeln!(text, "\n{}", prompt["explanation"].as_str().unwrap_or_default()).expect("a string takes all");
    text
}
