//! `tandem chat`: a conversation with a model in the terminal, over any server with OpenAI's API.

mod answer;
mod command;
mod format;
mod input;

use crate::{
    serve::printable,
    server::{HttpServer, KEY_VARIABLE, ServerAddress, ServerArgs, wrong_kind},
    terminal,
};
use answer::{AnswerSummary, Answers, ChatPiece};
use anyhow::{Context, Result, anyhow, bail, ensure};
use command::{ChatCommand, HELP, temperature};
use format::TerminalAnswer;
use input::{EnteredLine, UserInput};
use serde_json::{Value, json};
use std::{
    io::{Write, stdout},
    sync::Arc,
};
use tandem_model_store::chat_temperature;
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
    /// How random answers are, from 0 to 2 [default: what the server does; 0.2 with SmolLM2-135M-Instruct, which is too small to keep to the
    /// point otherwise]
    #[arg(long, value_name = "X", value_parser = temperature)]
    temperature: Option<f64>,
    /// Name of the environment variable that has the API key, for a server that needs one
    #[arg(long, value_name = "NAME", default_value = KEY_VARIABLE)]
    key_env: String,
}

pub(super) const WANTED: &str =
    "`tandem chat` needs a frontend, or another server with OpenAI's API; `tandem up` starts one at 127.0.0.1:8000";

/// How an answer has ended.
enum AnswerEnd {
    Complete,
    /// By Ctrl-C.
    Interrupted,
}

/// A conversation with a server.
struct ChatSession {
    args: ChatArgs,
    server: Arc<HttpServer>,
    model: String,
    temperature: Option<f64>,
    messages: Vec<Value>,
}

/// Reads messages and prints answers until the input ends or the user quits. Without a terminal, each line of the input is a message.
///
/// # Errors
/// The server cannot be reached, refuses the key or lists no model; without a terminal, also if it refuses a message, or a command is wrong.
pub fn run(args: ChatArgs) -> Result<()> {
    let server = Arc::new(args.server.open("tandem chat", Some(&args.key_env))?);
    let model = match &args.model {
        Some(model) => model.clone(),
        None => first_model(&server, &args.key_env)?,
    };
    let system = args.system.clone().unwrap_or_default();
    let mut input = UserInput::open()?;
    let mut chat = ChatSession { temperature: args.temperature, args, server, model, messages: Vec::new() };
    chat.set_system(&system);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("the process cannot start threads")?;
    let is_terminal = input.is_terminal();
    // Without a terminal, Ctrl-C ends the program as usual.
    let interrupt = || is_terminal.then(|| signal(SignalKind::interrupt())).transpose();
    if is_terminal {
        show(&format!("{} at {}; /help lists the commands\n", chat.model, chat.server.address))?;
    }
    let done = runtime.block_on(async {
        loop {
            let entered = input.next()?;
            let (message, command) = match &entered {
                EnteredLine::End => return Ok(()),
                EnteredLine::Interrupted => {
                    show("/quit or Ctrl-D ends the program\n")?;
                    continue;
                }
                EnteredLine::Text(text) => (text.clone(), ChatCommand::of(text)),
                EnteredLine::Quoted(text) => (text.clone(), ChatCommand::Message),
            };
            let done = match command {
                ChatCommand::Quit => return Ok(()),
                ChatCommand::Message if message.trim().is_empty() => Ok(()),
                ChatCommand::Message => {
                    let done = chat.answer(message, interrupt()?).await;
                    if let Ok(AnswerEnd::Interrupted) = done {
                        input.drop_pasted()?;
                    }
                    done.map(drop)
                }
                command => chat.obey(command).and_then(|done| if is_terminal { show(&done) } else { Ok(()) }),
            };
            match done {
                // In a terminal, the user may send another message.
                Err(error) if is_terminal => show(&(error_chain(error.as_ref()) + "\n"))?,
                done => done?,
            }
        }
    });
    // A thread that reads an interrupted answer may wait for its next event.
    runtime.shutdown_background();
    done
}

