//! Renderers: vLLM servers that convert conversations with images to token ids. Only they and the engines decode images.

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use bytes::Bytes;
use ring::digest::{Context, SHA256};
use serde::Deserialize;
use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};
use tandem_api::RequestError;
use tandem_client::{HttpClient, HttpError, authorities, whole};
use tandem_kv::{ImageId, Namespace, TokenId};
use tandem_process::{LogLimit, Secret};
use tokio::time::timeout;

const PATH: &str = "/v1/chat/completions/render";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time within which a renderer must answer. The first image that it renders may take several seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum size of an answer, in bytes: this much, and more for each token of the context and for each image. It has no pixels.
const ANSWER_BYTES: usize = 256 << 10;
const TOKEN_BYTES: usize = 16;
const IMAGE_BYTES: usize = 1 << 10;

/// A vLLM server, or a `vllm launch render`, that converts conversations with images to token ids.
#[derive(Clone, Debug)]
pub struct Renderer {
    /// The ids of the models whose conversations it converts; empty: all models.
    pub models: Vec<String>,
    /// The server's address: `http://HOST:PORT`, or `https://`.
    pub url: String,
    /// The key that the server requires; `None` if it requires none.
    pub key: Option<Secret>,
    /// Certificates (PEM) of authorities that may identify the server, in addition to the public authorities.
    pub ca: Option<Vec<u8>>,
}

/// A renderer cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the renderer {url:?} cannot be used: {problem}")]
pub struct InvalidRenderer {
    url: String,
    problem: String,
}

pub(crate) struct Renderers {
    list: Vec<(Renderer, HttpClient)>,
    next: AtomicUsize,
    failures_logged: LogLimit,
}

/// A conversation as token ids.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rendered {
    pub(crate) tokens: Vec<TokenId>,
    /// The place of each image's tokens, in order: all tokens of an image are equal, and occur nowhere else.
    pub(crate) places: Vec<ImagePlace>,
}

/// The place of an image's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct ImagePlace {
    pub(crate) offset: u32,
    pub(crate) length: u32,
}

#[derive(Debug, thiserror::Error)]
enum RenderFailure {
    /// The renderer refuses the conversation, and another one would refuse it, too.
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("it answers with HTTP {0}")]
    Status(StatusCode),
    #[error("its answer is malformed: {0}")]
    Malformed(&'static str),
}

#[derive(Deserialize)]
struct RenderAnswer {
    token_ids: Vec<TokenId>,
    features: Option<Features>,
}

#[derive(Deserialize)]
struct Features {
    mm_hashes: HashMap<String, Vec<String>>,
    mm_placeholders: HashMap<String, Vec<ImagePlace>>,
}

/// Returns the identity of an image: a hash of the cache namespace and the file. An engine keeps what it computes from an image under the
/// identity alone, so that namespaces share nothing of this either. There is no secret in the hash, because a program that sees an identity in an
/// engine also sees the image.
pub(crate) fn image_id(namespace: &Namespace, file: &[u8]) -> ImageId {
    let mut hash = Context::new(&SHA256);
    hash.update(&(namespace.as_bytes().len() as u64).to_le_bytes());
    hash.update(namespace.as_bytes());
    hash.update(file);
    let mut id = [0; 32];
    id.copy_from_slice(hash.finish().as_ref());
    ImageId(id)
}

impl Renderers {
    /// # Errors
    /// The address or the certificates of a renderer cannot be used.
    pub(crate) fn new(list: Vec<Renderer>) -> Result<Self, InvalidRenderer> {
        let client = |renderer: Renderer| {
            let invalid = |problem: String| InvalidRenderer { url: renderer.url.clone(), problem };
            let authorities = authorities(renderer.ca.as_deref()).map_err(invalid)?;
            let client = HttpClient::new(&renderer.url, authorities, CONNECT_TIMEOUT);
            let client = client.map_err(|error| invalid(error.to_string()))?;
            Ok((renderer, client))
        };
        let list = list.into_iter().map(client).collect::<Result<_, _>>()?;
        Ok(Self { list, next: AtomicUsize::new(0), failures_logged: LogLimit::default() })
    }

    /// Returns whether there is a renderer for the model.
    pub(crate) fn has(&self, model: &str) -> bool {
        self.of(model).next().is_some()
    }

