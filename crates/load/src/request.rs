//! Makes the bodies of requests.

use crate::{
    prompt::{MadePrompt, PromptKind},
    trace::ChatRow,
};
use bytes::Bytes;
use serde_json::{Map, Value, json};

/// The fields that all requests have in common.
#[derive(Clone, Debug)]
pub(crate) struct BodyFields {
    pub(crate) model: String,
    /// The maximum length of an answer in tokens; `None`: the length that the trace specifies.
    pub(crate) max_tokens: Option<u64>,
    pub(crate) ignore_eos: bool,
    /// Fields that are added to every body.
    pub(crate) extra: Map<String, Value>,
}

/// A request that can be sent.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PreparedRequest {
    pub(crate) path: &'static str,
    pub(crate) body: Bytes,
    /// The limit on the answer's length in tokens; `None`: the server's own limit.
    pub(crate) max_tokens: Option<u64>,
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

impl BodyFields {
    /// Returns a request for the continuation of a prompt. If the kind is `Chat`, the prompt is the only message of a chat.
    pub(crate) fn completion(&self, prompt: &MadePrompt, output_length: u64, kind: PromptKind) -> PreparedRequest {
        let max_tokens = self.capped(Some(output_length));
        let (path, field, prompt) = if kind == PromptKind::Chat {
            (CHAT, "messages", json!([{ "role": "user", "content": prompt }]))
        } else {
            (COMPLETIONS, "prompt", json!(prompt))
        };
        self.request(path, Map::from_iter([(field.to_owned(), prompt)]), "max_tokens", max_tokens)
    }

    /// Returns a chat request that was recorded.
    pub(crate) fn chat(&self, chat: ChatRow) -> PreparedRequest {
        let ChatRow { mut body } = chat;
        // Clients limit an answer with `max_completion_tokens` or with the older `max_tokens`. The request keeps the name that was recorded.
        let newer = body.remove("max_completion_tokens");
        let field = if newer.is_some() { "max_completion_tokens" } else { "max_tokens" };
        let recorded = newer.or_else(|| body.remove("max_tokens")).and_then(|tokens| tokens.as_u64());
        let max_tokens = self.capped(recorded);
        self.request(CHAT, body, field, max_tokens)
    }

    /// Returns the request for the next answer in a conversation.
    pub(crate) fn next(&self, messages: &[Value], tools: Option<&Value>, answer_tokens: Option<u64>) -> PreparedRequest {
        let mut body = Map::from_iter([("messages".to_owned(), json!(messages))]);
        body.extend(tools.map(|tools| ("tools".to_owned(), tools.clone())));
        self.request(CHAT, body, "max_tokens", self.capped(answer_tokens))
    }

    fn capped(&self, recorded: Option<u64>) -> Option<u64> {
        recorded.into_iter().chain(self.max_tokens).min()
    }

    fn request(&self, path: &'static str, mut body: Map<String, Value>, field: &str, max_tokens: Option<u64>) -> PreparedRequest {
        body.insert("model".to_owned(), json!(self.model));
        body.insert("stream".to_owned(), json!(true));
        body.insert("stream_options".to_owned(), json!({ "include_usage": true }));
        body.extend(max_tokens.map(|tokens| (field.to_owned(), json!(tokens))));
        if self.ignore_eos {
            body.insert("ignore_eos".to_owned(), json!(true));
        }
        body.extend(self.extra.clone());
        let max_tokens = self.extra.get(field).map_or(max_tokens, Value::as_u64);
        PreparedRequest { path, body: Value::Object(body).to_string().into(), max_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bodies(max_tokens: Option<u64>) -> BodyFields {
        BodyFields { model: "m".to_owned(), max_tokens, ignore_eos: false, extra: Map::new() }
    }

    fn parsed(request: &PreparedRequest) -> Value {
        serde_json::from_slice(&request.body).expect("the body is JSON")
    }

    #[test]
    fn request_asks_for_a_stream_with_usage_and_for_the_recorded_answer_length() {
        let streamed = json!({ "include_usage": true });
        let request = bodies(None).completion(&MadePrompt::Ids(vec![1, 2]), 9, PromptKind::Text);
        assert_eq!(request.path, "/v1/completions");
        assert_eq!(
            parsed(&request),
            json!({ "prompt": [1, 2], "model": "m", "stream": true, "stream_options": streamed, "max_tokens": 9 })
        );
        let request = bodies(Some(4)).completion(&MadePrompt::Text("a".to_owned()), 9, PromptKind::Chat);
        assert_eq!((request.path, request.max_tokens), ("/v1/chat/completions", Some(4)));
        assert_eq!(parsed(&request)["messages"], json!([{ "role": "user", "content": "a" }]));
    }

    #[test]
    fn recorded_chat_keeps_its_fields_except_model_stream_and_token_limit() {
        let chat = |body: Value| ChatRow { body: body.as_object().expect("an object").clone() };
        let recorded = json!({ "messages": [{}], "tools": [{}], "temperature": 0.5, "model": "other", "stream": false, "max_completion_tokens": 50 });
        let body = parsed(&bodies(Some(20)).chat(chat(recorded)));
        assert_eq!(
            (&body["tools"], &body["temperature"], &body["model"], &body["stream"]),
            (&json!([{}]), &json!(0.5), &json!("m"), &json!(true))
        );
        assert_eq!((&body["max_completion_tokens"], &body["max_tokens"]), (&json!(20), &Value::Null));
        let without = parsed(&bodies(None).chat(chat(json!({ "messages": [{}] }))));
        assert_eq!(without.get("max_tokens"), None);
    }

    #[test]
    fn extra_fields_override_those_of_the_request() {
        let extra = json!({ "temperature": 0, "max_tokens": 1 }).as_object().expect("an object").clone();
        let bodies = BodyFields { ignore_eos: true, extra, ..bodies(None) };
        let body = parsed(&bodies.next(&[json!({})], Some(&json!([1])), Some(7)));
        assert_eq!(
            (&body["temperature"], &body["max_tokens"], &body["ignore_eos"], &body["tools"]),
            (&json!(0), &json!(1), &json!(true), &json!([1]))
        );
    }
}
