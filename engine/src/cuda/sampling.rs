//! SampleInputs as `kernels/sampling.cu` takes them, and what it gives.

use crate::{SampleRequest, SampledToken, TokenLogprob, TokenLogprobs};

/// Bytes of `Draw` in the kernel's source.
const SETTINGS_BYTES: usize = 56;
/// Bytes of `Likelihood` there.
pub(super) const LOGPROB_BYTES: usize = 8;
/// Alternatives that there is room for, as few numbers of them as are often asked for: what launches a step names this number. The API allows no more.
const TOPS: [usize; 3] = [0, 5, 20];
/// Bytes that are written for a row, unless somebody wants more alternatives than the API allows.
pub(super) const ROW_BYTES: usize = (1 + TOPS[TOPS.len() - 1]) * LOGPROB_BYTES;
/// No logprobs.
const NONE: u32 = u32::MAX;

/// The draws of a step's rows.
#[derive(Debug, Default)]
pub(super) struct SampleInputs {
    /// `Draw` of each row.
    pub settings: Vec<u8>,
    /// `Adjustment` of every token that has one, row by row.
    pub adjustments: Vec<u8>,
    /// Alternatives wanted of each row; `None`: not even the token's logprob.
    pub tops: Vec<Option<u32>>,
}

impl SampleInputs {
    /// In the order of the rows. `masks` has for each row where its mask begins, in words; rows beyond its end have none. `first` is where the
    /// adjustments begin, in adjustments.
    pub fn new(draws: &[SampleRequest<'_>], masks: &[u32], mut first: u32, vocab_size: usize) -> Self {
        let mut all = Self::default();
        for (row, draw) in draws.iter().enumerate() {
            let s = draw.sampling();
            let top = s.logprobs.map(|top| top.min(vocab_size as u32));
            let mask = masks.get(row).map_or(-1, |mask| *mask as i32);
            let mut adjustments = 0u32;
            for adjustment in draw.adjustments(vocab_size) {
                let numbers = [adjustment.token, adjustment.count, adjustment.seen.into()].map(u32::to_le_bytes);
                all.adjustments.extend(numbers.as_flattened());
                all.adjustments.extend(adjustment.bias.to_le_bytes());
                adjustments += 1;
            }
            let into = &mut all.settings;
            into.extend(draw.uniform().to_le_bytes());
            let singles = [s.temperature, s.top_p, s.min_p, s.frequency_penalty, s.presence_penalty, s.repetition_penalty]
                .map(f32::to_le_bytes);
            into.extend(singles.as_flattened());
            into.extend([s.top_k, first, adjustments].map(u32::to_le_bytes).as_flattened());
            into.extend(mask.to_le_bytes());
            into.extend([top.unwrap_or(NONE), 0].map(u32::to_le_bytes).as_flattened());
            first += adjustments;
            all.tops.push(top);
        }
        debug_assert_eq!(all.settings.len(), draws.len() * SETTINGS_BYTES);
        all
    }

    /// Adds rows whose tokens nobody reads: each its likeliest.
    pub fn pad(&mut self, rows: usize) {
        for _ in self.rows()..rows {
            // All zeros but for mask and top: there is neither.
            self.settings.extend([[0; 44].as_slice(), &[0xff; 8], &[0; 4]].concat());
            self.tops.push(None);
        }
        debug_assert_eq!(self.settings.len(), self.rows() * SETTINGS_BYTES);
    }

    pub fn rows(&self) -> usize {
        self.tops.len()
    }

    /// Places for alternatives that each row has: no row wants more.
    pub fn top_max(&self) -> usize {
        let wanted = self.tops.iter().flatten().max().map_or(0, |top| *top as usize);
        TOPS.into_iter().find(|top| *top >= wanted).unwrap_or(wanted)
    }

    /// Where the settings of a row begin.
    pub fn offset(row: usize) -> u64 {
        (row * SETTINGS_BYTES) as u64
    }

    /// What the kernel has written for rows from `first` on: a likelihood each, then `top_max` each.
    pub fn read(&self, first: usize, rows: usize, bytes: &[u8]) -> Vec<SampledToken> {
        let (tokens, tops) = bytes.split_at(rows * LOGPROB_BYTES);
        let mut tops = tops.chunks(self.top_max().max(1) * LOGPROB_BYTES);
        let read = |bytes: &[u8]| {
            let [token, logprob] = [0, 4].map(|at| *bytes[at..].first_chunk::<4>().expect("a likelihood has eight bytes"));
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
