use super::*;
use proptest::{collection::vec, prelude::*};
use tandem_engine::TokenLogprob;
use tandem_grammar::{CallInput, Constraint, InputPlace, Kind};

const VOCAB_SIZE: usize = 100;

fn request() -> GenerateRequest {
    GenerateRequest {
        request_id: "r".to_owned(),
        prompt: vec![1, 2, 3],
        cache_namespace: b"namespace".to_vec(),
        sampling: Some(v1::Sampling { temperature: 1.0, top_p: 1.0, repetition_penalty: 1.0, ..Default::default() }),
        samples: 1,
        ..Default::default()
    }
}

fn refused(change: impl FnOnce(&mut GenerateRequest)) -> Invalid {
    let mut request = request();
    change(&mut request);
    DecodeRequest::check(request, VOCAB_SIZE).expect_err("the request is invalid")
}

#[test]
fn images_must_lie_in_order_at_equal_tokens_of_a_prompt_that_is_prefilled_here() {
    let image = |offset, length| v1::Image {
        id: vec![7; 32],
        offset,
        length,
        media_type: "image/png".to_owned(),
        data: b"data".as_slice().into(),
    };
    let with = |images: Vec<v1::Image>| GenerateRequest { prompt: vec![1, 9, 9, 9, 2, 9], images, ..request() };
    let checked = DecodeRequest::check(with(vec![image(1, 3), image(5, 1)]), VOCAB_SIZE).expect("the images are valid");
    let places: Vec<_> = checked.generate.images.iter().map(|image| (image.start.at, image.len)).collect();
    assert_eq!(places, [(1, 3), (5, 1)]);
    for images in [
        vec![image(1, 0)],
        vec![image(5, 2)],
        vec![image(u32::MAX, u32::MAX)],
        vec![image(3, 2)],
        vec![image(5, 1), image(1, 3)],
        vec![image(1, 3), image(3, 1)],
        vec![v1::Image { id: vec![7; 31], ..image(1, 3) }],
        vec![v1::Image { media_type: "text/html".to_owned(), ..image(1, 3) }],
        vec![v1::Image { media_type: format!("image/{}", "x".repeat(100)), ..image(1, 3) }],
        vec![image(1, 3); IMAGES_MAX + 1],
    ] {
        let refused = DecodeRequest::check(with(images.clone()), VOCAB_SIZE).expect_err("the images are invalid");
        assert_eq!(refused, Invalid::Images, "{images:?}");
    }
    let prefill = WorkerRef { instance_id: "i".to_owned(), address: "a:1".to_owned(), ..Default::default() };
    let elsewhere = GenerateRequest { prefill: Some(prefill), ..with(vec![image(1, 3)]) };
    assert_eq!(DecodeRequest::check(elsewhere, VOCAB_SIZE).expect_err("it has a prefill worker"), Invalid::ImagesElsewhere);
}

fn refused_sampling(change: impl FnOnce(&mut v1::Sampling)) -> &'static str {
    match refused(|request| change(request.sampling.as_mut().expect("the request has sampling settings"))) {
        Invalid::OutOfRange { field, .. } => field,
        other => panic!("{other:?}"),
    }
}

#[test]
fn invalid_request_is_refused_with_its_reason() {
    assert_eq!(refused(|request| request.prompt.clear()), Invalid::EmptyPrompt);
    for token in [100, u32::MAX] {
        assert_eq!(refused(|request| request.prompt.push(token)), Invalid::UnknownToken);
    }
    let generated = |sample, tokens: &[u32]| v1::ResumedSample { sample, tokens: tokens.to_vec() };
    for resumed in [
        vec![generated(0, &[100])],
        vec![generated(2, &[])],
        vec![generated(1, &[]), generated(0, &[])],
        vec![generated(1, &[]), generated(1, &[])],
        vec![generated(0, &[1, 2, 3])],
    ] {
        let change = |request: &mut GenerateRequest| {
            (request.samples, request.generated) = (2, resumed);
            request.sampling.as_mut().expect("the request has sampling settings").max_tokens = Some(2);
        };
        assert_eq!(refused(change), Invalid::Generated);
    }
    for samples in [0, 129, u32::MAX] {
        assert_eq!(refused(|request| request.samples = samples), Invalid::Samples);
    }
    assert_eq!(refused(|request| request.sampling = None), Invalid::NoSampling);
    let whole =
        WorkerRef { worker_id: "p".to_owned(), instance_id: "i".to_owned(), address: "a:1".to_owned(), ..Default::default() };
    for part in [WorkerRef { instance_id: String::new(), ..whole.clone() }, WorkerRef { address: String::new(), ..whole.clone() }]
    {
        assert_eq!(refused(|request| request.prefill = Some(part)), Invalid::NoPrefillWorker);
    }
    let elsewhere = |request: &mut GenerateRequest| {
        request.prefill = Some(whole);
        request.prompt_logprobs = Some(0);
    };
    assert_eq!(refused(elsewhere), Invalid::PromptLogprobsElsewhere);
    assert!(matches!(
        refused(|request| request.prompt_logprobs = Some(21)),
        Invalid::OutOfRange { field: "prompt_logprobs", .. }
    ));
}

