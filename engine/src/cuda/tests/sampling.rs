//! Compares the sampling kernel with sampling on the host, for the same logits and settings.

use super::{emulated::ORDERS, *};
use crate::SampledToken;
use std::collections::HashMap;
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

fn sample_all(
    logits: &[f32],
    vocab_size: usize,
    requests: &[SampleRequest<'_>],
    masks: &[Vec<u32>],
    order: u32,
) -> Vec<SampledToken> {
    let device = Arc::new(Emulated::new(&SHAPE, order));
    let starts: Vec<u32> = (0..masks.len()).map(|mask| masks[..mask].iter().map(Vec::len).sum::<usize>() as u32).collect();
    let requests = SampleInputs::new(requests, &starts, 0, vocab_size);
    let (rows, top_max) = (requests.rows(), requests.top_max());
    let words = |words: Vec<u32>| Memory::of(&device, &words.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
    let given = words(logits.iter().map(|logit| logit.to_bits()).collect());
    let masks = words(masks.concat());
    let settings = Memory::of(&device, &requests.settings).unwrap();
    let adjustments = Memory::of(&device, &requests.adjustments).unwrap();
    let scratch = Memory::new(&device, size_of_val(logits)).unwrap();
    let sampled = Memory::new(&device, rows * (1 + top_max) * LOGPROB_BYTES).unwrap();
    let arguments = &mut [
        given.address(),
        scratch.address(),
        vocab_size as u64,
        settings.address(),
        adjustments.address(),
        masks.address(),
        sampled.address(),
        sampled.address() + (rows * LOGPROB_BYTES) as u64,
        top_max as u64,
    ];
    device.launch(Launch { kernel: Kernel::Sample, grid: [rows, 1, 1], shared_bytes: 0 }, arguments).unwrap();
    let mut bytes = vec![0; sampled.bytes()];
    device.download(sampled.address(), &mut bytes).unwrap();
    requests.read(0, rows, &bytes)
}

/// Returns random logits, some of which are equal.
fn logits(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| (random.number() * 40.0).round() / 8.0).collect()
}

fn near(found: &Option<crate::TokenLogprobs>, expected: &Option<crate::TokenLogprobs>) {
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
    ]
}

#[test]
fn kernel_samples_the_same_tokens_as_the_host() {
    for vocab_size in [1_013, 31] {
        let mut random = Random::new(vocab_size as u64);
        let prompt: Vec<TokenId> = (0..20).map(|_| random.below(vocab_size as u32)).collect();
        let generated: Vec<TokenId> = (0..6).map(|i| prompt[i * 2] / 2).collect();
        let samplers: Vec<Sampler> = (0..6)
            .flat_map(|seed| settings().into_iter().map(move |sampling| Sampling { seed, ..sampling }))
            .map(|sampling| Sampler::new(sampling, &prompt).resumed(&generated))
            .collect();
        let rows: Vec<Vec<f32>> = samplers.iter().map(|_| logits(&mut random, vocab_size)).collect();
        let requests: Vec<SampleRequest<'_>> = samplers.iter().map(|sampler| sampler.request(POSITION)).collect();
        let orders = ORDERS.map(|order| sample_all(&rows.concat(), vocab_size, &requests, &[], order));
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
    let mut mask = vec![0u32; vocab_size.div_ceil(32)];
    allowed.iter().for_each(|token| mask[*token as usize / 32] |= 1 << (token % 32));
    // Sampling on the host has no masks; a bias of -infinity has the same effect.
    let bias: HashMap<u32, f32> =
        (0..vocab_size as u32).filter(|token| !allowed.contains(token)).map(|token| (token, f32::NEG_INFINITY)).collect();
    for temperature in [0.0, 1.0, 5.0] {
        let samplers: Vec<Sampler> =
            (0..8).map(|seed| Sampler::new(Sampling { seed, temperature, ..Sampling::default() }, &[])).collect();
        let requests: Vec<SampleRequest<'_>> = samplers.iter().map(|sampler| sampler.request(POSITION)).collect();
        let sampled = sample_all(&row.repeat(8), vocab_size, &requests, &vec![mask.clone(); 8], 0);
        for (seed, sampled) in (0..8).zip(sampled) {
            assert!(allowed.contains(&sampled.token));
            let sampling = Sampling { seed, temperature, logit_bias: bias.clone(), ..Sampling::default() };
            assert_eq!(sampled.token, Sampler::new(sampling, &[]).sample(&row, POSITION).token);
        }
    }
}

#[test]
fn row_with_non_finite_logits_still_gives_a_token() {
    let odd = [vec![f32::NEG_INFINITY; 40], vec![f32::NAN; 40], [vec![0.0; 39], vec![f32::INFINITY]].concat()];
    let samplers: Vec<Sampler> = odd.iter().map(|_| Sampler::new(Sampling::default(), &[])).collect();
    let requests: Vec<SampleRequest<'_>> = samplers.iter().map(|sampler| sampler.request(0)).collect();
    let sampled = sample_all(&odd.concat(), 40, &requests, &[], 0);
    assert_eq!(sampled.iter().map(|sampled| sampled.token).collect::<Vec<_>>(), [0, 0, 39]);
}
