//! Encodes sampling requests for `kernels/sampling.cu`, and decodes its results.

use tandem_engine::{SampleRequest, SampledToken, TokenLogprob, TokenLogprobs};
use tandem_grammar::Mask;

/// Bytes of the kernel's `SampleSettings`.
const SETTINGS_BYTES: usize = 56;
/// The size of the kernel's `Adjustment` in words.
const ADJUSTMENT_WORDS: usize = 4;
/// Bytes of the kernel's `TokenLogprob`.
pub(super) const LOGPROB_BYTES: usize = 8;
/// The numbers of alternatives for which a row of results may have slots. There are few, because the number is part of a CUDA graph's key.
/// The API allows at most 20 alternatives.
const TOPS: [usize; 3] = [0, 5, 20];
/// Bytes of a row's results, unless a request asks for more alternatives than the API allows.
pub(super) const ROW_BYTES: usize = (1 + TOPS[TOPS.len() - 1]) * LOGPROB_BYTES;
/// The kernel's value for "no logprobs", "no mask" and "the likeliest alternatives".
const NONE: u32 = u32::MAX;

/// The sampling inputs of a step's rows.
#[derive(Debug, Default)]
pub(super) struct SampleInputs {
    /// The kernel's `SampleSettings` of each row.
    pub settings: Vec<u8>,
    /// The kernel's `Adjustment` of each token whose logit is changed, row after row.
    pub adjustments: Vec<u8>,
    /// Masks and lists of tokens, to which the settings have offsets.
    pub words: Vec<u32>,
    /// The rows with a constraint. `words` begins with space for their masks, all bits 0: the masks may not be ready yet, and are uploaded
    /// shortly before the tokens are sampled.
    pub constrained: Vec<usize>,
    /// The offset of `words` in words, from the same address as the offsets of adjustments.
    pub words_from: usize,
    /// The number of alternatives that each row requests; `None` if the row requests no logprobs at all, not even that of the sampled token.
    pub tops: Vec<Option<u32>>,
}

impl SampleInputs {
    /// Encodes requests in the order of the rows. `first` is the offset of the first adjustment, counted in adjustments. The words follow
    /// the adjustments.
    pub fn new(requests: &[SampleRequest<'_>], mut first: u32, vocab_size: usize) -> Self {
        let mut all = Self::default();
        let mask_words = vocab_size.div_ceil(32);
        let constrained = (0..requests.len()).filter(|row| requests[*row].is_constrained());
        all.constrained.extend(constrained);
        all.words.resize(all.constrained.len() * mask_words, 0);
        let changes: Vec<Vec<_>> = requests.iter().map(|request| request.adjustments(vocab_size).collect()).collect();
        let words_from = (first as usize + changes.iter().map(Vec::len).sum::<usize>()) * ADJUSTMENT_WORDS;
        all.words_from = words_from;
        let place = |words: &mut Vec<u32>, list: &[u32]| {
            words.extend(list);
            (words_from + words.len() - list.len()) as u32
        };
        for (row, (request, changes)) in requests.iter().zip(changes).enumerate() {
            let s = request.sampling();
            let alternatives = Some(s.logprob_token_ids.as_slice()).filter(|tokens| !tokens.is_empty());
            let top = s.logprobs.map(|top| alternatives.map_or(top.min(vocab_size as u32), |tokens| tokens.len() as u32));
            let alternatives = alternatives.map_or(NONE, |tokens| place(&mut all.words, tokens));
            let mask = match all.constrained.binary_search(&row) {
                Ok(place) => (words_from + place * mask_words) as u32,
                Err(_) => request.mask(vocab_size).map_or(NONE, |mask| place(&mut all.words, mask.words())),
            };
            let adjustments = changes.len() as u32;
            for adjustment in changes {
                let numbers = [adjustment.token, adjustment.count, adjustment.seen.into()].map(u32::to_le_bytes);
                all.adjustments.extend(numbers.as_flattened());
                all.adjustments.extend(adjustment.bias.to_le_bytes());
            }
            let into = &mut all.settings;
            into.extend(request.uniform().to_le_bytes());
            let singles = [s.temperature, s.top_p, s.min_p, s.frequency_penalty, s.presence_penalty, s.repetition_penalty]
                .map(f32::to_le_bytes);
            into.extend(singles.as_flattened());
            into.extend([s.top_k, first, adjustments].map(u32::to_le_bytes).as_flattened());
            into.extend([mask, top.unwrap_or(NONE), alternatives].map(u32::to_le_bytes).as_flattened());
            first += adjustments;
            all.tops.push(top);
        }
        debug_assert_eq!(all.settings.len(), requests.len() * SETTINGS_BYTES);
        all
    }

    /// Returns the masks of the rows with a constraint. A mask that is not ready allows all tokens; the row's token is discarded.
    pub fn masks(&self, requests: &[SampleRequest<'_>], vocab_size: usize) -> Vec<u8> {
        let mask = |row: &usize| requests[*row].mask(vocab_size).unwrap_or_else(|| Mask::all(vocab_size));
        let masks = self.constrained.iter().map(mask);
        masks.flat_map(|mask| mask.words().iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>()).collect()
    }

    /// Appends padding rows, whose tokens are not read; they are sampled greedily.
    pub fn pad(&mut self, rows: usize) {
        for _ in self.rows()..rows {
            // All settings are 0, except mask, top and alternatives, whose values mean that they are absent.
            self.settings.extend([[0; 44].as_slice(), &[0xff; 12]].concat());
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
