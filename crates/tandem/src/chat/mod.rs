//! `tandem chat`: a conversation with a model in the terminal, over any server with OpenAI's API.

mod answer;
mod input;

use crate::{
    serve::printable,
    server::{HttpServer, KEY_VARIABLE, ServerAddress, ServerArgs, wrong_kind},
};
use answer::{AnswerSummary, Answers, ChatPiece};
use anyhow::{Context, Result, anyhow, bail};
use input::{EnteredLine, UserInput};
use serde_json::{Value, json};
use std::{
    io::{IsTerminal, Write, stdout},
    sync::Arc,
};
use tandem_process::retry::error_chain;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The arguments of `tandem chat`.
#[derive(clap::Args, Debug)]
pub struct ChatArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Id of the model [default: the first one that the server's /v1/models lists]
    #[arg(long, value_name = "ID")]
    model: Option<String>,
    /// The system message at the beginning of each conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// The maximum number of tokens of an answer [default: what the server allows]
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// Name of the environment variable that has the API key, for a server that needs one
    #[arg(long, value_name = "NAME", default_value = KEY_VARIABLE)]
    key_env: String,
}

const HELP: &str = "/clear  begins another conversation\n/quit   ends the program, as Ctrl-D does\nCtrl-C  ends the answer that is being written\n";

pub(super) const WANTED: &str =
    "`tandem chat` needs a frontend, or another server with OpenAI's API; `tandem up` starts one at 127.0.0.1:8000";

/// A conversation with a server.
struct ChatSession {
    args: ChatArgs,
    server: Arc<HttpServer>,
    model: String,
    messages: Vec<Value>,
}

/// Reads messages and prints answers until the input ends or the user quits. Without a terminal, each line of the input is a message.
///
/// # Errors
/// The server cannot be reached, refuses the key or lists no model; without a terminal, also if it refuses a message.
pub fn run(args: ChatArgs) -> Result<()> {
    let server = Arc::new(args.server.open(Some(&args.key_env))?);
    let model = match &args.model {
        Some(model) => model.clone(),
        None => first_model(&server, &args.key_env)?,
    };
    let mut input = UserInput::open()?;
    let mut chat = ChatSession { args, server, model, messages: Vec::new() };
    chat.clear();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("the process cannot start threads")?;
    let is_terminal = input.is_terminal();
    if is_terminal {
        show(&format!("{} at {}; /help lists the commands\n", chat.model, chat.server.address))?;
    }
    let done = runtime.block_on(async {
        loop {
            let message = match input.next()? {
                EnteredLine::End => return Ok(()),
                EnteredLine::Interrupted => {
                    show("/quit or Ctrl-D ends the program\n")?;
                    continue;
                }
                EnteredLine::Text(text) => text,
            };
            match message.trim() {
                "" => continue,
                "/quit" | "/exit" => return Ok(()),
                "/clear" => chat.clear(),
                "/help" => show(HELP)?,
                command if command.starts_with('/') && !command.contains(' ') && is_terminal => {
                    show(&format!("there is no command {command}\n{HELP}"))?;
                }
                _ => match chat.answer(message, is_terminal).await {
                    Ok(()) => {}
                    // In a terminal, the user may send another message.
                    Err(error) if is_terminal => show(&(error_chain(error.as_ref()) + "\n"))?,
                    Err(error) => return Err(error),
                },
            }
        }
    });
    // A thread that reads an interrupted answer may wait for its next event.
    runtime.shutdown_background();
    done
}

impl ChatSession {
    fn clear(&mut self) {
        self.messages = self.args.system.iter().map(|text| json!({ "role": "system", "content": text })).collect();
    }

