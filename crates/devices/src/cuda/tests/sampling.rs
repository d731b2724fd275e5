//! Compares the sampling kernel with sampling on the host, for the same logits and settings.

use super::{emulated::ORDERS, *};
use std::collections::HashMap;
use tandem_engine::{BadWord, NO_TOKEN, TokenLogprobs};
use tandem_model::Pairs;

pub(super) const SHAPE: Shape = Shape {
    half: Half::BFloat16,
    layers: 1,
    width: 8,
    heads: 1,
    kv_heads: 1,
    head_dim: 8,
    ffn: 8,
    vocab_size: 1_013,
    block_size: 16,
    pairs: Pairs::Halves,
    small_shared_memory: false,
};
const POSITION: u32 = 40;

fn sample_all(logits: &[f32], vocab_size: usize, requests: &[SampleRequest<'_>], order: u32) -> Vec<SampledToken> {
    let device = Arc::new(Emulated::new(&SHAPE, order));
    let inputs = SampleInputs::new(requests, 0, vocab_size);
    let masks = inputs.masks(requests, vocab_size);
    let requests = inputs;
    let (rows, top_max) = (requests.rows(), requests.top_max());
    let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let given = Memory::of(&device, &bytes(&logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>())).unwrap();
    let settings = Memory::of(&device, &requests.settings).unwrap();
    let adjustments = Memory::of(&device, &[requests.adjustments.clone(), bytes(&requests.words)].concat()).unwrap();
    let scratch = Memory::new(&device, size_of_val(logits)).unwrap();
    let sampled = Memory::new(&device, rows * (1 + top_max) * LOGPROB_BYTES).unwrap();
    let arguments = &mut [
        given.address(),
        scratch.address(),
        vocab_size as u64,
        settings.address(),
        adjustments.address(),
        adjustments.address(),
        sampled.address(),
        sampled.address() + (rows * LOGPROB_BYTES) as u64,
        top_max as u64,
    ];
    device.upload(adjustments.address() + 4 * requests.words_from as u64, &masks).unwrap();
    device.launch(Launch { kernel: Kernel::Sample, grid: [rows, 1, 1], shared_bytes: 0 }, arguments).unwrap();
    let mut bytes = vec![0; sampled.bytes()];
    device.download(sampled.address(), &mut bytes).unwrap();
    requests.read(0, rows, &bytes)
}

/// Returns random logits, some of which are equal.
fn logits(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| (random.number() * 40.0).round() / 8.0).collect()
}

fn near(found: &Option<TokenLogprobs>, expected: &Option<TokenLogprobs>) {
    let (Some(found), Some(expected)) = (found, expected) else { return assert_eq!(found, expected) };
    assert!((found.logprob - expected.logprob).abs() < 1e-5, "{} is not {}", found.logprob, expected.logprob);
    assert_eq!(found.top.len(), expected.top.len());
    for (found, expected) in found.top.iter().zip(&expected.top) {
        assert_eq!(found.token, expected.token);
        assert!((found.logprob - expected.logprob).abs() < 1e-5);
    }
}

fn settings() -> Vec<Sampling> {
    let plain = Sampling::default;
    let bias = |pairs: &[(u32, f32)]| pairs.iter().copied().collect::<HashMap<_, _>>();
    vec![
        plain(),
        Sampling { temperature: 0.0, ..plain() },
        Sampling { temperature: 0.0, logprobs: Some(5), ..plain() },
        Sampling { temperature: 0.3, logprobs: Some(0), ..plain() },
        Sampling { temperature: 2.0, top_k: 1, ..plain() },
        Sampling { temperature: 1e-8, logprobs: Some(1), ..plain() },
        Sampling { top_k: 7, ..plain() },
        Sampling { top_k: 40, top_p: 0.9, ..plain() },
        Sampling { top_p: 0.5, ..plain() },
        Sampling { top_p: 0.01, ..plain() },
        Sampling { top_p: 0.999, temperature: 1.5, logprobs: Some(20), ..plain() },
        Sampling { min_p: 0.2, ..plain() },
        Sampling { min_p: 0.05, top_k: 30, top_p: 0.8, temperature: 0.7, ..plain() },
        Sampling { frequency_penalty: 1.5, presence_penalty: -0.5, ..plain() },
        Sampling { repetition_penalty: 1.3, top_p: 0.9, ..plain() },
        Sampling { temperature: 0.0, repetition_penalty: 0.7, frequency_penalty: 0.3, logprobs: Some(2), ..plain() },
        Sampling { temperature: 0.0, logit_bias: bias(&[(3, 100.0), (4, -100.0), (5_000_000, 1.0)]), ..plain() },
        Sampling { temperature: 0.0, min_tokens: 9, stop_token_ids: vec![3, 900], logit_bias: bias(&[(3, 100.0)]), ..plain() },
        Sampling { top_k: 100_000, ..plain() },
        Sampling { temperature: 0.0, logprobs: Some(0), logprob_token_ids: vec![30, 2, 17], ..plain() },
        Sampling { allowed_token_ids: [5, 29, 9_999].into(), logprob_token_ids: vec![5], logprobs: Some(9), ..plain() },
        Sampling { temperature: 5.0, allowed_token_ids: (0..31).step_by(3).collect(), bad_words: bad_words(), ..plain() },
        Sampling { temperature: 0.0, bad_words: bad_words(), presence_penalty: 2.0, ..plain() },
    ]
}

/// Returns bad words of three kinds: single tokens, all pairs of tokens whose first token is even, and one sequence of many tokens.
fn bad_words() -> Arc<[BadWord]> {
    let pairs = (0..31).step_by(2).flat_map(|first| (0..31).map(move |last| vec![first, last])).collect();
    [vec![vec![3], vec![6]], pairs, vec![vec![7; 100]]].map(|forms| BadWord { text: String::new(), forms }).into()
}