impl ChatSession {
    /// Runs a command of the user other than `/quit`. Returns the line that confirms it.
    fn obey(&mut self, command: ChatCommand<'_>) -> Result<String> {
        let done = match command {
            ChatCommand::Clear => {
                self.messages.retain(|message| message["role"] == "system");
                "another conversation begins\n"
            }
            ChatCommand::System("") => {
                self.set_system("");
                "there is no system message\n"
            }
            ChatCommand::System(text) => {
                self.set_system(text);
                "the system message is set\n"
            }
            ChatCommand::Temperature(value) => {
                self.temperature = Some(value);
                return Ok(format!("the temperature is {value}\n"));
            }
            ChatCommand::Model(name) => {
                self.set_model(name)?;
                ""
            }
            ChatCommand::Wrong(problem) => bail!(problem),
            ChatCommand::Help | ChatCommand::Quit | ChatCommand::Message => {
                show(HELP)?;
                ""
            }
        };
        Ok(done.to_owned())
    }

    /// Sets the system message; an empty text removes it. The other messages stay.
    fn set_system(&mut self, text: &str) {
        self.messages.retain(|message| message["role"] != "system");
        if !text.is_empty() {
            self.messages.insert(0, json!({ "role": "system", "content": text }));
        }
    }

    /// Continues with this model, or lists the models if `name` is empty.
    fn set_model(&mut self, name: &str) -> Result<()> {
        let models = models(&self.server, &self.args.key_env)?;
        if name.is_empty() {
            let line = |model: &String| format!("{}{model}\n", if *model == self.model { "* " } else { "  " });
            return show(&models.iter().map(line).collect::<String>());
        }
        ensure!(models.iter().any(|model| model == name), "there is no model {name}; the server has {}", models.join(", "));
        name.clone_into(&mut self.model);
        Ok(())
    }

    /// Returns the body of the request for the next answer.
    fn request(&self) -> Value {
        let mut body = json!({
            "model": self.model, "messages": self.messages, "stream": true, "stream_options": { "include_usage": true },
        });
        if let Some(max_tokens) = self.args.max_tokens {
            body["max_tokens"] = max_tokens.into();
        }
        if let Some(temperature) = self.temperature.or_else(|| chat_temperature(&self.model)) {
            body["temperature"] = temperature.into();
        }
        body
    }

