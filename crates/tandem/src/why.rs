//! `tandem why`: says why tokens of a recent prompt were not cached, from the records of the frontend's dashboard.

use crate::{
    server::{FRONTEND, FRONTEND_ADMIN, HttpServer, KEY_VARIABLE, ServerArgs, TRUST_ADVICE, kind},
    text_table::text_table,
};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::cmp::Reverse;

/// The arguments of `tandem why`.
#[derive(clap::Args, Debug)]
pub struct WhyArgs {
    /// Id of the request: the `id` of its answer, or the header `x-request-id`; with -N at its end only its prompt of this index
    #[arg(value_name = "REQUEST-ID")]
    request_id: String,
    #[command(flatten)]
    server: ServerArgs,
    /// Print the records of the request's prompts unchanged, as JSON
    #[arg(long)]
    json: bool,
}

/// What the APIs put before a request's id in the `id` of its answer.
const ID_PREFIXES: [&str; 4] = ["chatcmpl-", "cmpl-", "resp_", "msg_"];

const WANTED: &str = "`tandem why` reads the dashboard of a frontend; write the address of its --admin-listen if it has one";

/// Returns why tokens of the request's prompts were not cached, as text or as JSON.
///
/// # Errors
/// Fails if the server has no dashboard, if the request is not among its recent ones, or if the router does not know the causes.
pub fn run(args: &WhyArgs) -> Result<String> {
    let server = args.server.open("tandem why REQUEST-ID", Some(KEY_VARIABLE))?;
    let id = &*args.request_id;
    let id = ID_PREFIXES.iter().find_map(|prefix| id.strip_prefix(prefix)).unwrap_or(id);
    let prompts = prompts(records(&server)?, id);
    ensure!(
        !prompts.is_empty(),
        "no request {} is among the recent prompts of {}: it may have been answered by another frontend, be running still, have been refused \
         before its placement, or be older than the last --dashboard-requests prompts",
        args.request_id,
        server.address
    );
    if args.json {
        return Ok(format!("{:#}\n", Value::from(prompts)));
    }
    Ok(prompts.iter().map(explained).collect::<Result<Vec<_>>>()?.join("\n"))
}

/// Returns the records of the frontend's recent prompts.
fn records(server: &HttpServer) -> Result<Vec<Value>> {
    let reply = server.get("/dashboard/requests").map_err(|error| server.no_reply(error, WANTED))?;
    let body: Value = serde_json::from_str(&reply.body).unwrap_or_default();
    match body["requests"].as_array() {
        Some(records) if reply.status == 200 => Ok(records.clone()),
        _ => match kind(&server.address) {
            Some(other) if ![FRONTEND, FRONTEND_ADMIN].contains(&other) => bail!("{} is {other}; {WANTED}", server.address),
            _ => bail!("the frontend at {} {}", server.address, refusal(reply.status)),
        },
    }
}

/// Returns why a frontend has answered a request for its records with this HTTP status.
fn refusal(status: u16) -> String {
    let advice = match status {
        403 => format!("shows its dashboard to trusted addresses only: {TRUST_ADVICE}"),
        _ => "has no dashboard here: write the address of its --admin-listen if it has one, or start it with --dashboard-requests above 0"
            .to_owned(),
    };
    format!("{advice} (HTTP status {status})")
}

/// Returns the records of the prompts of a request, or of the one prompt with this id.
fn prompts(records: Vec<Value>, wanted: &str) -> Vec<Value> {
    let is_wanted = |record: &Value| {
        let id = record["request_id"].as_str().unwrap_or_default();
        id == wanted || id.rsplit_once('-').is_some_and(|(request, _)| request == wanted)
    };
    records.into_iter().filter(is_wanted).collect()
}

