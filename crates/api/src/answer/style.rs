//! Selects the format of an answer.

use super::{
    AnswerContext, AnswerFormat,
    choices::{Chunks, WholeChoices},
    envelope::ChoiceFormat,
    generated::GeneratedFormat,
    messages::MessageFormat,
    responses::ResponseFormat,
};
use crate::{agents::Origin, options::LogprobsWith};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The format in which a request is answered.
pub enum Style {
    /// OpenAI's list of choices, for chats and completions.
    Choices(ChoiceFormat),
    /// Token ids, and the client's own request id.
    Generated(Option<String>),
    /// OpenAI's Responses API: the fields that repeat the request, and the client's own tools by the names that the model sees.
    Response(Map<String, Value>, BTreeMap<String, Origin>),
    /// Anthropic's Messages API.
    Message,
}

impl Style {
    /// Returns the format that writes the answer.
    pub fn format(self, context: &AnswerContext) -> Box<dyn AnswerFormat> {
        match (self, context.stream) {
            (Self::Choices(choices), Some(usage)) => Box::new(Chunks { choices, usage }),
            (Self::Choices(format), None) => Box::new(WholeChoices::new(format, context)),
            (Self::Generated(_), _) => Box::new(GeneratedFormat::new(context)),
            (Self::Response(request, origins), _) => Box::new(ResponseFormat::new(request, origins)),
            (Self::Message, _) => Box::<MessageFormat>::default(),
        }
    }

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

    /// Returns whether this format sends a token's logprobs with its text or with its id.
    pub fn logprobs(&self) -> LogprobsWith {
        match self {
            Self::Choices(_) | Self::Response(..) | Self::Message => LogprobsWith::Text,
            Self::Generated(_) => LogprobsWith::Tokens,
        }
    }
}
