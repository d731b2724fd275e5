//! The server that is measured: which models it serves, and how it counts tokens.

use crate::{
    http::{AnswerError, Http},
    prompt::CountTokens,
};
use hyper::StatusCode;
use serde_json::json;

/// The header with which Tandem adds details to its answers: the source of the number of cached tokens, and the names of the workers.
const DETAILS: (&str, &str) = ("x-tandem-details", "true");

/// A server, and the model that its requests name.
#[derive(Clone, Debug)]
pub(crate) struct BenchTarget {
    pub(crate) http: Http,
    pub(crate) model: String,
}

/// The reason why a server cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The list of models cannot be read.
    #[error(
        "the server's models cannot be read; start the server, correct SERVER, set the API key (--key-env), or name the model with --model"
    )]
    Models(#[source] AnswerError),
    /// The server serves no model.
    #[error("the server lists no models; name the model with --model")]
    NoModel,
}

/// The reason why a server cannot count the tokens of a text.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The server has no path `/tokenize`, or it refuses the request.
    #[error(
        "the server does not tokenize for this model; correct --model, name the model's tokenizer.json with --tokenizer, or send token ids with --prompt ids"
    )]
    Http(#[source] AnswerError),
    /// The server's answer contains no token count.
    #[error(
        "the server's answer at /tokenize has neither `count` nor `tokens`; name the model's tokenizer.json with --tokenizer"
    )]
    NoCount,
}

impl BenchTarget {
    /// Finds out which model to request, and whether the server can add details to its answers.
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
            // A Tandem server that does not trust this client refuses all requests with this header.
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

    /// Counts tokens with the server's `/tokenize`. The request has the fields of vLLM's API, which several servers accept, and the field of
    /// llama.cpp's API.
    async fn count(&self, text: &str) -> Result<u64, TokenizeError> {
        let body = json!({ "model": self.model, "prompt": text, "content": text, "add_special": true });
        let answer = self.http.post_json("/tokenize", &body).await.map_err(TokenizeError::Http)?;
        let tokens = answer["tokens"].as_array().map(|tokens| tokens.len() as u64);
        answer["count"].as_u64().or(tokens).ok_or(TokenizeError::NoCount)
    }
}
