//! The kinds of formats of answers.

use super::format::ChoiceFormat;
use crate::stream::LogprobsWith;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use tandem_api::agents::Origin;

/// The format in which a job is answered.
pub(super) enum Style {
    Choices(ChoiceFormat),
    /// Token ids. The id is the client's.
    Generated(Option<String>),
    /// OpenAI's Responses API: the fields that repeat the request, and the client's own tools by the names that the model sees.
    Response(Map<String, Value>, BTreeMap<String, Origin>),
    /// Anthropic's Messages API.
    Message,
}

impl Style {
    /// Returns the id of the answer to the request with this id.
    pub(super) fn answer_id(&self, request_id: &str) -> String {
        match self {
            Self::Choices(ChoiceFormat::Chat) => format!("chatcmpl-{request_id}"),
            Self::Choices(ChoiceFormat::Completions) => format!("cmpl-{request_id}"),
            Self::Generated(id) => id.clone().unwrap_or_else(|| request_id.to_owned()),
            Self::Response(..) => format!("resp_{request_id}"),
            Self::Message => format!("msg_{request_id}"),
        }
    }

    /// When an answer in this format has the logprobs of a token.
    pub(super) fn logprobs(&self) -> LogprobsWith {
        match self {
            Self::Choices(_) | Self::Response(..) | Self::Message => LogprobsWith::Text,
            Self::Generated(_) => LogprobsWith::Tokens,
        }
    }
}