    /// Sends the conversation with this message, and prints the answer as it arrives. `interrupt` (Ctrl-C) ends the answer: what has arrived
    /// stays in the conversation.
    async fn answer(&mut self, message: String, mut interrupt: Option<Signal>) -> Result<AnswerEnd> {
        self.messages.push(json!({ "role": "user", "content": message }));
        let mut answers = Answers::request(Arc::clone(&self.server), &self.args.key_env, &self.request());
        let mut format = terminal::width().map(TerminalAnswer::new);
        let (mut summary, mut text) = (AnswerSummary::begin(), String::new());
        let mut result = Ok(AnswerEnd::Complete);
        loop {
            let piece = tokio::select! {
                biased;
                () = interrupted(&mut interrupt) => {
                    result = Ok(AnswerEnd::Interrupted);
                    break;
                }
                piece = answers.next() => piece,
            };
            match piece {
                None => break,
                Some(Ok(ChatPiece::Reasoning(reasoning))) => {
                    summary.text_arrived();
                    write(&format.as_mut().map_or_else(|| printable(&reasoning), |format| format.reasoning(&reasoning)))?;
                }
                Some(Ok(ChatPiece::Content(content))) => {
                    summary.text_arrived();
                    write(&format.as_mut().map_or_else(|| printable(&content), |format| format.content(&content)))?;
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
        if is_refused {
            // On a terminal, the last line of printed reasoning is completed before the error is shown.
            let begun = format.filter(|_| summary.first.is_some());
            write(&begun.map_or_else(String::new, |mut format| format.end("")))?;
        } else {
            let summary = summary.to_string();
            write(&format.map_or_else(|| format!("\n{summary}\n"), |mut format| format.end(&summary)))?;
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
    let first = models(server, key_env)?.into_iter().next();
    first.ok_or_else(|| anyhow!("the server at {} lists no model; name one with --model", server.address))
}

/// Returns the ids of the server's models.
fn models(server: &HttpServer, key_env: &str) -> Result<Vec<String>> {
    let reply = server.get("/v1/models").map_err(|error| server.no_reply(error, WANTED))?;
    if let (404, Some(wrong)) = (reply.status, wrong_kind(&server.address, WANTED)) {
        return Err(wrong);
    }
    let body = check(reply.status, &reply.body, &server.address, key_env)?;
    let ids = body["data"].as_array().into_iter().flatten().filter_map(|model| model["id"].as_str());
    Ok(ids.map(str::to_owned).collect())
}

/// Parses a reply. Fails with advice if it is an error or not in OpenAI's format.
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
        (_, Some(message)) if parsed.as_ref().is_ok_and(|body| body["error"]["code"] == "context_length_exceeded") => {
            bail!("the server refused the request: {message} (/clear begins another conversation)")
        }
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

    fn session(model: &str) -> ChatSession {
        /// The arguments of `tandem chat` as a command line of their own.
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: ChatArgs,
        }
        let args = <Line as clap::Parser>::parse_from(["chat", "http://127.0.0.1:1"]).args;
        let server = HttpServer::new("http://127.0.0.1:1".parse().expect("the address is valid"));
        ChatSession { args, server: Arc::new(server), model: model.to_owned(), temperature: None, messages: Vec::new() }
    }

    #[test]
    fn only_the_small_default_model_has_a_low_temperature_until_one_is_set() {
        let temperature = |session: &ChatSession| session.request()["temperature"].as_f64();
        assert_eq!(temperature(&session("another")), None);
        let mut small = session(tandem_model_store::DEFAULT_MODEL_ID);
        assert_eq!(temperature(&small), Some(0.2));
        let done = small.obey(ChatCommand::of("/set temperature 1")).expect("no request is sent");
        assert_eq!(done, "the temperature is 1\n");
        assert_eq!(temperature(&small), Some(1.0));
    }

    #[test]
    fn system_message_is_first_and_stays_when_a_conversation_begins() {
        let mut session = session("m");
        session.messages.push(json!({ "role": "user", "content": "hello" }));
        let roles = |session: &ChatSession| {
            let messages = session.request()["messages"].as_array().cloned().unwrap_or_default();
            messages.iter().map(|message| message["role"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
        };
        for (line, expected) in [
            ("/system Be brief.", &["system", "user"][..]),
            ("/system Be very brief.", &["system", "user"]),
            ("/clear", &["system"]),
            ("/system", &[]),
        ] {
            session.obey(ChatCommand::of(line)).expect("no request is sent");
            assert_eq!(roles(&session), expected, "{line}");
        }
    }

    #[test]
    fn refusals_say_what_to_do() {
        let server = "http://h:1".parse().expect("the address is valid");
        let check = |status, body| check(status, body, &server, "MY_KEY").map_err(|error| format!("{error:#}"));
        assert_eq!(check(200, r#"{"data":[]}"#).expect("the reply is valid")["data"], json!([]));
        for (status, body, words) in [
            (401, r#"{"error":{"message":"no key"}}"#, &["no key", "MY_KEY"][..]),
            (403, "", &["MY_KEY"]),
            (400, r#"{"error":{"message":"wrong"}}"#, &["wrong"]),
            (400, r#"{"error":{"message":"too long","code":"context_length_exceeded"}}"#, &["too long", "/clear"]),
            (404, r#"{"error":"no such path"}"#, &["no such path"]),
            (404, "<html>", &["at h:1 ", "404", "OpenAI's API"]),
            (200, "<html>", &["does not speak OpenAI's API"]),
        ] {
            let error = check(status, body).expect_err("the reply is a refusal");
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
