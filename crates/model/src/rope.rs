//! Rotary position embedding (RoPE) and its scalings for longer contexts.

use std::f64::consts::PI;

/// The assignment of a head's elements to RoPE pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// Pair `i` consists of the elements `2i` and `2i + 1`.
    Adjacent,
    /// Pair `i` consists of element `i` and of element `i` plus half the length of the head.
    Halves,
}

/// Rotary position embedding (Su et al. 2021): at position `p`, pair `i` of every query and key is rotated by `p × frequencies[i]` radians
/// and multiplied by `magnitude`. `frequencies` and `magnitude` include the model's context scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The assignment of a head's elements to pairs.
    pub pairs: Pairs,
    /// Radians per position, for each of the `head_dim / 2` pairs.
    pub frequencies: Vec<f64>,
    /// The number by which every rotated pair is multiplied: 1, unless the model uses YaRN.
    pub magnitude: f64,
}

/// A change of the frequencies that lets the model use a longer context than in its pre-training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scaling {
    None,
    /// All frequencies are divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high frequencies are kept, and those between are interpolated.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: f64,
    },
    /// YaRN (Peng et al. 2023): frequencies of pairs that rotate fewer than `beta_slow` times in the original context are divided by
    /// `factor`, those of pairs that rotate more than `beta_fast` times are kept, and those between are interpolated.
    Yarn {
        factor: f64,
        original_context: f64,
        beta_fast: f64,
        beta_slow: f64,
        magnitude: f64,
    },
}

/// Returns YaRN's default for [`Rope::magnitude`]. It exceeds 1 if `factor` does, and then makes attention sharper.
pub(crate) fn yarn_magnitude(factor: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * libm::log(factor) + 1.0 }
}

impl Rope {
    /// Computes the frequencies. If `divisors` are given, each pair's frequency is divided by the pair's divisor before it is scaled.
    pub(crate) fn new(pairs: Pairs, head_dim: usize, base: f32, divisors: Option<&[f32]>, scaling: Scaling) -> Self {
        let len = head_dim / 2;
        let mut frequencies: Vec<f64> = (0..len).map(|pair| libm::pow(f64::from(base), -(pair as f64) / len as f64)).collect();
        for (frequency, divisor) in frequencies.iter_mut().zip(divisors.unwrap_or_default()) {
            *frequency /= f64::from(*divisor);
        }
        let mut magnitude = 1.0;
        match scaling {
            Scaling::None => {}
            Scaling::Linear { factor } => frequencies.iter_mut().for_each(|frequency| *frequency /= factor),
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                for frequency in &mut frequencies {
                    let rotations = original_context * *frequency / (2.0 * PI);
                    let kept = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    *frequency *= kept + (1.0 - kept) / factor;
                }
            }
            Scaling::Yarn { factor, original_context, beta_fast, beta_slow, magnitude: given } => {
                // Returns the (fractional) index of the pair that makes this many rotations in the original context.
                let pair_of = |rotations: f64| {
                    len as f64 * libm::log(original_context / (rotations * 2.0 * PI)) / libm::log(f64::from(base))
                };
                let first = libm::floor(pair_of(beta_fast)).max(0.0);
                let last = libm::ceil(pair_of(beta_slow)).min(head_dim as f64 - 1.0);
                for (pair, frequency) in frequencies.iter_mut().enumerate() {
                    // The minimum avoids a division by zero if both bounds are the same pair.
                    let divided = ((pair as f64 - first) / (last - first).max(0.001)).clamp(0.0, 1.0);
                    *frequency *= 1.0 - divided + divided / factor;
                }
                magnitude = given;
            }
        }
        Self { pairs, frequencies, magnitude }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_near(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found / expected - 1.0).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    // The expected values were computed with numpy by the formulas of Hugging Face's `modeling_rope_utils`.

    #[test]
    fn llama3_scaling_divides_low_frequencies_only() {
        let scaling =
            |factor, original_context| Scaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context };
        let rope = Rope::new(Pairs::Halves, 16, 500_000.0, None, scaling(32.0, 8192.0));
        assert_near(
            &rope.frequencies,
            &[1.0, 0.193922745, 0.0376060309, 0.00729266474, 0.000429556797, 8.57025549e-6, 1.66196747e-6, 3.22293293e-7],
        );
        let rope = Rope::new(Pairs::Adjacent, 16, 10_000.0, None, scaling(8.0, 64.0));
        assert_near(
            &rope.frequencies,
            &[1.0, 0.244384599, 0.013042256, 0.00395284708, 0.00125, 0.000395284708, 0.000125, 3.95284708e-5],
        );
        assert_eq!(rope.magnitude, 1.0);
    }

    #[test]
    fn yarn_scaling_interpolates_between_kept_and_divided_frequencies() {
        let scaling = |original_context| Scaling::Yarn {
            factor: 4.0,
            original_context,
            beta_fast: 32.0,
            beta_slow: 1.0,
            magnitude: yarn_magnitude(4.0),
        };
        let rope = Rope::new(Pairs::Halves, 16, 1e6, None, scaling(32_768.0));
        assert_near(
            &rope.frequencies,
            &[1.0, 0.177827941, 0.0316227766, 0.00421755994, 0.0005, 4.44569853e-5, 7.90569415e-6, 1.40585331e-6],
        );
        assert_near(&[rope.magnitude], &[1.138629436111989]);
        let rope = Rope::new(Pairs::Halves, 16, 1e4, None, scaling(64.0));
        assert_near(&rope.frequencies, &[1.0, 0.237170825, 0.05, 0.00790569415, 0.0025, 0.000790569415, 0.00025, 7.90569415e-5]);
    }

    #[test]
    fn linear_scaling_and_rope_divisors_divide_frequencies() {
        let rope = Rope::new(Pairs::Halves, 4, 100.0, Some(&[1.0, 8.0]), Scaling::Linear { factor: 2.0 });
        assert_near(&rope.frequencies, &[0.5, 0.1 / 16.0]);
        assert_near(&Rope::new(Pairs::Halves, 4, 100.0, None, Scaling::None).frequencies, &[1.0, 0.1]);
    }
}
