//! Tests of jobs whose engine sends invalid answers.

use super::*;
use crate::{
    api::{EngineServer, Instance},
    mirror::{Mirror, MirrorSettings},
    slots::{SlotLimits, Slots},
};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use parking_lot::Mutex;
use tandem_engine::{EngineInfo, TokenLogprob};
use tandem_kv::{HashKey, Namespace, Priority};

/// A server that answers a generation with these chunks, and then sends nothing.
struct Fake(Mutex<Vec<AnswerChunk>>);

#[tonic::async_trait]
impl EngineServer for Fake {
    async fn check_health(&self) -> Result<Instance, EngineFailure> {
        Ok(None)
    }
}

#[tonic::async_trait]
impl Api for Fake {
    async fn generate(
        &self,
        _: &EngineCall,
        _: &Sampling,
        _: Option<KvHandle>,
    ) -> Result<BoxStream<'static, Result<AnswerChunk, EngineFailure>>, EngineFailure> {
        let chunks = std::mem::take(&mut *self.0.lock());
        Ok(stream::iter(chunks.into_iter().map(Ok)).chain(stream::pending()).boxed())
    }

    async fn prompt_logprobs(&self, _: &EngineCall, _: u32) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure> {
        unreachable!("no test requests the logprobs of a prompt")
    }

    async fn abort(&self, _: &str) {}
}

/// Returns the state of an engine whose model has a vocabulary of 10 tokens and a context of 100. It has room for one request.
pub(crate) fn shared() -> Arc<AdapterState> {
    let mirror = Mirror::new(MirrorSettings {
        hash_key: HashKey::NONE,
        block_size: 1,
        engine_block_size: 1,
        device_blocks: 100,
        hits_are_reported: false,
        store: None,
        engine_blocks_max: 0,
    });
    let info = EngineInfo { vocab_size: 10, context_length: 100, block_size: 1, capacity_blocks: 100, block_bytes: 0 };
    let slots = Slots::new(SlotLimits { running: 1, blocks: 100, waiting: 1 });
    Arc::new(AdapterState::new(info, slots, mirror.expect("the block sizes are equal"), false))
}

/// Returns the events of a generation after a prompt of three tokens.
async fn events(max_tokens: Option<u32>, chunks: Vec<AnswerChunk>) -> Vec<Event> {
    let shared = shared();
    let request = Generate {
        request_id: "request".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: Namespace::new("model", "1", "", ""),
        prompt: vec![1, 2, 3],
        sampling: Sampling { max_tokens, ..Sampling::default() },
        samples: 1,
        kv: KvSource::Local,
        prompt_logprobs: None,
        generated: Vec::new(),
        images: [].into(),
    };
    let api: Arc<dyn Api> = Arc::new(Fake(Mutex::new(chunks)));
    let mut job = generate(&shared, &api, request).expect("the engine has a place");
    let mut events = Vec::new();
    while let Some(event) = (&mut job as &mut dyn Job).next().await {
        events.push(event);
    }
    events
}

fn tokens(ids: impl IntoIterator<Item = TokenId>) -> AnswerChunk {
    AnswerChunk { tokens: ids.into_iter().map(|token| (token, None)).collect(), ..AnswerChunk::default() }
}

fn count(events: &[Event]) -> usize {
    events.iter().filter(|event| matches!(event, Event::Token { .. })).count()
}

#[tokio::test]
async fn answer_ends_at_the_limit_although_the_engine_generates_more() {
    for (max_tokens, expected) in [(Some(2), 2), (Some(1_000), 97), (None, 97)] {
        let chunks = (0..200).map(|_| tokens([4])).collect();
        let one_by_one = events(max_tokens, chunks).await;
        let at_once = events(max_tokens, vec![tokens([4; 200])]).await;
        for events in [one_by_one, at_once] {
            assert_eq!(count(&events), expected, "{events:?}");
            assert!(matches!(events.last(), Some(Event::Finished { reason: FinishReason::Length, .. })), "{events:?}");
            assert!(events.iter().any(|event| matches!(event, Event::Scheduled { cached: None })), "{events:?}");
        }
    }
}

#[tokio::test]
async fn token_outside_the_vocabulary_ends_the_request() {
    let alternative = TokenLogprobs { logprob: -1.0, top: vec![TokenLogprob { token: 10, logprob: -1.0 }] };
    let of_alternative = AnswerChunk { tokens: vec![(4, Some(alternative))], ..AnswerChunk::default() };
    for chunk in [tokens([10]), tokens([u32::MAX]), of_alternative] {
        let events = events(Some(5), vec![tokens([9]), chunk]).await;
        assert_eq!(count(&events), 1, "{events:?}");
        assert!(matches!(events.last(), Some(Event::Refused(Refusal::Unusable(_)))), "{events:?}");
    }
}

#[tokio::test]
async fn reported_cached_tokens_are_limited_to_the_prompt_length() {
    for (reported, expected) in [(2, 2), (3, 3), (u32::MAX, 3)] {
        let usage = Some(EngineUsage { cached_tokens: Some(reported), prompt_tokens: None });
        let events =
            events(Some(2), vec![tokens([4, 5]), AnswerChunk { finish: Some(Finish::Length), usage, ..AnswerChunk::default() }])
                .await;
        let cached = events.iter().find_map(|event| if let Event::Scheduled { cached } = event { *cached } else { None });
        assert_eq!(cached, Some(CachedTokens::on_device(expected)), "{events:?}");
    }
}
