//! Conversions between wire messages and the engine's types. Requests are checked here, and only here.

use std::{sync::Arc, time::Duration};
use tandem_engine::{FinishReason, Generate, Generated, KvSource, PromptImage, TokenLogprobs};
use tandem_kv::{ImageId, ImageStart, Namespace, TokenId};
use tandem_proto::{
    IMAGES_MAX, NAMESPACE_BYTES_MAX, TEXT_BYTES_MAX,
    v1::{self, GenerateRequest, WorkerRef, finished},
};
use tandem_worker::{InvalidSampling, LOGPROBS_MAX, sampling};
use tokio::time::Instant;

/// Maximum number of samples of one prompt.
const SAMPLES_MAX: u32 = 128;
const MEDIA_TYPE_BYTES_MAX: usize = 32;

#[derive(Debug)]
pub(crate) struct DecodeRequest {
    pub(crate) attempt: u32,
    pub(crate) traceparent: String,
    pub(crate) generate: Generate,
    pub(crate) output: Output,
    pub(crate) prefill: Option<WorkerRef>,
    /// The time within which the prefill must begin; `None` sets no limit.
    pub(crate) start_within: Option<Duration>,
    /// The time until which the request may wait in the queue.
    pub(crate) wait_until: Option<Instant>,
}

#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) samples: usize,
    pub(crate) stop_tokens: Vec<TokenId>,
    /// The prompt's token ids; empty unless the request wants the prompt's logprobs.
    pub(crate) prompt: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Invalid {
    #[error("prompt must have at least one token")]
    EmptyPrompt,
    #[error("prompt must have only token ids of the model's vocabulary")]
    UnknownToken,
    #[error("sampling must be set")]
    NoSampling,
    #[error("samples must be between 1 and {SAMPLES_MAX}")]
    Samples,
    #[error("generated must list each sample once, in ascending order, with at most max_tokens tokens of the vocabulary")]
    Generated,
    #[error("{field} must be {allowed}")]
    OutOfRange { field: &'static str, allowed: &'static str },
    #[error("constraint must have a kind")]
    NoConstraint,
    #[error("prefill must have an instance_id and an address")]
    NoPrefillWorker,
    #[error("a prompt whose logprobs are requested must be prefilled on the decode worker")]
    PromptLogprobsElsewhere,
    #[error(
        "images must be at most {IMAGES_MAX}, of image types, with ids of 32 bytes, and in order at equal tokens of the prompt"
    )]
    Images,
    #[error("a prompt with images must be prefilled on the decode worker")]
    ImagesElsewhere,
    #[error("this worker's engine reads no images")]
    NoImages,
}

impl From<InvalidSampling> for Invalid {
    fn from(invalid: InvalidSampling) -> Self {
        match invalid {
            InvalidSampling::OutOfRange { field, allowed } => Self::OutOfRange { field, allowed },
            InvalidSampling::NoConstraint => Self::NoConstraint,
        }
    }
}

impl DecodeRequest {
    pub(crate) fn check(request: GenerateRequest, vocab_size: usize) -> Result<Self, Invalid> {
        let known = |token: &TokenId| usize::try_from(*token).is_ok_and(|token| token < vocab_size);
        if request.prompt.is_empty() {
            return Err(Invalid::EmptyPrompt);
        }
        check_texts(&request)?;
        if !request.prompt.iter().all(known) {
            return Err(Invalid::UnknownToken);
        }
        if !(1..=SAMPLES_MAX).contains(&request.samples) {
            return Err(Invalid::Samples);
        }
        if request.prompt_logprobs.is_some_and(|top| top > LOGPROBS_MAX) {
            return Err(Invalid::OutOfRange { field: "prompt_logprobs", allowed: "at most 20" });
        }
        if let Some(prefill) = &request.prefill {
            if prefill.address.is_empty() || prefill.instance_id.is_empty() {
                return Err(Invalid::NoPrefillWorker);
            }
            if request.prompt_logprobs.is_some() {
                return Err(Invalid::PromptLogprobsElsewhere);
            }
        }
        let images = images(&request)?;
        let sampling = sampling(request.sampling.ok_or(Invalid::NoSampling)?, vocab_size)?;
        let generated = request.generated;
        let tokens_max = sampling.max_tokens.map_or(usize::MAX, |max| max as usize);
        let in_order = generated.is_sorted_by(|one, next| one.sample < next.sample);
        let resumable =
            |of: &v1::ResumedSample| of.sample < request.samples && of.tokens.len() <= tokens_max && of.tokens.iter().all(known);
        if !in_order || !generated.iter().all(resumable) {
            return Err(Invalid::Generated);
        }
        Ok(Self {
            attempt: request.attempt,
            traceparent: request.traceparent,
            output: Output {
                samples: if generated.is_empty() { request.samples as usize } else { generated.len() },
                stop_tokens: sampling.stop_token_ids.clone(),
                prompt: if request.prompt_logprobs.is_some() { request.prompt.clone() } else { Vec::new() },
            },
            generate: Generate {
                request_id: request.request_id,
                account: request.account,
                priority: request.priority.unwrap_or_default().into(),
                namespace: Namespace::from_bytes(&request.cache_namespace),
                prompt: request.prompt,
                sampling,
                samples: request.samples,
                kv: if request.prefill.is_some() { KvSource::Remote } else { KvSource::Local },
                prompt_logprobs: request.prompt_logprobs,
                generated: generated.into_iter().map(|of| Generated { sample: of.sample, tokens: of.tokens }).collect(),
                images,
            },
            prefill: request.prefill,
            start_within: request.prefill_start_timeout_ms.map(|ms| Duration::from_millis(ms.into())),
            wait_until: request.wait_max_ms.map(|ms| Instant::now() + Duration::from_millis(ms.into())),
        })
    }
}

