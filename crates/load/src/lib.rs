//! Measures servers under the load of recorded traces.

mod dispatch;
mod http;
mod plan;
mod prompt;
mod rates;
mod replay;
pub mod report;
mod request;
mod runner;
mod stream;
mod target;
pub mod trace;

pub use http::{AnswerError, UrlError};
pub use hyper::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
pub use prompt::{LocalTokenizerError, PromptKind, WordsError};
pub use rates::{MeasuredRates, RateSettings, RatesError, rates};
pub use replay::{LoadError, Pace, ReplayProgress, Settings, replay};
pub use target::{TargetError, TokenizeError};
