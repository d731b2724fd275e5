//! Traces: files of requests. All rows of a trace are checked before the first request is sent. The file is then read again, row by
//! row, so that it need not fit into memory.

mod blocks;
mod chat;
mod conversation;
mod rows;
#[cfg(test)]
mod tests;

pub use blocks::TraceBlocks;
pub use chat::ChatRow;
pub use conversation::{ConversationStep, ConversationTrace};

use serde_json::Value;
use std::{
    fmt,
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::Duration,
};

/// The formats of traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Mooncake's format. A row has the lengths of prompt and answer, and the ids of the prompt's blocks; equal ids mean equal text.
    Mooncake,
    /// Each row is the body of an OpenAI chat request.
    Chat,
    /// Each row is a conversation of several steps, in the formats that vLLM's and SGLang's benchmarks read. A step is sent after the answer
    /// to the previous one.
    Conversations,
}

/// A file of requests whose rows were all checked.
#[derive(Clone, Debug)]
pub struct Trace {
    path: PathBuf,
    settings: TraceSettings,
    format: Format,
    /// The number of requests. A conversation has one request for each of its steps.
    pub requests: u64,
    /// Whether every row has a time.
    pub timed: bool,
    /// The time of the last row, counted from the first.
    pub length: Duration,
}

/// The settings with which a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceSettings {
    /// The format; `None`: the first row decides.
    pub format: Option<Format>,
    /// The maximum number of rows that are read; `None`: all rows are read.
    pub limit: Option<u64>,
    /// The number of tokens in each block of a Mooncake trace.
    pub block_tokens: u64,
}

impl Default for TraceSettings {
    fn default() -> Self {
        Self { format: None, limit: None, block_tokens: 512 }
    }
}

/// A row of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The row's number, counted from 0.
    pub index: u64,
    /// The time of the row, counted from the first row; `None` if the row has no time.
    pub at: Option<Duration>,
    /// The request or requests of the row.
    pub load: Load,
}

/// The request or requests of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Load {
    /// A request whose prompt is generated from the row's blocks.
    Blocks(TraceBlocks),
    /// A chat request.
    Chat(ChatRow),
    /// The chat requests of a conversation, sent one after the other.
    Conversation(ConversationTrace),
}

/// The reason why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("{} cannot be read", path.display())]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// The file has no rows.
    #[error("{} has no rows", .0.display())]
    Empty(PathBuf),
    /// The file is a single JSON object: a description from which vLLM's benchmark generates conversations.
    #[error(
        "{} describes conversations that vLLM's benchmark generates; run that benchmark with --output-file, and replay the file that it writes",
        .0.display()
    )]
    Generator(PathBuf),
    /// The format cannot be recognised by the first row.
    #[error(
        "the format of {} is not recognised by its first row; its rows need `hash_ids` (Mooncake), `messages` (chat) or `conversations`, or name it with --format",
        .0.display()
    )]
    UnknownFormat(PathBuf),
    /// A row is invalid.
    #[error("{}, line {line}: {problem}", path.display())]
    Row {
        /// The path of the file.
        path: PathBuf,
        /// The line on which the row is, or on which it ends; counted from 1.
        line: usize,
        /// The reason why the row is invalid.
        problem: Problem,
    },
}

/// The reason why a row is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The row is not valid JSON, or a field has the wrong type.
    #[error("{0}")]
    Json(String),
    /// A required field is missing.
    #[error("the row has no field `{0}`")]
    Missing(&'static str),
    /// A field that must be at least 1 is 0.
    #[error("`{0}` must be at least 1")]
    Zero(&'static str),
    /// The numbers of blocks and tokens contradict each other.
    #[error(
        "{ids} `hash_ids` of {block_tokens} tokens are not a prompt of {input_length} tokens; --block-tokens sets the tokens of a block"
    )]
    Blocks {
        /// The number of ids in the row.
        ids: u64,
        /// The number of tokens in a block.
        block_tokens: u64,
        /// The number of tokens in the prompt.
        input_length: u64,
    },
    /// The time is not a number of milliseconds.
    #[error("`timestamp` must be a number of milliseconds that is not negative")]
    Time,
    /// The row's time is earlier than that of the previous row.
    #[error("the row's `timestamp` is earlier than the previous row's; sort the rows by time")]
    Order,
    /// Only some rows have times.
    #[error("some rows have a `timestamp` and some have none")]
    Mixed,
    /// The row contains no message that the model could answer.
    #[error("there is no message to answer")]
    Nothing,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mooncake => "mooncake",
            Self::Chat => "chat",
            Self::Conversations => "conversations",
        })
    }
}

