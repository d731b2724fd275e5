use super::*;

fn next(sampler: &mut Sampler, logits: &[f32], position: u32) -> TokenId {
    let token = sampler.sample(logits, position).token;
    sampler.accept(token).expect("no constraint forbids the token");
    token
}

fn sampled(sampling: Sampling, logits: &[f32], count: u32) -> Vec<TokenId> {
    let sampler = Sampler::new(sampling, &[]);
    (0..count).map(|position| sampler.sample(logits, position).token).collect()
}

#[test]
fn greedy_selects_the_lowest_id_of_equal_logits() {
    assert_eq!(sampled(Sampling { temperature: 0.0, ..Sampling::default() }, &[0.0, 3.0, 3.0, 1.0], 1), [1]);
}

#[test]
fn argmax_finds_the_maximum_at_any_index() {
    for len in [1, 7, 8, 9, 40] {
        for place in 0..len {
            let mut logits = vec![-1.0f32; len];
            logits[place..].fill(2.0);
            assert_eq!(argmax(&logits), place as TokenId, "of {len}");
            logits[..place].fill(f32::NAN);
            assert_eq!(argmax(&logits), place as TokenId, "of {len}");
        }
    }
    assert_eq!(argmax(&[f32::NEG_INFINITY; 9]), 0);
    assert_eq!(argmax(&[f32::NAN; 9]), 0);
}

#[test]
fn exp_is_within_its_error_bound() {
    for x in (0..=500_000).map(|step| step as f32 * -1e-4) {
        let exact = libm::exp(f64::from(x));
        assert!((f64::from(exp(x)) - exact).abs() <= 2e-7 * exact, "e^{x}: {}", exp(x));
    }
    assert_eq!(exp(0.0), 1.0, "the likeliest token has weight 1");
}

#[test]
fn token_frequencies_follow_the_softmax() {
    let logits = [0.0f32, 1.0, 2.0, -1.0];
    let tokens = sampled(Sampling { seed: 7, ..Sampling::default() }, &logits, 40_000);
    let total: f32 = logits.iter().map(|logit| logit.exp()).sum();
    for (token, logit) in logits.iter().enumerate() {
        let seen = tokens.iter().filter(|token_id| **token_id == token as TokenId).count() as f32 / 40_000.0;
        let expected = logit.exp() / total;
        assert!((seen - expected).abs() < 0.01, "token {token}: seen {seen}, expected {expected}");
    }
}

#[test]
fn top_k_top_p_and_min_p_keep_the_likeliest_tokens() {
    // The logits give the probabilities 0.4, 0.3, 0.2 and 0.1.
    let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
    let kept = |sampling: Sampling| {
        let mut tokens = sampled(sampling, &logits, 2_000);
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    };
    assert_eq!(kept(Sampling { top_k: 2, ..Sampling::default() }), [0, 1]);
    assert_eq!(kept(Sampling { top_p: 0.5, ..Sampling::default() }), [0, 1]);
    assert_eq!(kept(Sampling { top_p: 0.95, ..Sampling::default() }), [0, 1, 2, 3]);
    assert_eq!(kept(Sampling { min_p: 0.45, ..Sampling::default() }), [0, 1, 2]);
    assert_eq!(
        kept(Sampling { top_k: 2, top_p: 0.5, ..Sampling::default() }),
        [0],
        "top-p applies to the tokens that top-k kept"
    );
}

#[test]
fn top_p_keeps_tokens_beyond_the_first_sorted_candidates() {
    let logits = vec![0.0f32; 5_000];
    let sampler = Sampler::new(Sampling { top_p: 0.5, ..Sampling::default() }, &[]);
    assert_eq!(sampler.candidates(&logits).len(), 2_500);
}

#[test]
fn penalties_and_bias_change_the_sampled_token() {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let logits = [1.0f32, 0.9, 0.0];
    let mut sampler = Sampler::new(Sampling { presence_penalty: 0.2, ..greedy.clone() }, &[]);
    assert_eq!([0, 1, 2].map(|position| next(&mut sampler, &logits, position)), [0, 1, 0]);
    let mut sampler = Sampler::new(Sampling { frequency_penalty: 0.2, ..greedy.clone() }, &[]);
    assert_eq!([0, 1, 2, 3].map(|position| next(&mut sampler, &logits, position)), [0, 1, 0, 1]);
    let sampler = Sampler::new(Sampling { repetition_penalty: 2.0, ..greedy.clone() }, &[0]);
    assert_eq!(sampler.sample(&logits, 0).token, 1, "the prompt's tokens count as seen");
    let bias = HashMap::from([(2, 100.0), (9_999, 1.0)]);
    assert_eq!(sampled(Sampling { logit_bias: bias, ..greedy.clone() }, &logits, 1), [2]);
    let min_tokens = Sampling { min_tokens: 1, stop_token_ids: vec![0], ..greedy };
    let mut sampler = Sampler::new(min_tokens, &[]);
    assert_eq!([0, 1].map(|position| next(&mut sampler, &logits, position)), [1, 0]);
}