/// Checks the sizes of all texts of a request except the prompt.
fn check_texts(request: &GenerateRequest) -> Result<(), Invalid> {
    let texts = [
        ("request_id", request.request_id.len(), TEXT_BYTES_MAX, "at most 1024 bytes"),
        ("traceparent", request.traceparent.len(), TEXT_BYTES_MAX, "at most 1024 bytes"),
        ("account", request.account.len(), TEXT_BYTES_MAX, "at most 1024 bytes"),
        ("cache_namespace", request.cache_namespace.len(), NAMESPACE_BYTES_MAX, "at most 4096 bytes"),
    ];
    let too_long = texts.into_iter().find(|(_, bytes, bytes_max, _)| bytes > bytes_max);
    too_long.map_or(Ok(()), |(field, _, _, allowed)| Err(Invalid::OutOfRange { field, allowed }))
}

/// Returns the images of the prompt. The engine gets one placeholder for each image, so all placeholders of an image must be the same token.
fn images(request: &GenerateRequest) -> Result<Arc<[PromptImage]>, Invalid> {
    if request.prefill.is_some() && !request.images.is_empty() {
        return Err(Invalid::ImagesElsewhere);
    }
    let mut end = 0;
    let image = |v1::Image { id, offset, length, media_type, data }: &v1::Image| {
        let (at, len) = (*offset as usize, *length as usize);
        let placeholders = request.prompt.get(at..at.checked_add(len)?).filter(|_| at >= end)?;
        let is_image = media_type.starts_with("image/") && media_type.len() <= MEDIA_TYPE_BYTES_MAX;
        let is_one_token = placeholders.first().is_some_and(|first| placeholders.iter().all(|token| token == first));
        end = at + len;
        let start = ImageStart { at, id: ImageId(id.as_slice().try_into().ok()?) };
        (is_image && is_one_token).then(|| PromptImage { start, len, media_type: media_type.clone(), data: data.clone() })
    };
    let images = if request.images.len() > IMAGES_MAX { None } else { request.images.iter().map(image).collect() };
    images.ok_or(Invalid::Images)
}

pub(crate) fn started(started: &tandem_engine::Started) -> v1::DecodeStarted {
    v1::DecodeStarted {
        queue_ms: started.queue.as_secs_f64() * 1e3,
        kv_transfer_ms: started.kv_transfer.as_secs_f64() * 1e3,
        kv_transfer_bytes: started.kv_transfer_bytes,
    }
}

pub(crate) fn token(token: TokenId, logprobs: Option<TokenLogprobs>) -> v1::Token {
    let Some(TokenLogprobs { logprob, top }) = logprobs else {
        return v1::Token { token, ..Default::default() };
    };
    let top = top.into_iter().map(|alternative| v1::TokenLogprob { token: alternative.token, logprob: alternative.logprob });
    v1::Token { token, logprob: Some(logprob), top: top.collect() }
}

pub(crate) fn prompt_logprobs(prompt: &[TokenId], logprobs: Vec<Option<TokenLogprobs>>) -> v1::PromptLogprobs {
    v1::PromptLogprobs { tokens: prompt.iter().zip(logprobs).map(|(id, logprobs)| token(*id, logprobs)).collect() }
}

/// Converts the end of a sample. `logprobs` belongs to the stop token that ended the sample.
pub(crate) fn finished(sample: u32, reason: FinishReason, logprobs: Option<TokenLogprobs>) -> v1::Finished {
    let (reason, stop_token) = match reason {
        FinishReason::Stop(token) => (finished::FinishReason::Stop, Some(token)),
        FinishReason::Complete => (finished::FinishReason::Stop, None),
        FinishReason::Length => (finished::FinishReason::Length, None),
    };
    let stop_logprobs = stop_token.filter(|_| logprobs.is_some()).map(|stop| token(stop, logprobs));
    v1::Finished { sample, reason: reason.into(), stop_token, stop_logprobs }
}

#[cfg(test)]
mod tests;
