//! Tests of constraints on generated text, with the simulated device, whose tokens are bytes.

use super::*;
use crate::{FinishReason, Generated, Logits, SampleRequest};
use proptest::prelude::*;
use std::sync::LazyLock;
use tandem_grammar::{Constraint, Kind, Matcher, Vocabulary};
use tandem_kv::TokenId;
use tandem_model::sim::{IM_END, VOCAB_SIZE};

fn vocabulary() -> Arc<Vocabulary> {
    static TOKENS: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        let special = [&b"<|im_start|>"[..], b"<|im_end|>"].map(|name| (name, true));
        Arc::new(Vocabulary::new(bytes.chunks(1).map(|byte| (byte, false)).chain(special), VOCAB_SIZE))
    });
    Arc::clone(&TOKENS)
}

fn engine(settings: SimSettings) -> EngineHandle {
    start_with(SimEngine::new(settings), SETTINGS).with_vocabulary(vocabulary())
}

fn constrained(constraint: impl Into<Constraint>, max_tokens: u32, seed: u64) -> Generate {
    let sampling = Sampling {
        max_tokens: Some(max_tokens),
        seed,
        stop_token_ids: vec![IM_END],
        constraint: Some(constraint.into()),
        ..Sampling::default()
    };
    Generate { sampling, ..generate(max_tokens) }
}

fn schema(schema: &str) -> Kind {
    Kind::JsonSchema { schema: schema.to_owned(), lenient: false }
}

/// Each sample's tokens, without stop tokens, and the reason why the sample has ended.
type Samples = Vec<(Vec<TokenId>, Option<FinishReason>)>;

async fn run(engine: &EngineHandle, generate: Generate) -> Result<Samples, Refusal> {
    let mut samples = vec![(Vec::new(), None); generate.samples as usize];
    let mut job = engine.generate(generate).await?;
    while let Some(event) = job.next().await {
        match event {
            Event::Token { token: IM_END, .. } => {}
            Event::Token { sample, token, logprobs } => {
                assert!(logprobs.is_none_or(|logprobs| logprobs.logprob <= 0.0));
                samples[sample as usize].0.push(token);
            }
            Event::Finished { sample, reason } => samples[sample as usize].1 = Some(reason),
            Event::Refused(refusal) => return Err(refusal),
            Event::Failed => panic!("the engine failed"),
            _ => {}
        }
    }
    Ok(samples)
}

fn text(tokens: &[TokenId]) -> String {
    String::from_utf8(tokens.iter().map(|token| *token as u8).collect()).expect("the text is UTF-8")
}

/// Checks that the tokens are allowed, and that the text is complete unless it has reached its maximum length.
fn check(matcher: &Matcher, (tokens, reason): &(Vec<TokenId>, Option<FinishReason>)) {
    let mut matcher = matcher.clone();
    for token in tokens {
        assert!(!matcher.is_complete() && matcher.mask().expect("the text continues").is_none_or(|mask| mask.allows(*token)));
        matcher.accept(*token).expect("an allowed token is accepted");
    }
    match reason.expect("the sample has ended") {
        FinishReason::Complete => assert!(matcher.is_complete()),
        FinishReason::Stop(token) => assert!(matcher.mask().expect("the text may end").is_none_or(|mask| mask.allows(token))),
        FinishReason::Length => assert!(!matcher.is_complete()),
    }
}

#[tokio::test(start_paused = true)]
async fn answers_meet_their_constraints() {
    let engine = engine(SimSettings::default());
    let record = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":9},"age":{"type":"integer","minimum":0,"maximum":130},"tags":{"type":"array","items":{"enum":["a","b"]},"maxItems":2}},"required":["name","age","tags"],"additionalProperties":false}"#;
    for (kind, ended) in [
        (schema(record), true),
        (Kind::Choice(vec!["tea".into(), "toast".into(), "\"oats\"".into()]), true),
        (Kind::Regex("[a-f]{3}-[0-9]{2}".into()), true),
        (Kind::Grammar("root ::= (\"tea\" | \"oat\") \" \" [a-z]{2,4}".into()), true),
        (Kind::Regex("[a-z ]*".into()), false),
        (Kind::JsonObject, false),
    ] {
        let mut differ = false;
        for seed in 0..8 {
            let job = constrained(kind.clone(), if ended { 1_500 } else { 160 }, seed);
            let matcher = vocabulary()
                .compile(job.sampling.constraint.as_ref().expect("the job has a constraint"), &[IM_END])
                .expect("valid");
            let samples = run(&engine, Generate { samples: 3, ..job }).await.expect("the constraint is valid");
            for sample in &samples {
                check(&matcher, sample);
                assert!(!ended || sample.1 != Some(FinishReason::Length), "{kind:?}: {}", text(&sample.0));
                if matches!(kind, Kind::JsonSchema { .. }) {
                    let value: serde_json::Value = serde_json::from_str(&text(&sample.0)).expect("the answer is JSON");
                    assert!(value["age"].as_u64().is_some_and(|age| age <= 130), "{value}");
                }
            }
            differ |= samples.iter().any(|sample| *sample != samples[0]);
        }
        assert!(kind == Kind::JsonObject || differ, "{kind:?}: all samples are equal");
    }
    engine.wait_for_load(|load| load.in_use_blocks == 0).await;
}