impl Trace {
    /// Opens a file and checks the rows that will be read.
    ///
    /// # Errors
    /// Fails if the file cannot be read, if its format is not recognised, or if a row is invalid.
    pub fn open(path: &Path, settings: TraceSettings) -> Result<Self, TraceError> {
        let format = match settings.format {
            Some(format) => format,
            None => recognised(path)?,
        };
        let mut trace = Self { path: path.to_owned(), settings, format, requests: 0, timed: false, length: Duration::ZERO };
        let (mut requests, mut timed, mut length, mut rows) = (0, false, Duration::ZERO, 0_u64);
        trace.read(&mut |row| {
            rows += 1;
            timed = row.at.is_some();
            length = row.at.unwrap_or_default();
            requests += row.load.requests();
            ControlFlow::Continue(())
        })?;
        if rows == 0 {
            return Err(TraceError::Empty(path.to_owned()));
        }
        (trace.requests, trace.timed, trace.length) = (requests, timed, length);
        Ok(trace)
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the settings with which the file is read.
    pub fn settings(&self) -> TraceSettings {
        self.settings
    }

    /// Returns the format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Reads the rows in order and passes each to `each`, until `each` returns `Break`.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or if a row is invalid.
    pub fn read(&self, each: &mut dyn FnMut(Row) -> ControlFlow<()>) -> Result<(), TraceError> {
        let (mut index, mut first, mut last) = (0, None::<Duration>, None::<Duration>);
        if self.settings.limit == Some(0) {
            return Ok(());
        }
        rows::read(&self.path, &mut |value| {
            let (at, load) = self.parse(value)?;
            if index > 0 && at.is_some() != last.is_some() {
                return Err(Problem::Mixed);
            }
            if at < last {
                return Err(Problem::Order);
            }
            last = at;
            let at = at.map(|at| at.saturating_sub(*first.get_or_insert(at)));
            let row = Row { index, at, load };
            index += 1;
            if each(row).is_break() || self.settings.limit.is_some_and(|limit| index >= limit) {
                return Ok(ControlFlow::Break(()));
            }
            Ok(ControlFlow::Continue(()))
        })
    }

    fn parse(&self, value: Value) -> Result<(Option<Duration>, Load), Problem> {
        let at = time(&value)?;
        let load = match self.format {
            Format::Mooncake => Load::Blocks(TraceBlocks::parse(value, self.settings.block_tokens)?),
            Format::Chat => Load::Chat(ChatRow::parse(value)?),
            Format::Conversations => Load::Conversation(ConversationTrace::parse(value)?),
        };
        Ok((at, load))
    }
}

impl Load {
    fn requests(&self) -> u64 {
        match self {
            Self::Blocks(_) | Self::Chat(_) => 1,
            Self::Conversation(conversation) => conversation.steps.len() as u64,
        }
    }
}

/// Returns the time of a row from its value in milliseconds.
fn time(value: &Value) -> Result<Option<Duration>, Problem> {
    match value.get("timestamp") {
        None | Some(Value::Null) => Ok(None),
        Some(ms) => {
            let seconds = ms.as_f64().ok_or(Problem::Time)? / 1e3;
            Duration::try_from_secs_f64(seconds).map(Some).map_err(|_| Problem::Time)
        }
    }
}

/// Recognises the format by the first row.
fn recognised(path: &Path) -> Result<Format, TraceError> {
    let mut first = Value::Null;
    let array = rows::is_array(path)?;
    rows::read(path, &mut |value| {
        first = value;
        Ok(ControlFlow::Break(()))
    })?;
    let has = |key: &str| first.get(key).is_some();
    match first {
        Value::Null => Err(TraceError::Empty(path.to_owned())),
        _ if first.get("filetype").and_then(Value::as_str) == Some("generate_conversations") => {
            Err(TraceError::Generator(path.to_owned()))
        }
        _ if has("hash_ids") => Ok(Format::Mooncake),
        _ if has("conversations") => Ok(Format::Conversations),
        // A file of conversations is one JSON array; a file of requests has one JSON object per line.
        _ if has("messages") && array => Ok(Format::Conversations),
        _ if has("messages") || first.pointer("/body/messages").is_some() => Ok(Format::Chat),
        _ => Err(TraceError::UnknownFormat(path.to_owned())),
    }
}