    fn of(&self, model: &str) -> impl Iterator<Item = &(Renderer, HttpClient)> {
        self.list.iter().filter(move |(Renderer { models, .. }, _)| models.is_empty() || models.iter().any(|id| id == model))
    }

    /// Converts a conversation to token ids. `body` is that of [`tandem_api::chat::Chat::rendering`], and `ids` are the identities of the
    /// images. The renderers are asked in rotation; if one fails, the next ones are. `None`: all fail.
    ///
    /// # Errors
    /// A renderer refuses the conversation.
    pub(crate) async fn render(
        &self,
        model: &str,
        context_length: u32,
        body: Bytes,
        ids: &[String],
    ) -> Result<Option<Rendered>, RequestError> {
        let answer_max = ANSWER_BYTES + TOKEN_BYTES * context_length as usize + IMAGE_BYTES * ids.len();
        let of_model: Vec<_> = self.of(model).collect();
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        for at in 0..of_model.len() {
            let (renderer, client) = of_model[(first + at) % of_model.len()];
            let answer = timeout(ANSWER_TIMEOUT, renderer.ask(client, body.clone(), answer_max));
            let answer = answer.await.unwrap_or(Err(HttpError::Timeout(ANSWER_TIMEOUT).into()));
            match answer.and_then(|answer| check(&answer, ids)) {
                Ok(rendered) => return Ok(Some(rendered)),
                Err(RenderFailure::Refused(message)) => return Err(RequestError::Renderer { message }),
                Err(failure) => {
                    if let Some(left_out) = self.failures_logged.admit() {
                        let error = tandem_process::retry::error_chain(&failure);
                        tracing::warn!(renderer = renderer.url, error, left_out, "a renderer failed");
                    }
                }
            }
        }
        Ok(None)
    }
}

impl Renderer {
    async fn ask(&self, client: &HttpClient, body: Bytes, answer_max: usize) -> Result<Bytes, RenderFailure> {
        let mut headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        headers.extend(self.key.as_ref().and_then(|key| key.bearer().ok()).map(|bearer| (header::AUTHORIZATION, bearer)));
        let answer = client.send(Method::POST, PATH, headers, body).await?;
        let status = answer.status();
        let body = whole(answer, answer_max).await?;
        match status.as_u16() {
            200 => Ok(body),
            // The conversation is at fault. Other codes of errors say that the address, the key or the server is.
            400 | 413 | 422 => {
                let error: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
                let message = error.pointer("/error/message").and_then(|message| message.as_str());
                Err(RenderFailure::Refused(message.unwrap_or("it gives no reason").trim_end_matches('.').to_owned()))
            }
            _ => Err(RenderFailure::Status(status)),
        }
    }
}