/// Returns the sentence for one prompt, and its numbers as a table.
fn explained(record: &Value) -> Result<String> {
    let (prefix, id) = (&record["prefix"], record["request_id"].as_str().unwrap_or_default());
    ensure!(!prefix.is_null(), "{id} has no causes: it was not placed, or its router or frontend has an older version");
    let (Some(summary), Some(uncached)) = (prefix["summary"].as_str(), prefix["uncached"].as_object()) else {
        bail!("{id} has no causes: its worker has not reported how many tokens were cached");
    };
    let prompt = record["prompt_tokens"].as_u64().context("the record has no number of prompt tokens")?;
    let mut causes: Vec<(&str, u64)> = uncached.iter().map(|(cause, tokens)| (&**cause, tokens.as_u64().unwrap_or(0))).collect();
    causes.sort_by_key(|(_, tokens)| Reverse(*tokens));
    let found = prompt.saturating_sub(causes.iter().map(|(_, tokens)| tokens).sum());
    let mut rows = vec![vec!["prompt".to_owned(), prompt.to_string()]];
    for (name, field) in [("possible", "possible_tokens"), ("eligible", "eligible_tokens"), ("expected", "chosen_tokens")] {
        rows.push(vec![name.to_owned(), prefix[field].to_string()]);
    }
    rows.push(vec!["found".to_owned(), found.to_string()]);
    rows.extend(causes.iter().map(|(cause, tokens)| vec![cause.replace('_', " "), tokens.to_string()]));
    let mut text = format!("{id}\n{summary}\n\n{}", text_table(rows, 1));
    if let (Some(state), tokens) = (prefix["nearest"]["state"].as_str(), &prefix["nearest"]["tokens"]) {
        text += &format!("nearest prefix: {tokens} tokens, {state}\n");
    }
    if let (Some(worker), other) = (prefix["elsewhere"]["worker"].as_str(), &prefix["elsewhere"]) {
        let cost = match (other["more_ms"].as_f64(), other["saved_ms"].as_f64()) {
            (Some(more), saved) => {
                format!("{more:.1} ms more in total, though it saves {:.1} ms of computation", saved.unwrap_or(0.0))
            }
            (None, _) => "it could not compute the prompt".to_owned(),
        };
        text += &format!("on another worker: {} tokens on {worker}: {cost}\n", other["tokens"]);
    }
    Ok(text + &format!("regret: {:.1} ms\n", prefix["regret_ms"].as_f64().unwrap_or(0.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(id: &str, prefix: &Value) -> Value {
        json!({ "request_id": id, "prompt_tokens": 517, "prefix": prefix })
    }

    #[test]
    fn a_prompt_is_explained_by_a_sentence_and_its_numbers() -> Result<()> {
        let summary = "96 of 517 cached: 416 evicted 40 s ago from prefill-1; 5 after the last reusable block";
        let prefix = json!({
            "summary": summary, "possible_tokens": 96, "eligible_tokens": 96, "chosen_tokens": 96, "regret_ms": 0.0,
            "uncached": { "below_block": 5, "evicted": 416 }, "elsewhere": null,
            "nearest": { "worker": "prefill-1", "tokens": 512, "state": "evicted 40 s ago from prefill-1" },
        });
        let text = explained(&record("a-0", &prefix))?;
        assert!(text.starts_with(&format!("a-0\n{summary}\n")), "{text}");
        let numbers =
            |text: &str| text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>();
        for line in ["prompt 517", "possible 96", "found 96", "evicted 416", "below block 5"] {
            assert!(numbers(&text).contains(&line.to_owned()), "{line}: {text}");
        }
        assert!(text.ends_with("nearest prefix: 512 tokens, evicted 40 s ago from prefill-1\nregret: 0.0 ms\n"), "{text}");

        let mut other = prefix;
        other["uncached"] = json!({ "held_elsewhere": 32, "new_text": 10, "later_cause": 1 });
        other["elsewhere"] = json!({ "worker": "d2", "tokens": 48, "more_ms": 8.14, "saved_ms": 3 });
        let text = explained(&record("a-1", &other))?;
        assert!(numbers(&text).contains(&"later cause 1".to_owned()), "{text}");
        assert!(text.contains("48 tokens on d2: 8.1 ms more in total, though it saves 3.0 ms of computation\n"), "{text}");
        other["elsewhere"]["more_ms"] = Value::Null;
        assert!(explained(&record("a-1", &other))?.contains("48 tokens on d2: it could not compute the prompt\n"));
        Ok(())
    }

    #[test]
    fn missing_causes_are_an_error_that_says_why() {
        for (prefix, expected) in
            [(json!(null), "not placed, or its router"), (json!({ "uncached": null }), "worker has not reported")]
        {
            let error = explained(&record("a-0", &prefix)).expect_err("there are no causes").to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn refusal_names_the_flags_that_help() {
        for (status, flag, other) in [(403, "--trusted-proxies", "--dashboard"), (404, "--dashboard-requests", "--trusted")] {
            let text = refusal(status);
            assert!(text.contains(flag) && !text.contains(other) && text.contains(&status.to_string()), "{text}");
        }
    }

    #[test]
    fn an_id_names_all_prompts_of_a_request_or_one() {
        let found = |wanted| {
            let records = ["a-b-0", "a-b-1", "a-c-0"].map(|id| record(id, &json!(null)));
            prompts(records.to_vec(), wanted).iter().map(|record| record["request_id"].clone()).collect::<Vec<_>>()
        };
        assert_eq!(found("a-b"), ["a-b-0", "a-b-1"]);
        assert_eq!(found("a-b-1"), ["a-b-1"]);
        assert!(found("a").is_empty());
    }
}
