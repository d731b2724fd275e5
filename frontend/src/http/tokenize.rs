//! `POST /tokenize` and `POST /detokenize`, with vLLM's fields.

use super::{app::App, conversation, incoming::Incoming, lifecycle::handle};
use crate::{error::ApiError, metrics::Endpoint};
use axum::{
    Json,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use serde_json::json;
use std::sync::Arc;
use tandem_api::{
    ChatRequest, DetokenizeRequest, Problem, RequestError, TokenizeRequest, answer::token_text, at_most, ids, prompt_bytes_max,
};
use tandem_kv::TokenId;
use tandem_text::{EncodeError, ServedModel};

pub(super) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::Tokenize, request, count).await
}

pub(super) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::Detokenize, request, decode).await
}

async fn count(incoming: &mut Incoming, body: Bytes) -> Result<Response, ApiError> {
    let request: TokenizeRequest = incoming.parse(body.clone()).await?;
    let model = incoming.served_or_only(request.model.as_deref())?.model;
    let encoder = Arc::clone(&model);
    let tokens = match (request.prompt, request.messages) {
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("prompt", Problem::Rule { rule: "and 'messages' exclude each other" }));
        }
        (None, None) => return Err(ApiError::invalid("prompt", Problem::Missing)),
        (Some(text), None) => {
            check_bytes(&model, text.len(), "prompt")?;
            let bos = model.bos.filter(|_| request.add_special_tokens.unwrap_or(true));
            let bytes = text.len();
            let encodings = incoming.encodings(&model, "");
            let encode =
                move || encoder.tokenizer.encode_prompt(&text, None, &encodings).map_err(|_: EncodeError| RequestError::Failed);
            let encoded = incoming.encode(bytes, encode).await?;
            bos.into_iter().chain(encoded).collect::<Vec<TokenId>>()
        }
        // A conversation has the same fields here as in a request for its answer.
        (None, Some(_)) => {
            let chat = incoming.parse::<ChatRequest>(body).await?.check(&model)?;
            check_bytes(&model, chat.text_bytes(), "messages")?;
            conversation::encode(incoming, &model, chat).await?.prompt.tokens
        }
    };
    let texts = request.return_token_strs.unwrap_or(false);
    let token_strs = texts.then(|| tokens.iter().map(|token| token_text(&model, *token)).collect::<Vec<_>>());
    let (count, max_model_len) = (tokens.len(), model.usable_context());
    let answer = json!({ "count": count, "max_model_len": max_model_len, "tokens": tokens, "token_strs": token_strs });
    Ok(Json(answer).into_response())
}

async fn decode(incoming: &mut Incoming, body: Bytes) -> Result<Response, ApiError> {
    let request: DetokenizeRequest = incoming.parse(body).await?;
    let model = incoming.served_or_only(request.model.as_deref())?.model;
    let tokens = request.tokens.map(ids).ok_or_else(|| ApiError::invalid("tokens", Problem::Missing))?;
    let vocab_size = model.tokenizer.vocab_size();
    if tokens.iter().any(|token| *token as usize >= vocab_size) {
        return Err(ApiError::invalid("tokens", Problem::Vocabulary { vocab_size }));
    }
    let prompt = incoming.encode(tokens.len(), move || Ok(model.tokenizer.decode(&tokens))).await?;
    Ok(Json(json!({ "prompt": prompt })).into_response())
}

/// Checks the size of a prompt's text. Unlike a prompt that is to be answered, it may have more tokens than the context.
fn check_bytes(model: &ServedModel, bytes: usize, param: &'static str) -> Result<(), RequestError> {
    at_most(param, bytes, prompt_bytes_max(model.usable_context()), "bytes of text")
}
