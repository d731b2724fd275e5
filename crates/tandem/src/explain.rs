//! `tandem route explain`: shows where a running cluster would place a prompt, and the costs that the router compares.

use crate::{
    http::HttpReply,
    server::{HttpServer, KEY_VARIABLE, ServerArgs, TRUST_ADVICE, wrong_kind},
    text_table::text_table,
};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;

/// The arguments of `tandem route explain`.
#[derive(clap::Args, Debug)]
pub struct ExplainArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Name of the environment variable that has the API key, for a frontend that needs one
    #[arg(long, value_name = "NAME", default_value = KEY_VARIABLE)]
    key_env: String,
    #[command(flatten)]
    prompt: PromptArgs,
    /// Id of the requested model [default: the first one in the frontend's /v1/models]
    #[arg(long, value_name = "ID")]
    model: Option<String>,
    /// The request's `cache_salt`, which selects the prefix cache
    #[arg(long, value_name = "SALT")]
    cache_salt: Option<String>,
    /// Print the frontend's reply unchanged, as JSON
    #[arg(long)]
    json: bool,
}

/// The prompt. Exactly one of these arguments must be given.
#[derive(clap::Args, Debug)]
#[group(required = true, multiple = false)]
struct PromptArgs {
    /// Text of the prompt, as /v1/completions takes it. For a chat, whose prompt the model's template writes, send the chat's request with the
    /// header `x-tandem-explain: true` in place of this command
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// File with the text of the prompt
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Token ids of the prompt, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    tokens: Option<Vec<u32>>,
}

/// Requests the explanation of a placement from the frontend, and returns it as JSON or as a table.
///
/// # Errors
/// Fails if the file cannot be read, if the frontend does not answer or refuses the request, or if there are no workers.
pub fn run(args: ExplainArgs) -> Result<String> {
    let prompt: Value = match args.prompt {
        PromptArgs { file: Some(path), .. } => {
            std::fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))?.into()
        }
        PromptArgs { tokens: Some(tokens), .. } => tokens.into(),
        PromptArgs { prompt, .. } => prompt.into(),
    };
    let server = args.server.open("tandem route explain --prompt TEXT", Some(&args.key_env))?;
    let model = match args.model {
        Some(model) => model.into(),
        None => reply(&server, &args.key_env, server.get("/v1/models"))?["data"][0]["id"].clone(),
    };
    let mut body = json!({ "model": model, "prompt": prompt, "max_tokens": 1 });
    if let Some(salt) = args.cache_salt {
        body["cache_salt"] = salt.into();
    }
    let answer = server.post("/v1/completions", ("x-tandem-explain", "true"), &body.to_string());
    let answer = reply(&server, &args.key_env, answer)?;
    if args.json {
        return Ok(format!("{answer:#}\n"));
    }
    let prompt = &answer["prompts"][0];
    let has_workers = prompt["workers"].as_array().is_some_and(|workers| !workers.is_empty());
    ensure!(has_workers, "{}", prompt["explanation"].as_str().unwrap_or("no worker has joined"));
    Ok(table(prompt))
}

const WANTED: &str = "`tandem route explain` asks a frontend; `tandem up` starts one at 127.0.0.1:8000";

/// Parses the frontend's reply.
///
/// Fails if the reply is an error, or if the server is not a frontend.
fn reply(server: &HttpServer, key_env: &str, reply: Result<HttpReply, ureq::Error>) -> Result<Value> {
    let reply = reply.map_err(|error| server.no_reply(error, WANTED))?;
    let Ok(body) = serde_json::from_str::<Value>(&reply.body) else {
        let other = || anyhow!("{} is not a frontend; {WANTED}", server.address);
        return Err(wrong_kind(&server.address, WANTED).unwrap_or_else(other));
    };
    if body["error"]["code"] == "unknown_path"
        && let Some(wrong) = wrong_kind(&server.address, WANTED)
    {
        bail!("{wrong}; an admin port needs --model");
    }
    if let Some(message) = body["error"]["message"].as_str() {
        ensure!(
            reply.status != 401,
            "the frontend refuses the API key ({message}); set the environment variable {key_env} to a valid key"
        );
        ensure!(
            body["error"]["code"] != "untrusted_client",
            "the frontend explains placements to trusted addresses only: {TRUST_ADVICE}"
        );
        bail!("the frontend refused the request: {message}");
    }
    ensure!(reply.status == 200, "the frontend answered with HTTP status {}", reply.status);
    Ok(body)
}

/// Formats the reply as a table for people. Each worker has one line for each role that it could take.
fn table(prompt: &Value) -> String {
    let costs = ["total", "queue", "compute", "load", "interference", "transfer", "handoff", "decode_load"];
    let mut notes = Vec::new();
    let mut rows = vec![["", "overlap", "predicted", "queued"].into_iter().chain(costs).map(str::to_owned).collect()];
    for worker in prompt["workers"].as_array().into_iter().flatten() {
        if let Some(reason) = worker["unpaired_reason"].as_str() {
            notes.push(format!("{} is not used: {reason}", worker["worker"].as_str().unwrap_or_default()));
        }
        let name = worker["worker"].as_str().unwrap_or_default();
        if let Some(note) = worker["index_note"].as_str() {
            notes.push(format!("{name}: {note}; the overlap is corrected"));
        }
        let tiers = worker["overlap_by_tier"].as_object().into_iter().flatten();
        let tiers: Vec<_> = tiers.map(|(tier, blocks)| format!("{blocks} blocks in tier {tier}")).collect();
        if !tiers.is_empty() {
            notes.push(format!("{name} holds the overlap as {}", tiers.join(", ")));
        }
        if worker["approximate_index"] == true {
            notes.push(format!("{name}'s overlap is assumed from the prompts routed to it: its engine publishes no KV events"));
        }
        for (key, name) in [("as_prefill", "prefills"), ("as_decode", "receives"), ("alone", "does both")] {
            let cost = &worker[key];
            if cost.is_null() {
                continue;
            }
            let mut row = vec![format!("{} {name}", worker["worker"].as_str().unwrap_or_default())];
            row.extend(["overlap_blocks", "predicted_blocks", "queued_tokens"].map(|key| worker[key].to_string()));
            row.extend(costs.map(|part| format!("{:.1}", cost[format!("{part}_ms")].as_f64().unwrap_or_default())));
            rows.push(row);
        }
    }
    notes.push(prompt["explanation"].as_str().unwrap_or_default().to_owned());
    format!(
        "{} tokens, {} blocks of {} tokens that may be reused\n\
         overlap and predicted in blocks, queued in tokens, costs in estimated milliseconds\n\n{}\n{}\n",
        prompt["prompt_tokens"],
        prompt["reusable_blocks"],
        prompt["block_size"],
        text_table(rows, 1),
        notes.join("\n")
    )
}
