//! Encodes sampling requests for `kernels/sampling.cu`, and decodes its results.

use crate::{SampleRequest, SampledToken, TokenLogprob, TokenLogprobs};

/// Bytes of the kernel's `SampleSettings`.
const SETTINGS_BYTES: usize = 56;
/// Bytes of the kernel's `TokenLogprob`.
pub(super) const LOGPROB_BYTES: usize = 8;
/// The numbers of alternatives for which a row of results may have slots. There are few, because the number is part of a CUDA graph's key.
/// The API allows at most 20 alternatives.
const TOPS: [usize; 3] = [0, 5, 20];
/// Bytes of a row's results, unless a request asks for more alternatives than the API allows.
pub(super) const ROW_BYTES: usize = (1 + TOPS[TOPS.len() - 1]) * LOGPROB_BYTES;
/// The kernel's value for "no logprobs".
const NONE: u32 = u32::MAX;

/// The sampling inputs of a step's rows.
#[derive(Debug, Default)]
pub(super) struct SampleInputs {
    /// The kernel's `SampleSettings` of each row.
    pub settings: Vec<u8>,
    /// The kernel's `Adjustment` of each token whose logit is changed, row after row.
    pub adjustments: Vec<u8>,
    /// The number of alternatives that each row requests; `None` if the row does not even request the sampled token's logprob.
    pub tops: Vec<Option<u32>>,
}

impl SampleInputs {
    /// Encodes requests in the order of the rows. `masks` has the offset of each row's mask in 32-bit words; rows beyond the end of `masks`
    /// have no mask. `first` is the offset of the first adjustment, as a number of adjustments.
    pub fn new(requests: &[SampleRequest<'_>], masks: &[u32], mut first: u32, vocab_size: usize) -> Self {
        let mut all = Self::default();
        for (row, request) in requests.iter().enumerate() {
            let s = request.sampling();
            let top = s.logprobs.map(|top| top.min(vocab_size as u32));
            let mask = masks.get(row).map_or(-1, |mask| *mask as i32);
            let mut adjustments = 0u32;
            for adjustment in request.adjustments(vocab_size) {
                let numbers = [adjustment.token, adjustment.count, adjustment.seen.into()].map(u32::to_le_bytes);
                all.adjustments.extend(numbers.as_flattened());
                all.adjustments.extend(adjustment.bias.to_le_bytes());
                adjustments += 1;
            }
            let into = &mut all.settings;
            into.extend(request.uniform().to_le_bytes());
            let singles = [s.temperature, s.top_p, s.min_p, s.frequency_penalty, s.presence_penalty, s.repetition_penalty]
                .map(f32::to_le_bytes);
            into.extend(singles.as_flattened());
            into.extend([s.top_k, first, adjustments].map(u32::to_le_bytes).as_flattened());
            into.extend(mask.to_le_bytes());
            into.extend([top.unwrap_or(NONE), 0].map(u32::to_le_bytes).as_flattened());
            first += adjustments;
            all.tops.push(top);
        }
        debug_assert_eq!(all.settings.len(), requests.len() * SETTINGS_BYTES);
        all
    }

    /// Appends padding rows, whose tokens are not read; they are sampled greedily.
    pub fn pad(&mut self, rows: usize) {
        for _ in self.rows()..rows {
            // All settings are 0, except mask and top, whose values mean that they are absent.
            self.settings.extend([[0; 44].as_slice(), &[0xff; 8], &[0; 4]].concat());
            self.tops.push(None);
        }
        debug_assert_eq!(self.settings.len(), self.rows() * SETTINGS_BYTES);
    }

    pub fn rows(&self) -> usize {
        self.tops.len()
    }

    /// Returns the number of slots for alternatives per row: at least as many as any row requests.
    pub fn top_max(&self) -> usize {
        let wanted = self.tops.iter().flatten().max().map_or(0, |top| *top as usize);
        TOPS.into_iter().find(|top| *top >= wanted).unwrap_or(wanted)
    }

    /// Returns the offset of a row's settings, in bytes.
    pub fn offset(row: usize) -> u64 {
        (row * SETTINGS_BYTES) as u64
    }

    /// Decodes the kernel's results for `rows` rows from `first` on: one `TokenLogprob` per row, then `top_max` alternatives per row.
    pub fn read(&self, first: usize, rows: usize, bytes: &[u8]) -> Vec<SampledToken> {
        let (tokens, tops) = bytes.split_at(rows * LOGPROB_BYTES);
        let mut tops = tops.chunks(self.top_max().max(1) * LOGPROB_BYTES);
        let read = |bytes: &[u8]| {
            let [token, logprob] = [0, 4].map(|at| *bytes[at..].first_chunk::<4>().expect("each result has eight bytes"));
            TokenLogprob { token: u32::from_le_bytes(token), logprob: f32::from_le_bytes(logprob) }
        };
        let row = |(token, wanted): (&[u8], &Option<u32>)| {
            let (token, top) = (read(token), tops.next().unwrap_or_default());
            let logprobs = wanted.map(|wanted| TokenLogprobs {
                logprob: token.logprob,
                top: top.chunks(LOGPROB_BYTES).take(wanted as usize).map(read).collect(),
            });
            SampledToken { token: token.token, logprobs }
        };
        tokens.chunks(LOGPROB_BYTES).zip(&self.tops[first..first + rows]).map(row).collect()
    }
}
