//! Parses an admitted request's body, reserves the request's sequences, and tokenizes its texts.

use super::{
    app::{App, HeaderOptions},
    body,
    passed::PassedAnswer,
};
use crate::{
    admission::{Admitted, Client},
    dispatch::Prompt,
    error::ApiError,
    models::Served,
    passthrough::ModelServers,
    prompt::reusable_hashes,
};
use axum::response::Response;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use tandem_api::{Ignored, Options, Problem, RequestError, answer::Style, elements_max};
use tandem_kv::{ImageId, ImageStart, Namespace, Priority, TokenId};
use tandem_proto::v1::{Image, WantedEndpoints};
use tandem_text::{NamespaceEncodings, ServedModel, chat::OutputFormat};
use tokio::{
    sync::watch,
    time::{Duration, Instant, timeout},
};

/// Bodies longer than this are parsed on a blocking thread. Parsing a shorter body takes less than a millisecond.
const PARSE_INLINE_BYTES: usize = 64 << 10;
/// Texts longer than this are tokenized on a blocking thread. Tokenizing a shorter text takes a millisecond at most.
const ENCODE_INLINE_BYTES: usize = 4 << 10;
/// Maximum time for checking a constraint. Most take less than a millisecond.
const CHECK_MAX: Duration = Duration::from_secs(1);

/// An admitted request and what was read from its headers.
pub(super) struct Incoming {
    pub(super) app: Arc<App>,
    /// The request id, which this server generates.
    pub(super) id: String,
    /// The id that the client gave to the request.
    pub(super) client_request_id: Option<Arc<str>>,
    pub(super) admitted: Admitted,
    pub(super) header_options: HeaderOptions,
    pub(super) traceparent: String,
    /// The priority; the default until the sequences are reserved.
    pub(super) priority: Priority,
    /// The client whose limits this request counts against; `None`: only the limits for all clients apply.
    pub(super) client: Option<Client>,
    /// The permits for the body's memory. They are released when the prompts are encoded.
    pub(super) body: body::HeldBytes,
    /// The fields of the body that this server does not know; `None`: the body is not parsed.
    pub(super) ignored: Option<Ignored>,
    /// Receives reports that prompts wait in workers' queues: see [`Prompt::queued`].
    pub(super) queued: watch::Sender<Option<Instant>>,
}

/// A request that is ready to run.
pub(super) struct Job {
    pub(super) served: Served,
    /// The prompts, each with its text if the text is to be echoed.
    pub(super) prompts: Vec<(Prompt, Option<String>)>,
    pub(super) options: Options,
    pub(super) style: Style,
    /// How the answer to a conversation is split into pieces, such as reasoning and tool calls.
    pub(super) pieces: Option<Arc<OutputFormat>>,
}

/// A prompt's tokens, and the images among them.
#[derive(Default)]
pub(super) struct PromptTokens {
    pub(super) tokens: Vec<TokenId>,
    pub(super) images: Vec<Image>,
    /// The share of the budget for bodies that the images use.
    pub(super) held: body::HeldBytes,
}

impl From<Vec<TokenId>> for PromptTokens {
    fn from(tokens: Vec<TokenId>) -> Self {
        Self { tokens, ..Self::default() }
    }
}

fn start(image: &Image) -> Option<ImageStart> {
    Some(ImageStart { at: image.offset as usize, id: ImageId(image.id.as_slice().try_into().ok()?) })
}

/// The work that a request's body demands.
pub(super) enum Work {
    Run(Box<Job>),
    /// The request needs no worker, and this is its answer.
    Answered(Response),
    /// Another server answers.
    Passed(Box<PassedAnswer>),
}

impl From<Job> for Work {
    fn from(job: Job) -> Self {
        Self::Run(Box::new(job))
    }
}

impl From<Response> for Work {
    fn from(response: Response) -> Self {
        Self::Answered(response)
    }
}