#[test]
fn sampling_out_of_range_is_refused_with_the_name_of_its_field() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1e9] {
        assert_eq!(refused_sampling(|sampling| sampling.temperature = bad), "temperature");
        assert_eq!(refused_sampling(|sampling| sampling.top_p = bad), "top_p");
        assert_eq!(refused_sampling(|sampling| sampling.min_p = bad), "min_p");
        assert_eq!(refused_sampling(|sampling| sampling.frequency_penalty = bad), "frequency_penalty");
        assert_eq!(refused_sampling(|sampling| sampling.presence_penalty = bad), "presence_penalty");
        assert_eq!(refused_sampling(|sampling| sampling.repetition_penalty = bad), "repetition_penalty");
        assert_eq!(refused_sampling(|sampling| sampling.logit_bias = [(1, bad)].into()), "logit_bias");
    }
    assert_eq!(refused_sampling(|sampling| sampling.top_p = 0.0), "top_p");
    assert_eq!(refused_sampling(|sampling| sampling.top_p = 1.001), "top_p");
    assert_eq!(refused_sampling(|sampling| sampling.repetition_penalty = 0.0), "repetition_penalty");
    assert_eq!(refused_sampling(|sampling| sampling.logprobs = Some(21)), "logprobs");
    assert_eq!(refused_sampling(|sampling| sampling.allowed_token_ids = vec![1, VOCAB_SIZE as u32]), "allowed_token_ids");
    assert_eq!(refused_sampling(|sampling| sampling.logprob_token_ids = vec![VOCAB_SIZE as u32]), "logprob_token_ids");
    assert_eq!(refused_sampling(|sampling| sampling.bad_words = bad_words(1, vec![1, VOCAB_SIZE as u32])), "bad_words");
    assert_eq!(refused_sampling(|sampling| sampling.bad_words = bad_words(1, Vec::new())), "bad_words");
    let more_than_all = |sampling: &mut v1::Sampling| (sampling.min_tokens, sampling.max_tokens) = (5, Some(4));
    assert_eq!(refused_sampling(more_than_all), "min_tokens");
}

fn bad_words(forms: usize, tokens: Vec<u32>) -> Vec<v1::BadWord> {
    vec![v1::BadWord { text: "x".to_owned(), forms: vec![v1::TokenSequence { tokens }; forms] }]
}