    /// Sends the conversation with this message, and prints the answer as it arrives. Ctrl-C ends the answer: what has arrived stays in the
    /// conversation.
    async fn answer(&mut self, message: String, is_terminal: bool) -> Result<()> {
        self.messages.push(json!({ "role": "user", "content": message }));
        let mut body = json!({
            "model": self.model, "messages": self.messages, "stream": true, "stream_options": { "include_usage": true },
        });
        if let Some(max_tokens) = self.args.max_tokens {
            body["max_tokens"] = max_tokens.into();
        }
        let mut answers = Answers::request(Arc::clone(&self.server), &self.args.key_env, &body);
        // Without a terminal, Ctrl-C ends the program as usual.
        let mut interrupt = if is_terminal { Some(signal(SignalKind::interrupt())?) } else { None };
        let (mut summary, mut text) = (AnswerSummary::begin(), String::new());
        let mut result = Ok(());
        loop {
            let piece = tokio::select! {
                biased;
                () = interrupted(&mut interrupt) => break,
                piece = answers.next() => piece,
            };
            match piece {
                None => break,
                Some(Ok(ChatPiece::Reasoning(reasoning))) => {
                    summary.text_arrived();
                    let text = printable(&reasoning);
                    write(&if stdout().is_terminal() { format!("\x1b[2m{text}\x1b[0m") } else { text })?;
                }
                Some(Ok(ChatPiece::Content(content))) => {
                    summary.text_arrived();
                    show(&content)?;
                    text += &content;
                }
                Some(Ok(ChatPiece::Usage(usage))) => summary.usage = Some(usage),
                Some(Err(error)) => {
                    result = Err(error);
                    break;
                }
            }
        }
        let is_refused = text.is_empty() && result.is_err();
        if text.is_empty() {
            // A message without an answer is not sent again with the next one.
            self.messages.pop();
        } else {
            self.messages.push(json!({ "role": "assistant", "content": text }));
        }
        if !is_refused {
            show(&format!("\n{summary}\n"))?;
        }
        result
    }
}

/// Resolves at Ctrl-C; never without a handler.
async fn interrupted(interrupt: &mut Option<Signal>) {
    match interrupt {
        Some(interrupt) => drop(interrupt.recv().await),
        None => std::future::pending().await,
    }
}

/// Returns the id of the first model of the server.
fn first_model(server: &HttpServer, key_env: &str) -> Result<String> {
    let reply = server.get("/v1/models").map_err(|error| server.no_reply(error, WANTED))?;
    if let (404, Some(wrong)) = (reply.status, wrong_kind(&server.address, WANTED)) {
        return Err(wrong);
    }
    let body = check(reply.status, &reply.body, &server.address, key_env)?;
    let id = body["data"][0]["id"].as_str().map(str::to_owned);
    id.ok_or_else(|| anyhow!("the server at {} lists no model; name one with --model", server.address))
}

/// Parses a reply. Fails with advice if it is an error or not OpenAI's.
fn check(status: u16, body: &str, server: &ServerAddress, key_env: &str) -> Result<Value> {
    let parsed = serde_json::from_str::<Value>(body);
    let message = parsed.as_ref().ok().and_then(|body| {
        let error = &body["error"];
        error["message"].as_str().or_else(|| error.as_str()).or_else(|| body["message"].as_str())
    });
    match (status, message) {
        (200, _) => parsed.with_context(|| format!("the server at {server} does not speak OpenAI's API")),
        (401 | 403, _) => bail!(
            "the server refuses the API key ({}); set the environment variable {key_env} to a valid key",
            message.unwrap_or("no reason was given")
        ),
        (_, Some(message)) => bail!("the server refused the request: {message}"),
        _ => bail!("the server at {server} answered with HTTP status {status}; is it one with OpenAI's API?"),
    }
}

/// Prints text at once.
fn show(text: &str) -> Result<()> {
    write(&printable(text))
}

fn write(text: &str) -> Result<()> {
    stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush()).context("the output cannot be written")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_say_what_to_do() {
        let server = "http://h:1".parse().expect("the address is valid");
        let check = |status, body| check(status, body, &server, "MY_KEY").map_err(|error| format!("{error:#}"));
        assert_eq!(check(200, r#"{"data":[]}"#).expect("the reply is valid")["data"], json!([]));
        for (status, body, words) in [
            (401, r#"{"error":{"message":"no key"}}"#, &["no key", "MY_KEY"][..]),
            (403, "", &["MY_KEY"]),
            (400, r#"{"error":{"message":"too long"}}"#, &["too long"]),
            (404, r#"{"error":"no such path"}"#, &["no such path"]),
            (404, "<html>", &["at h:1 ", "404", "OpenAI's API"]),
            (200, "<html>", &["does not speak OpenAI's API"]),
        ] {
            let error = check(status, body).expect_err("the reply is a refusal");
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
