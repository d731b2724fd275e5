//! The server that is measured: what it serves, and how it counts tokens.

use crate::{
    http::{AnswerError, Http},
    prompt::CountTokens,
};
use hyper::StatusCode;
use serde_json::json;

/// With this header, Tandem's answers say how the cached tokens are known and name the workers.
const DETAILS: (&str, &str) = ("x-tandem-details", "true");

/// A server, and the model that is requested.
#[derive(Clone, Debug)]
pub(crate) struct BenchTarget {
    pub(crate) http: Http,
    pub(crate) model: String,
}

/// Why a server cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The list of models cannot be read.
    #[error("the server's models cannot be read; start the server, correct SERVER, or name the model with --model")]
    Models(#[source] AnswerError),
    /// The server serves no model.
    #[error("the server lists no models; name the model with --model")]
    NoModel,
}

/// Why a server does not count the tokens of a text.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The server has no such path, or refuses the request.
    #[error(
        "the server does not answer at /tokenize; name the model's tokenizer.json with --tokenizer, or send token ids with --prompt ids"
    )]
    Http(#[source] AnswerError),
    /// The answer has no count.
    #[error(
        "the server's answer at /tokenize has neither `count` nor `tokens`; name the model's tokenizer.json with --tokenizer"
    )]
    NoCount,
}

impl BenchTarget {
    /// Finds out which model to request, and whether answers can have details.
    pub(crate) async fn find(http: Http, model: Option<String>) -> Result<Self, TargetError> {
        let models = http.get_json("/v1/models").await;
        let first = models.as_ref().ok().and_then(|models| models.pointer("/data/0").cloned()).unwrap_or_default();
        let model = match (model, models) {
            (Some(model), _) => model,
            (None, Err(error)) => return Err(TargetError::Models(error)),
            (None, Ok(_)) => first["id"].as_str().ok_or(TargetError::NoModel)?.to_owned(),
        };
        let mut target = Self { http, model };
        if first["owned_by"] == "tandem" {
            // The server refuses all requests with this header if it does not trust this client.
            let detailed = Self { http: target.http.clone().with_header(DETAILS.0, DETAILS.1), ..target.clone() };
            match detailed.count("a").await {
                Err(TokenizeError::Http(AnswerError::Status { status: StatusCode::FORBIDDEN, .. })) => {}
                _ => target = detailed,
            }
        }
        Ok(target)
    }
}

impl CountTokens for BenchTarget {
    type Error = TokenizeError;

    /// Sends the fields of vLLM's `/tokenize`, which several servers accept, and the field of llama.cpp's.
    async fn count(&self, text: &str) -> Result<u64, TokenizeError> {
        let body = json!({ "model": self.model, "prompt": text, "content": text, "add_special": true });
        let answer = self.http.post_json("/tokenize", &body).await.map_err(TokenizeError::Http)?;
        let tokens = answer["tokens"].as_array().map(|tokens| tokens.len() as u64);
        answer["count"].as_u64().or(tokens).ok_or(TokenizeError::NoCount)
    }
}