#[tokio::test(start_paused = true)]
async fn constraints_combine_with_other_parameters() {
    let engine = engine(SimSettings::default());
    let open = || Kind::Regex("[a-z ]{3,}".into());
    let ended = |job: Generate| async { run(&engine, job).await.expect("the request is valid").remove(0) };

    let mut job = constrained(Kind::Regex("a{5}b?".into()), 40, 1);
    job.sampling.stop_token_ids.clear();
    let (tokens, reason) = ended(job).await;
    assert_eq!(
        (text(&tokens).as_str(), reason),
        ("aaaaab", Some(FinishReason::Complete)),
        "without stop tokens the text continues"
    );

    let mut job = constrained(Kind::Choice(vec!["ab".into()]), 40, 1);
    job.sampling.min_tokens = 10;
    assert_eq!(
        ended(job).await,
        (b"ab".map(TokenId::from).to_vec(), Some(FinishReason::Complete)),
        "the text is complete, so no token can follow"
    );

    let mut job = constrained(open(), 90, 1);
    job.sampling.min_tokens = 60;
    assert!(ended(job).await.0.len() >= 60);

    let mut job = constrained(open(), 30, 1);
    job.sampling.logit_bias = [(TokenId::from(b'Z'), 200.0), (TokenId::from(b'q'), 200.0)].into();
    assert_eq!(text(&ended(job).await.0), "q".repeat(30), "a bias cannot allow a token");

    for temperature in [0.0, 0.5, 2.0] {
        let mut job = constrained(schema(r#"{"type":"integer","minimum":10,"maximum":99}"#), 100, 1);
        job.sampling = Sampling { temperature, top_p: 0.9, frequency_penalty: 1.0, logprobs: Some(2), ..job.sampling };
        let (tokens, _) = ended(job).await;
        assert!((10..100).contains(&text(&tokens).trim().parse().expect("a number")), "{}", text(&tokens));
    }
}

#[tokio::test(start_paused = true)]
async fn constraint_applies_only_after_its_marker() {
    let engine = engine(SimSettings::default());
    // The simulated device generates these letters often, so the marker soon appears in the text.
    let constraint = Constraint { kind: Kind::Choice(vec!["{}".into()]), begins_after: Some("et".into()) };
    let (mut constrained_ends, mut free_ends) = (0, 0);
    for seed in 0..40 {
        let (tokens, reason) = run(&engine, constrained(constraint.clone(), 400, seed)).await.expect("valid").remove(0);
        let answer = text(&tokens);
        match answer.split_once("et") {
            Some((_, rest)) => {
                assert_eq!((rest, reason), ("{}", Some(FinishReason::Complete)), "{answer}");
                constrained_ends += 1;
            }
            None => {
                assert_eq!(reason, Some(FinishReason::Stop(IM_END)), "{answer}");
                free_ends += 1;
            }
        }
    }
    assert!(constrained_ends > 0 && free_ends > 0, "both kinds of answers occur");
}

#[tokio::test(start_paused = true)]
async fn constraints_that_cannot_be_enforced_are_refused() {
    let engine = engine(SimSettings::default());
    let refused = |engine: EngineHandle, kind: Kind| async move {
        engine.generate(constrained(kind, 5, 1)).await.err().map(|refusal| refusal.to_string()).expect("the request is refused")
    };
    let refusal = refused(engine.clone(), schema(r#"{"not":{}}"#)).await;
    assert_eq!(refusal, "the constraint on the output cannot be enforced: at $, the keyword 'not' is not supported");
    let without = refused(start(), Kind::JsonObject).await;
    assert_eq!(without, "this worker's engine does not support constraints on the output");
    let mut resumed = constrained(Kind::Choice(vec!["ab".into()]), 5, 1);
    resumed.generated = vec![Generated { sample: 0, tokens: vec![b'b'.into()] }];
    let refusal = engine.generate(resumed).await.err().expect("tokens that violate the constraint are refused");
    assert!(refusal.to_string().contains("does not meet the constraint"), "{refusal}");
}

#[tokio::test(start_paused = true)]
async fn resumed_sample_whose_text_is_complete_ends_without_a_new_token() {
    let engine = engine(SimSettings::default());
    let mut job = constrained(Kind::Choice(vec!["ab".into(), "ac".into()]), 5, 1);
    job.samples = 2;
    job.generated = vec![
        Generated { sample: 0, tokens: b"ab".map(TokenId::from).to_vec() },
        Generated { sample: 1, tokens: vec![b'a'.into()] },
    ];
    let samples = run(&engine, job).await.expect("the request is valid");
    assert_eq!(samples[0], (Vec::new(), Some(FinishReason::Complete)));
    assert!(matches!(text(&samples[1].0).as_str(), "b" | "c") && samples[1].1 == Some(FinishReason::Complete));
}

/// The steps take less time than the masks, so masks are late and the engine's thread waits for them.
#[test]
fn tokens_do_not_depend_on_late_masks() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime starts");
    let job = || Generate { samples: 3, ..constrained(Kind::Regex("([a-z]{1,40} ){0,9}".into()), 60, 5) };
    let expected = runtime.block_on(async { run(&engine(SimSettings::default()), job()).await });
    let sim = SimEngine::new(SimSettings { speedup: 1e6, ..SimSettings::default() });
    let threaded = EngineHandle::start(Box::new(sim), SETTINGS).with_vocabulary(vocabulary());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime starts");
    assert_eq!(runtime.block_on(run(&threaded, job())), expected);
}

/// A device that samples tokens itself, as GPUs do. If it is broken, it does not apply the mask.
struct SamplingDevice {
    sim: SimEngine,
    applies_masks: bool,
}

impl Engine for SamplingDevice {
    fn describe(&self) -> EngineInfo {
        self.sim.describe()
    }

    fn step(&mut self, chunks: &[crate::Chunk<'_>]) -> Result<StepOutput, EngineError> {
        let requests: Vec<SampleRequest<'_>> = chunks
            .iter()
            .filter_map(|chunk| match chunk.logits {
                Logits::Sample(request) => Some(request),
                _ => None,
            })
            .collect();
        let logits = self.sim.step(chunks)?.into_logits();
        let rows = logits.chunks(VOCAB_SIZE).zip(&requests);
        let token = |(row, request): (&[f32], &SampleRequest<'_>)| {
            if self.applies_masks { request.on_host(row) } else { crate::SampledToken { token: b'Z'.into(), logprobs: None } }
        };
        Ok(StepOutput::Sampled { tokens: rows.map(token).collect(), logits: Vec::new() })
    }

    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError> {
        self.sim.read_block(block, into)
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        self.sim.write_block(block, bytes)
    }
}

#[tokio::test(start_paused = true)]
async fn device_that_ignores_the_mask_fails_only_the_constrained_request() {
    let job = || constrained(Kind::Regex("[a-y]{4}".into()), 40, 3);
    let device = |applies_masks| {
        let device = SamplingDevice { sim: SimEngine::new(SimSettings::default()), applies_masks };
        start_device(device).with_vocabulary(vocabulary())
    };
    let expected = run(&engine(SimSettings::default()), job()).await.expect("the request is valid");
    assert_eq!(run(&device(true), job()).await.expect("the request is valid"), expected);
    let broken = device(false);
    let refusal = run(&broken, Generate { samples: 2, ..job() }).await.expect_err("the request of the broken device is refused");
    assert!(refusal.to_string().contains("does not meet the constraint"), "{refusal}");
    assert!(run(&broken, generate(3)).await.is_ok(), "other requests are not affected");
    broken.wait_for_load(|load| load.in_use_blocks == 0 && load.running_sequences == 0).await;
}

/// Runs a job on a cache so small that samples preempt each other, then again with the first tokens of each sample given. All answers must be equal.
fn resumed_equals_uninterrupted(kind: &Kind, seed: u64, kept: usize) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime starts");
    runtime.block_on(async {
        let job = Generate { samples: 3, ..constrained(kind.clone(), 60, seed) };
        let whole = run(&engine(SimSettings::default()), job.clone()).await.expect("the request is valid");
        let small = engine(SimSettings { capacity_blocks: 18, ..SimSettings::default() });
        assert_eq!(run(&small, job.clone()).await.expect("the request is valid"), whole);
        let kept = |(sample, (tokens, _)): (u32, &(Vec<TokenId>, _))| Generated {
            sample,
            tokens: tokens[..kept.min(tokens.len())].to_vec(),
        };
        let generated: Vec<Generated> = (0..).zip(&whole).map(kept).collect();
        let rest = run(&small, Generate { generated: generated.clone(), ..job }).await.expect("the request is valid");
        for ((rest, generated), whole) in rest.into_iter().zip(generated).zip(whole) {
            assert_eq!(([generated.tokens, rest.0].concat(), rest.1), whole);
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn resumed_and_preempted_samples_equal_uninterrupted_ones(kind in 0..4usize, seed in 0..1_000u64, kept in 0..70usize) {
        let kinds = [
            Kind::Regex("[a-z ]{20,}".into()),
            Kind::JsonObject,
            schema(r#"{"type":"array","items":{"type":"string","maxLength":7},"minItems":2,"maxItems":5}"#),
            Kind::Grammar("root ::= item (\",\" item){0,9}\nitem ::= \"(\" root \")\" | [a-e]{1,3}".into()),
        ];
        resumed_equals_uninterrupted(&kinds[kind], seed, kept);
    }
}