#[test]
fn non_finite_logits_do_not_prevent_sampling() {
    let logits = [5.0f32, 1.0, -1.0];
    let penalty = Sampling { repetition_penalty: f32::MIN_POSITIVE, ..Sampling::default() };
    assert_eq!(Sampler::new(penalty, &[0]).sample(&logits, 0).token, 0, "5 divided by the penalty is infinite");
    let no_token = Sampling { min_tokens: 1, stop_token_ids: vec![0, 1, 2], ..Sampling::default() };
    assert_eq!(sampled(no_token, &logits, 1), [0]);
    assert_eq!(sampled(Sampling::default(), &[f32::NAN, f32::NEG_INFINITY, 1.0], 1), [2]);
}

#[test]
fn no_token_is_sampled_if_all_logits_are_nans() {
    for temperature in [0.0, 1.0] {
        assert_eq!(sampled(Sampling { temperature, ..Sampling::default() }, &[f32::NAN; 3], 1), [NO_TOKEN]);
    }
}

#[test]
fn lowest_temperatures_select_the_likeliest_token() {
    for temperature in [1e-3, 1e-8, f32::MIN_POSITIVE, 1e-45] {
        assert_eq!(sampled(Sampling { temperature, ..Sampling::default() }, &[-20.0, 20.0, 19.0], 3), [1; 3], "{temperature}");
    }
}

#[test]
fn logprobs_ignore_the_temperature() {
    let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
    let sampling = Sampling { temperature: 0.1, logprobs: Some(2), ..Sampling::default() };
    let SampledToken { token, logprobs } = Sampler::new(sampling, &[]).sample(&logits, 0);
    let logprobs = logprobs.expect("the request asked for logprobs");
    assert!((logprobs.logprob - logits[token as usize]).abs() < 1e-6);
    assert_eq!(logprobs.top.iter().map(|top| top.token).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn sampling_depends_only_on_seed_and_position() {
    let logits = vec![0.0f32; 1_000];
    let of = |seed| sampled(Sampling { seed, ..Sampling::default() }, &logits, 50);
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
    let sampler = Sampler::new(Sampling { seed: 1, ..Sampling::default() }, &[]);
    assert_eq!(sampler.for_sample(1, &[]).sample(&logits, 3).token, of(2)[3], "sample i equals a request with seed + i");
}

#[test]
fn only_allowed_tokens_are_sampled() {
    let logits: Vec<f32> = (0..100).map(|token| (token % 7) as f32).collect();
    let allowed = |tokens: &[TokenId]| Sampling { allowed_token_ids: tokens.into(), ..Sampling::default() };
    let mut tokens = sampled(allowed(&[3, 97, 50, 4_000]), &logits, 2_000);
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens, [3, 50, 97]);
    let greedy = Sampling { temperature: 0.0, logit_bias: HashMap::from([(1, 90.0)]), ..allowed(&[3, 50]) };
    assert_eq!(sampled(greedy, &logits, 1), [3]);
    let none_left = Sampling { min_tokens: 1, stop_token_ids: vec![50], ..allowed(&[50]) };
    assert_eq!(sampled(none_left, &logits, 1), [50], "the only allowed token is sampled even if it is excluded");
}

#[test]
fn bad_word_is_never_completed() {
    let word = |forms: &[&[TokenId]]| BadWord { text: String::new(), forms: forms.iter().map(|form| form.to_vec()).collect() };
    let bad_words: Arc<[BadWord]> = Arc::new([word(&[&[2]]), word(&[&[0, 1, 0], &[1, 1]])]);
    let logits = [0.0f32; 4];
    let generated = |mut sampler: Sampler, from: u32| -> Vec<TokenId> {
        (from..3_000).map(|position| next(&mut sampler, &logits, position)).collect()
    };
    let sampler = Sampler::new(Sampling { bad_words: Arc::clone(&bad_words), seed: 3, ..Sampling::default() }, &[1]);
    let tokens = generated(sampler.clone(), 0);
    assert!(!tokens.contains(&2));
    assert!(!tokens.windows(2).any(|pair| pair == [1, 1]) && !tokens.windows(3).any(|three| three == [0, 1, 0]));
    assert!(tokens.windows(2).any(|pair| pair == [0, 1]), "the beginning of a bad word is allowed");
    assert!(tokens.contains(&3));
    let resumed = sampler.for_sample(0, &tokens[..1_000]);
    assert_eq!(
        generated(resumed, 1_000),
        tokens[1_000..],
        "a resumed sample includes the tokens that another worker has generated"
    );
    // Bad words apply to the generated text only: the prompt's last token is 1, and the first generated token may be 1, too.
    let firsts = sampled(Sampling { bad_words, ..Sampling::default() }, &logits, 100);
    assert!(firsts.contains(&1));
}

#[test]
fn requested_tokens_replace_the_likeliest_alternatives() {
    let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
    let sampling = Sampling { temperature: 0.0, logprobs: Some(1), logprob_token_ids: vec![3, 0, 1], ..Sampling::default() };
    let logprobs = Sampler::new(sampling, &[]).sample(&logits, 0).logprobs.expect("the request asked for logprobs");
    assert_eq!(logprobs.top.iter().map(|top| top.token).collect::<Vec<_>>(), [3, 0, 1]);
    assert!(logprobs.top.iter().all(|top| (top.logprob - logits[top.token as usize]).abs() < 1e-6));
}