#[test]
fn constraints_reach_the_engine_and_a_constraint_without_a_kind_is_refused() {
    let sampling = |kind, begins_after: &str| v1::Sampling {
        temperature: 1.0,
        top_p: 1.0,
        repetition_penalty: 1.0,
        constraint: Some(v1::Constraint { kind, begins_after: begins_after.to_owned(), lenient: true }),
        ..Default::default()
    };
    let checked = |sampling| DecodeRequest::check(GenerateRequest { sampling: Some(sampling), ..request() }, VOCAB_SIZE);
    let choices = v1::constraint::Choices { texts: vec!["a".to_owned()] };
    let texts = |text: &str| vec![text.to_owned()];
    let wire_input = |end: &str, grammar: &str, regex: &str| {
        let place = v1::constraint::InputPlace { begin: texts("b"), head: texts("h"), end: end.to_owned(), tail: texts("t") };
        v1::constraint::CallInput { places: vec![place], grammar: grammar.to_owned(), regex: regex.to_owned() }
    };
    let input = |end, kind| {
        let place = InputPlace { begin: texts("b"), head: texts("h"), end, tail: texts("t") };
        CallInput { places: vec![place], kind }
    };
    let inputs = vec![input(None, Kind::Grammar("g".to_owned())), input(Some("e".to_owned()), Kind::Regex("r".to_owned()))];
    for (wire, expected) in [
        (v1::constraint::Kind::JsonSchema("{}".to_owned()), Kind::JsonSchema { schema: "{}".to_owned(), lenient: true }),
        (v1::constraint::Kind::JsonObject(true), Kind::JsonObject),
        (v1::constraint::Kind::Regex("a".to_owned()), Kind::Regex("a".to_owned())),
        (v1::constraint::Kind::Choice(choices), Kind::Choice(vec!["a".to_owned()])),
        (v1::constraint::Kind::Grammar("a".to_owned()), Kind::Grammar("a".to_owned())),
        (v1::constraint::Kind::StructuralTag("{}".to_owned()), Kind::StructuralTag("{}".to_owned())),
    ] {
        for marker in ["", "</think>"] {
            let request = checked(sampling(Some(wire.clone()), marker)).expect("the request is valid");
            let begins_after = Some(marker.to_owned()).filter(|marker| !marker.is_empty());
            assert_eq!(request.generate.sampling.constraint, Some(Constraint { kind: expected.clone(), begins_after }));
        }
    }
    let call_inputs = vec![wire_input("", "g", ""), wire_input("e", "", "r")];
    let request = checked(v1::Sampling { constraint: None, call_inputs, ..sampling(None, "") }).expect("the request is valid");
    assert_eq!(request.generate.sampling.constraint, Some(Kind::CallInputs(inputs).into()));
    assert!(matches!(checked(sampling(None, "")), Err(Invalid::NoConstraint)));
    let kind = || Some(v1::constraint::Kind::JsonObject(true));
    assert!(matches!(checked(sampling(kind(), &"x".repeat(1_025))), Err(Invalid::OutOfRange { field: "begins_after", .. })));
}

#[test]
fn allowed_tokens_bad_words_and_logprob_tokens_reach_the_engine() {
    let sampling = v1::Sampling {
        temperature: 1.0,
        top_p: 1.0,
        repetition_penalty: 1.0,
        logprobs: Some(0),
        allowed_token_ids: vec![4, 2],
        bad_words: bad_words(2, vec![1, 3]),
        logprob_token_ids: vec![3, 1],
        ..Default::default()
    };
    let wire = GenerateRequest { sampling: Some(sampling), ..request() };
    let sampling = DecodeRequest::check(wire, VOCAB_SIZE).expect("the request is valid").generate.sampling;
    assert_eq!((&*sampling.allowed_token_ids, sampling.logprob_token_ids.as_slice()), (&[4, 2][..], &[3, 1][..]));
    assert_eq!(&*sampling.bad_words, [tandem_engine::BadWord { text: "x".to_owned(), forms: vec![vec![1, 3]; 2] }]);
}