/// Checks the answer of a renderer to a conversation with these images.
fn check(answer: &[u8], ids: &[String]) -> Result<Rendered, RenderFailure> {
    let malformed = RenderFailure::Malformed;
    let answer: RenderAnswer = serde_json::from_slice(answer)
        .map_err(|_| malformed("it is not JSON with token_ids, features.mm_hashes and mm_placeholders"))?;
    let RenderAnswer { token_ids: tokens, features: Some(Features { mm_hashes, mut mm_placeholders }) } = answer else {
        return Err(malformed("it has no features"));
    };
    let places = mm_placeholders.remove("image").unwrap_or_default();
    if places.len() != ids.len() || !mm_placeholders.is_empty() {
        return Err(malformed("it has another number of images than the conversation"));
    }
    if mm_hashes.get("image").is_none_or(|found| found != ids) {
        return Err(malformed("it has not kept the identities of the images"));
    }
    let (mut end, mut placeholder) = (0, None);
    for ImagePlace { offset, length } in &places {
        let (from, to) = (*offset as usize, *offset as usize + *length as usize);
        let found =
            tokens.get(from..to).filter(|_| from >= end).ok_or_else(|| malformed("its images are not in order in the prompt"))?;
        let first = found.first().ok_or_else(|| malformed("an image has no tokens"))?;
        if found.iter().any(|token| token != first) || *placeholder.get_or_insert(*first) != *first {
            return Err(malformed("an image has different tokens; the model's images cannot be used"));
        }
        end = to;
    }
    let of_images: usize = places.iter().map(|place| place.length as usize).sum();
    if tokens.iter().filter(|token| Some(**token) == placeholder).count() != of_images {
        return Err(malformed("tokens of images occur outside of the images"));
    }
    Ok(Rendered { tokens, places })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn ids(count: u8) -> Vec<String> {
        (0..count).map(|id| ImageId([id; 32]).to_string()).collect()
    }

    fn answer(places: &[(u32, u32)], change: impl FnOnce(&mut Value)) -> Vec<u8> {
        let places: Vec<_> = places.iter().map(|(offset, length)| json!({ "offset": offset, "length": length })).collect();
        let hashes = ids(places.len() as u8);
        let features = json!({ "mm_hashes": { "image": hashes }, "mm_placeholders": { "image": places }, "kwargs_data": null });
        let mut answer = json!({ "token_ids": [1, 9, 9, 9, 2, 9, 3], "features": features, "model": "m" });
        change(&mut answer);
        answer.to_string().into_bytes()
    }

    #[test]
    fn places_of_images_are_read() {
        let rendered = check(&answer(&[(1, 3), (5, 1)], |_| {}), &ids(2)).expect("the answer is valid");
        assert_eq!(rendered.tokens, [1, 9, 9, 9, 2, 9, 3]);
        let place = |offset, length| ImagePlace { offset, length };
        assert_eq!(rendered.places, [place(1, 3), place(5, 1)]);
    }

    #[test]
    fn hostile_answers_are_refused() {
        let valid = [(1, 3), (5, 1)];
        let other = "f".repeat(64);
        let text = |answer: &mut Value| answer["features"] = Value::Null;
        let video = |answer: &mut Value| answer["features"]["mm_placeholders"]["video"] = json!([]);
        let hashes = |answer: &mut Value| answer["features"]["mm_hashes"]["image"][0] = other.as_str().into();
        let no_hashes = |answer: &mut Value| answer["features"]["mm_hashes"] = json!({});
        let outside = |answer: &mut Value| answer["token_ids"] = json!([9, 9, 9, 9, 2, 9, 3]);
        let several = |answer: &mut Value| answer["token_ids"] = json!([1, 9, 8, 9, 2, 9, 3]);
        let negative = |answer: &mut Value| answer["token_ids"][0] = (-1).into();
        for hostile in [
            answer(&[(1, 3)], |_| {}),
            answer(&[(1, 3), (5, 1), (5, 1)], |_| {}),
            answer(&[(5, 1), (1, 3)], |_| {}),
            answer(&[(1, 3), (3, 1)], |_| {}),
            answer(&[(1, 3), (5, 3)], |_| {}),
            answer(&[(1, 3), (u32::MAX, u32::MAX)], |_| {}),
            answer(&[(1, 3), (5, 0)], |_| {}),
            answer(&[(1, 3), (4, 2)], |_| {}),
            answer(&[(1, 3), (6, 1)], |_| {}),
            answer(&valid, text),
            answer(&valid, video),
            answer(&valid, hashes),
            answer(&valid, no_hashes),
            answer(&valid, outside),
            answer(&valid, several),
            answer(&valid, negative),
            b"[".to_vec(),
            b"{}".to_vec(),
        ] {
            let refused = check(&hostile, &ids(2));
            assert!(matches!(refused, Err(RenderFailure::Malformed(_))), "{refused:?} {}", String::from_utf8_lossy(&hostile));
        }
    }

    #[test]
    fn identity_depends_on_all_bytes_and_on_the_namespace() {
        let namespace = |account: &str| Namespace::new("m", "r", "", "").of_account(account);
        let of = |account, file: &[u8]| image_id(&namespace(account), file);
        assert_eq!(of("a", b"image"), of("a", b"image"));
        assert_ne!(of("a", b"image"), of("a", b"imagf"));
        assert_ne!(of("a", b"image"), of("b", b"image"));
        // The lengths are part of the hash, so bytes cannot move from one input to the other.
        let (short, long) = (Namespace::from_bytes(b"a"), Namespace::from_bytes(b"ab"));
        assert_ne!(image_id(&short, b"bc"), image_id(&long, b"c"));
    }
}