#[test]
fn kernel_samples_the_same_tokens_as_the_host() {
    // With the last size, rows are aligned to 16 bytes, and each thread loads numbers several times.
    for vocab_size in [1_013, 31, 9_000] {
        let mut random = Random::new(vocab_size as u64);
        let prompt: Vec<TokenId> = (0..20).map(|_| random.below(vocab_size as u32)).collect();
        let generated: Vec<TokenId> = (0..6).map(|i| prompt[i * 2] / 2).collect();
        let samplers: Vec<Sampler> = (0..6)
            .flat_map(|seed| settings().into_iter().map(move |sampling| Sampling { seed, ..sampling }))
            .map(|sampling| Sampler::new(sampling, &prompt).for_sample(0, &generated))
            .collect();
        let rows: Vec<Vec<f32>> = samplers.iter().map(|_| logits(&mut random, vocab_size)).collect();
        let requests: Vec<SampleRequest<'_>> = samplers.iter().map(|sampler| sampler.request(POSITION)).collect();
        let orders = ORDERS.map(|order| sample_all(&rows.concat(), vocab_size, &requests, order));
        assert!(orders.iter().all(|sampled| *sampled == orders[0]), "a barrier is missing");
        let mut different = 0;
        for ((sampler, row), sampled) in samplers.iter().zip(&rows).zip(&orders[0]) {
            let SampledToken { token, logprobs } = sampler.clone().sample(row, POSITION);
            assert_eq!(sampled.token, token, "{sampler:?}");
            near(&sampled.logprobs, &logprobs);
            different += usize::from(sampled.token != orders[0][0].token);
        }
        assert!(different > samplers.len() / 2, "samples differ");
    }
}

#[test]
fn only_tokens_allowed_by_the_mask_are_sampled() {
    let (vocab_size, mut random) = (1_013, Random::new(3));
    let row = logits(&mut random, vocab_size);
    let allowed = [5u32, 64, 700, 1_012];
    for temperature in [0.0, 1.0, 5.0] {
        let samplers: Vec<Sampler> = (0..8)
            .map(|seed| Sampling { seed, temperature, allowed_token_ids: allowed.into(), ..Sampling::default() })
            .map(|sampling| Sampler::new(sampling, &[]))
            .collect();
        let requests: Vec<SampleRequest<'_>> = samplers.iter().map(|sampler| sampler.request(POSITION)).collect();
        let sampled = sample_all(&row.repeat(8), vocab_size, &requests, 0);
        for (sampler, sampled) in samplers.iter().zip(sampled) {
            assert!(allowed.contains(&sampled.token));
            assert_eq!(sampled.token, sampler.clone().sample(&row, POSITION).token);
        }
    }
}

/// The tokens are single letters, and the constraint allows some of them.
#[test]
fn constrained_rows_sample_the_same_tokens_as_the_host() {
    let (vocab_size, mut random) = (1_013, Random::new(9));
    let letters: Vec<String> = (0..vocab_size).map(|token| char::from_u32(0x4e00 + token as u32).unwrap().to_string()).collect();
    let vocabulary = tandem_grammar::Vocabulary::new(letters.iter().map(|letter| (letter.as_bytes(), false)), vocab_size);
    let allowed = [4usize, 63, 64, 800, 1_012];
    let choice = tandem_grammar::Kind::Choice(allowed.iter().map(|token| letters[*token].clone()).collect());
    let choice = choice.into();
    let samplers: Vec<Sampler> = settings()
        .into_iter()
        .map(|sampling| Sampling { allowed_token_ids: [].into(), min_tokens: 0, ..sampling })
        .enumerate()
        .map(|(row, sampling)| {
            let sampler = Sampler::new(sampling, &[]);
            let sampler = if row % 3 < 2 { sampler.constrained(&vocabulary, &choice).unwrap() } else { sampler };
            sampler.for_sample(0, &[])
        })
        .collect();
    let rows: Vec<Vec<f32>> = samplers.iter().map(|_| logits(&mut random, vocab_size)).collect();
    let requests: Vec<SampleRequest<'_>> = samplers.iter().map(|sampler| sampler.request(POSITION)).collect();
    let sampled = sample_all(&rows.concat(), vocab_size, &requests, 0);
    for (row, ((sampler, logits), sampled)) in samplers.iter().zip(&rows).zip(sampled).enumerate() {
        let expected = sampler.sample(logits, POSITION);
        assert_eq!(sampled.token, expected.token, "{sampler:?}");
        near(&sampled.logprobs, &expected.logprobs);
        assert!(row % 3 == 2 || allowed.contains(&(sampled.token as usize)));
    }
}

#[test]
fn row_of_nans_gives_no_token_and_row_with_infinities_gives_one() {
    let odd = [
        vec![f32::NEG_INFINITY; 40],
        vec![f32::NAN; 40],
        [vec![0.0; 39], vec![f32::INFINITY]].concat(),
        [vec![f32::NAN; 7], vec![1.0], vec![f32::NAN; 32]].concat(),
    ];
    for logprobs in [None, Some(2)] {
        for temperature in [0.0, 1.0] {
            let sampler = Sampler::new(Sampling { temperature, logprobs, ..Sampling::default() }, &[]);
            let requests = vec![sampler.request(0); odd.len()];
            let sampled = sample_all(&odd.concat(), 40, &requests, 0);
            let tokens: Vec<TokenId> = sampled.iter().map(|sampled| sampled.token).collect();
            assert_eq!(tokens, [0, NO_TOKEN, 39, 7]);
            assert_eq!(tokens, odd.each_ref().map(|row| sampler.sample(row, 0).token));
        }
    }
}