#[test]
fn overlong_field_is_refused_with_its_name() {
    let too_long = |change: fn(&mut GenerateRequest, String)| match refused(|request| change(request, "x".repeat(1_025))) {
        Invalid::OutOfRange { field, .. } => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(too_long(|request, text| request.request_id = text), "request_id");
    assert_eq!(too_long(|request, text| request.traceparent = text), "traceparent");
    assert_eq!(too_long(|request, text| request.account = text), "account");
    assert_eq!(too_long(|request, text| request.cache_namespace = text.repeat(4).into()), "cache_namespace");
    assert_eq!(refused_sampling(|sampling| sampling.logit_bias = (0..1_025).map(|token| (token, 1.0)).collect()), "logit_bias");
    assert_eq!(refused_sampling(|sampling| sampling.stop_token_ids = vec![1; 1_025]), "stop_token_ids");
    assert_eq!(refused_sampling(|sampling| sampling.logprob_token_ids = vec![1; 21]), "logprob_token_ids");
    assert_eq!(refused_sampling(|sampling| sampling.bad_words = bad_words(257, vec![1])), "bad_words");
    assert_eq!(refused_sampling(|sampling| sampling.bad_words = bad_words(1, vec![1; 513])), "bad_words");
    let long_text = vec![v1::BadWord { text: "x".repeat(1_025), forms: Vec::new() }];
    assert_eq!(refused_sampling(|sampling| sampling.bad_words = long_text.clone()), "bad_words");
    let longest = GenerateRequest { request_id: "x".repeat(1_024), cache_namespace: vec![0; 4_096], ..request() };
    assert!(DecodeRequest::check(longest, VOCAB_SIZE).is_ok());
}

proptest! {
    #[test]
    fn every_field_of_a_generate_request_reaches_the_engine_unchanged(
        (prompt, samples) in (vec(0..VOCAB_SIZE as u32, 1..50), 1..=128_u32),
        (max_tokens, min_tokens, seed, top_k) in any::<(Option<u32>, u32, u64, u32)>(),
        (temperature, top_p, min_p) in (0.0..2.0_f32, 0.01..1.0_f32, 0.0..1.0_f32),
        (frequency, presence, repetition) in (-2.0..2.0_f32, -2.0..2.0_f32, 0.1..2.0_f32),
        (bias, stop_token_ids, logprobs) in (any::<u32>(), vec(any::<u32>(), 0..4), proptest::option::of(0..20_u32)),
        remote in any::<bool>(),
    ) {
        let min_tokens = max_tokens.map_or(min_tokens, |max_tokens| min_tokens.min(max_tokens));
        let prefill = WorkerRef { worker_id: "p".to_owned(), instance_id: "i".to_owned(), address: "a:1".to_owned(), ..Default::default() };
        let wire = GenerateRequest {
            prompt: prompt.clone(),
            samples,
            prefill: remote.then_some(prefill),
            sampling: Some(v1::Sampling {
                max_tokens, min_tokens, temperature, top_p, top_k, min_p,
                frequency_penalty: frequency, presence_penalty: presence, repetition_penalty: repetition,
                logit_bias: [(bias, -1.5)].into(), seed, seed_is_given: remote,
                stop_token_ids: stop_token_ids.clone(), logprobs, ..Default::default()
            }),
            ..request()
        };
        let DecodeRequest { generate, output, .. } = DecodeRequest::check(wire, VOCAB_SIZE).expect("the request is valid");
        prop_assert_eq!((generate.prompt, generate.samples), (prompt, samples));
        prop_assert_eq!(generate.kv == KvSource::Remote, remote);
        prop_assert_eq!(generate.namespace.as_bytes(), b"namespace");
        prop_assert_eq!((output.samples, &output.stop_tokens, output.prompt), (samples as usize, &stop_token_ids, Vec::new()));
        let s = generate.sampling;
        prop_assert_eq!((s.max_tokens, s.min_tokens, s.seed, s.seed_is_given, s.top_k), (max_tokens, min_tokens, seed, remote, top_k));
        prop_assert_eq!((s.temperature, s.top_p, s.min_p), (temperature, top_p, min_p));
        prop_assert_eq!((s.frequency_penalty, s.presence_penalty, s.repetition_penalty), (frequency, presence, repetition));
        prop_assert_eq!((s.logit_bias[&bias], s.stop_token_ids, s.logprobs), (-1.5, stop_token_ids, logprobs));
    }
}

#[test]
fn conversion_of_logprobs_keeps_tokens_and_order() {
    let logprobs = TokenLogprobs {
        logprob: -0.5,
        top: vec![TokenLogprob { token: 7, logprob: -0.1 }, TokenLogprob { token: 9, logprob: -0.5 }],
    };
    let reported = token(9, Some(logprobs.clone()));
    assert_eq!((reported.token, reported.logprob), (9, Some(-0.5)));
    assert_eq!(reported.top.iter().map(|top| top.token).collect::<Vec<_>>(), [7, 9]);
    assert_eq!(token(9, None), v1::Token { token: 9, logprob: None, top: vec![] });
    let prompt = prompt_logprobs(&[4, 9], vec![None, Some(logprobs)]);
    assert_eq!(prompt.tokens.iter().map(|token| (token.token, token.logprob)).collect::<Vec<_>>(), [(4, None), (9, Some(-0.5))]);
}

#[test]
fn finished_message_has_the_finish_reason_and_the_stop_token() {
    let stop = finished(3, FinishReason::Stop(2), None);
    assert_eq!((stop.sample, stop.reason(), stop.stop_token), (3, finished::FinishReason::Stop, Some(2)));
    assert_eq!(stop.stop_logprobs, None);
    let likely = finished(3, FinishReason::Stop(2), Some(TokenLogprobs { logprob: -0.5, top: Vec::new() }));
    assert_eq!(likely.stop_logprobs, Some(v1::Token { token: 2, logprob: Some(-0.5), top: Vec::new() }));
    let length = finished(0, FinishReason::Length, None);
    assert_eq!((length.reason(), length.stop_token), (finished::FinishReason::Length, None));
}