impl Incoming {
    /// Parses the body's JSON, and records the fields that this server does not know. A long body is parsed on a blocking thread.
    ///
    /// # Errors
    /// The body is not a valid request.
    pub(super) async fn parse<T: DeserializeOwned + Send + 'static>(&mut self, body: Bytes) -> Result<T, ApiError> {
        let elements_max = elements_max(self.app.models.context_length_max());
        let (request, ignored) = self.read(body.len(), move || tandem_api::parse(&body, elements_max)).await?;
        // If a body is parsed as two types, a field is ignored only if both ignore it.
        self.ignored = Some(match self.ignored.take() {
            Some(before) => before.also_in(&ignored),
            None => ignored,
        });
        Ok(request)
    }

    /// Runs `read`, which reads a body of `bytes` bytes. For a long body, `read` runs on a blocking thread.
    ///
    /// # Errors
    /// `read` fails, or no core is free in time.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        bytes: usize,
        read: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, RequestError> {
        if bytes <= PARSE_INLINE_BYTES { read() } else { self.app.parsing.run(self.client.as_ref(), read).await }
    }

    /// Returns the cached encodings that the request may use: those of its cache namespace.
    pub(super) fn encodings(&self, model: &ServedModel, cache_salt: &str) -> NamespaceEncodings {
        self.app.encodings.of(self.namespace(model, cache_salt))
    }

    pub(super) fn namespace(&self, model: &ServedModel, cache_salt: &str) -> Namespace {
        App::namespace(model, self.header_options.cache_owner.as_deref(), cache_salt)
    }

    /// Renders a conversation and tokenizes it, on a blocking thread: a model's template may take seconds even for a short conversation.
    ///
    /// # Errors
    /// `encode` fails, or no core is free in time.
    pub(super) async fn encode_conversation<T: Send + 'static>(
        &self,
        encode: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, RequestError> {
        self.app.encoding.run(self.client.as_ref(), encode).await
    }

    /// Runs `encode`, which tokenizes `text_bytes` bytes of text. For a long text, `encode` runs on a blocking thread.
    ///
    /// # Errors
    /// `encode` fails, or no core is free in time.
    pub(super) async fn encode<T: Send + 'static>(
        &self,
        text_bytes: usize,
        encode: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, RequestError> {
        if text_bytes <= ENCODE_INLINE_BYTES {
            return encode();
        }
        self.app.encoding.run(self.client.as_ref(), encode).await
    }

    /// Checks, on a blocking thread, whether the request's constraint on the text can be enforced. Does nothing if there is no constraint,
    /// if an earlier request of this client has passed the same check, or in an endpoint picker, because the server checks the constraint.
    /// A check that takes too long continues to its end, and the client's next check waits for it.
    ///
    /// # Errors
    /// The constraint cannot be enforced, checking it takes longer than [`CHECK_MAX`], or no core is free in time.
    pub(super) async fn check_constraint(&self, options: &Options) -> Result<(), ApiError> {
        let Some(stated) = options.constraint.clone().filter(|_| self.app.alternatives.is_none()) else { return Ok(()) };
        let key = (self.client.clone(), stated.constraint.clone());
        if self.app.checked.lock().get(&key).is_some() {
            return Ok(());
        }
        let too_long =
            Problem::Constraint { problem: format!("checking it takes longer than {} s; simplify it", CHECK_MAX.as_secs()) };
        let too_long = ApiError::invalid(&*stated.param, too_long);
        let check = self.app.constraints.start(self.client.as_ref(), move || stated.check()).await?;
        timeout(CHECK_MAX, check).await.map_err(|_| too_long)?.unwrap_or(Err(RequestError::Failed))?;
        let removed = self.app.checked.lock().push(key, ());
        drop(removed);
        Ok(())
    }

    /// Determines the priority, and reserves all sequences of this many prompts.
    ///
    /// # Errors
    /// The client asks for a better priority than its key allows, or the limit of the client or of all clients is reached.
    pub(super) fn reserve(&mut self, prompts: usize, options: &Options) -> Result<(), ApiError> {
        self.priority = self.header_options.priority(options.priority, self.admitted.call.key.as_deref())?;
        self.admitted.reserve(self.client.clone(), prompts.saturating_mul(options.samples as usize))
    }

    /// Takes the tokens of the job's prompts from the limit of the request's key.
    ///
    /// # Errors
    /// Fewer tokens are left.
    pub(super) fn charge(&self, job: &Job) -> Result<(), ApiError> {
        let Some(key) = &self.admitted.call.key else { return Ok(()) };
        let tokens: usize = job.prompts.iter().map(|(prompt, _)| prompt.tokens.len()).sum();
        Ok(key.take_prompt_tokens(tokens.try_into().unwrap_or(u32::MAX))?)
    }

    /// Returns the served model that the request names. A request that may omit the model's name gets the only model.
    ///
    /// # Errors
    /// The request names a model that is not served, or none although there are several, or its key may not use the model.
    pub(super) fn served_or_only(&mut self, model: Option<&str>) -> Result<Served, ApiError> {
        let only = (self.app.models.len() == 1).then(|| self.app.models.first().model.id.clone());
        self.served(model.or(only.as_deref()))
    }

    /// Returns the served model that the request names.
    ///
    /// # Errors
    /// The request names no model or one that is not served, or its key may not use the model.
    pub(super) fn served(&mut self, model: Option<&str>) -> Result<Served, ApiError> {
        let model = self.known(model)?;
        // A LoRA may have been unloaded since.
        self.app.models.get(model).ok_or_else(|| match self.app.passed.get(model) {
            Some(_) => ApiError::PassedThrough { model: model.to_owned() },
            None => ApiError::ModelNotFound { model: model.to_owned() },
        })
    }

    /// Returns the servers of the model that the request names, to which the request is passed through.
    ///
    /// # Errors
    /// The request names no model or one that is not passed through, or its key may not use the model.
    pub(super) fn passed_through(&mut self, model: Option<&str>) -> Result<Arc<ModelServers>, ApiError> {
        let model = self.known(model)?;
        self.app.passed.get(model).cloned().ok_or_else(|| ApiError::NotPassedThrough { model: model.to_owned() })
    }

    /// Returns the id of the model that the request names, which is served or passed through, and records it.
    ///
    /// # Errors
    /// The request names no model or an unknown one, or its key may not use the model.
    fn known<'a>(&mut self, model: Option<&'a str>) -> Result<&'a str, ApiError> {
        let model = model.ok_or_else(|| ApiError::invalid("model", Problem::Missing))?;
        if self.app.models.get(model).is_none() && self.app.passed.get(model).is_none() {
            return Err(ApiError::ModelNotFound { model: model.to_owned() });
        }
        model.clone_into(&mut self.admitted.model);
        self.admitted.call.set_model(model);
        if self.admitted.call.key.as_ref().is_some_and(|key| !key.allows(model)) {
            return Err(ApiError::ModelNotAllowed { model: model.to_owned() });
        }
        Ok(model)
    }

    /// Returns the model's prompt with these tokens. `index` is the prompt's position in the request; the prompt's id is made from it.
    pub(super) fn prompt(
        &self,
        Served { model, identity }: &Served,
        index: usize,
        PromptTokens { tokens, images, held }: PromptTokens,
        options: &Options,
        prompt_logprobs: Option<u32>,
    ) -> Prompt {
        let (namespace, block_size) = (self.namespace(model, &options.cache_salt), self.app.block_size);
        let starts: Vec<ImageStart> = images.iter().filter_map(start).collect();
        // Heads compare tokens, which are the same for all images of one size.
        let other_namespace_blocks = match images.is_empty() {
            true => self.app.heads.record(&self.header_options.client, &model.id, &namespace, block_size, &tokens),
            false => 0,
        };
        let rest_of_context = model.usable_context().saturating_sub(tokens.len() as u32);
        let max_tokens = options.sampling.max_tokens.unwrap_or(rest_of_context);
        Prompt {
            request_id: format!("{}-{index}", self.id).into(),
            client_request_id: self.client_request_id.clone(),
            traceparent: self.traceparent.clone(),
            span: self.admitted.span.clone(),
            account: self.header_options.account.clone(),
            identity: Arc::clone(identity),
            sequence_hashes: reusable_hashes(&self.app.hash_key, &namespace, block_size, &tokens, &starts),
            other_namespace_blocks,
            tokens,
            images,
            _held: held,
            namespace,
            sampling: options.sampling.clone(),
            samples: options.samples,
            min_tokens: if options.ends_at_limit() { max_tokens } else { options.sampling.min_tokens },
            max_tokens,
            prompt_logprobs,
            max_wait: self.header_options.max_wait,
            queued: self.queued.clone(),
            priority: self.priority,
            equal: None,
            endpoints: self.app.alternatives.map(|alternatives| WantedEndpoints { alternatives, ..WantedEndpoints::default() }),
        }
    }
}
