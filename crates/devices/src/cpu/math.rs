//! Elementwise functions and norms. They use only operations that IEEE 754 defines exactly, in a fixed order, so that no bit of a result
//! depends on the processor or on a mathematics library.

use super::isa::kernel;
use tandem_model::{Pairs, Rope};

/// The number of partial sums of a reduction. Lane `l` adds the numbers at `l`, `l + 16` and so on; then the lanes are added in order.
const LANES: usize = 16;
/// This number is 1.5 × 2^23. If it is added to a number below 2^22 in absolute value, the low bits of the sum are the nearest integer to the number
/// (ties to even).
const ROUNDING: f32 = 12_582_912.0;

/// Returns e^x within 2 ulp, after Cephes' `expf` (Moshier): x is split into n ln 2 + r, a polynomial computes e^r, and n is added to the
/// exponent. Results are clamped to finite, normal numbers.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = if x > 88.0 { 88.0 } else { x };
    let x = if x > -87.0 { x } else { -87.0 };
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUNDING);
    let n = rounded - ROUNDING;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
    let mut p = 1.987_569_1e-4f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 0.166_666_66);
    p = p.mul_add(r, 0.5);
    let power = f32::from_bits((rounded.to_bits().wrapping_sub(ROUNDING.to_bits()).wrapping_add(127)) << 23);
    (p.mul_add(r * r, r) + 1.0) * power
}

/// Rounds a number below 2^22 in absolute value to the nearest integer (ties to even).
#[inline(always)]
pub(super) fn round(x: f32) -> i32 {
    (x + ROUNDING).to_bits().wrapping_sub(ROUNDING.to_bits()) as i32
}

kernel! {
    /// Computes `out = x ÷ √(mean(x²) + eps) × weight` for every row. `x` and `out` have the layout `[rows][weight.len()]`.
    pub(super) fn rms_norm(_simd, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let factor = inverse_root(x, eps);
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * factor * weight;
            }
        }
    }
}

kernel! {
    /// Computes the same as [`rms_norm`], in place. `x` has the layout `[rows][weight.len()]`; a row may be one head of a token.
    pub(super) fn rms_norm_in_place(_simd, x: &mut [f32], weight: &[f32], eps: f32) {
        for x in x.chunks_exact_mut(weight.len()) {
            let factor = inverse_root(x, eps);
            for (x, weight) in x.iter_mut().zip(weight) {
                *x = *x * factor * weight;
            }
        }
    }
}

#[inline(always)]
fn inverse_root(x: &[f32], eps: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for x in whole {
        for l in 0..LANES {
            lanes[l] = x[l].mul_add(x[l], lanes[l]);
        }
    }
    for (l, x) in rest.iter().enumerate() {
        lanes[l] = x.mul_add(*x, lanes[l]);
    }
    let mut sum = 0f32;
    for lane in lanes {
        sum += lane;
    }
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

kernel! {
    /// Computes `gate = gate ÷ (1 + e^−gate) × up` elementwise.
    pub(super) fn swiglu(_simd, gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
        }
    }
}

kernel! {
    /// Computes `x += y` elementwise.
    pub(super) fn add(_simd, x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

kernel! {
    /// Adds `bias` to every row of `x`, which has the layout `[rows][bias.len()]`.
    pub(super) fn add_to_rows(_simd, x: &mut [f32], bias: &[f32]) {
        for row in x.chunks_exact_mut(bias.len()) {
            for (x, bias) in row.iter_mut().zip(bias) {
                *x += bias;
            }
        }
    }
}

kernel! {
    /// Applies the rotary position embedding to every head in `x`, which has the layout `[rows][row_len]`, and then multiplies all elements by
    /// `factor`. `rotations` has the cosines and sines of the angles, in the layout `[rows][head_dim / 2]`.
    pub(super) fn rotate(_simd, x: &mut [f32], row_len: usize, rotations: &[[f32; 2]], rope: &Rope, factor: f32) {
        let pairs = rope.frequencies.len();
        for (row, rotations) in x.chunks_exact_mut(row_len).zip(rotations.chunks_exact(pairs)) {
            for head in row.chunks_exact_mut(2 * pairs) {
                match rope.pairs {
                    Pairs::Adjacent => {
                        for ([a, b], rotation) in head.as_chunks_mut::<2>().0.iter_mut().zip(rotations) {
                            (*a, *b) = rotated(*a, *b, *rotation, factor);
                        }
                    }
                    Pairs::Halves => {
                        let (first, second) = head.split_at_mut(pairs);
                        for ((a, b), rotation) in first.iter_mut().zip(second).zip(rotations) {
                            (*a, *b) = rotated(*a, *b, *rotation, factor);
                        }
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn rotated(x: f32, y: f32, [cos, sin]: [f32; 2], factor: f32) -> (f32, f32) {
    ((x * cos - y * sin) * factor, (x * sin + y * cos) * factor)
}

/// Appends, for each pair at one position, the cosine and sine of its rotation angle, multiplied by the embedding's magnitude. `libm` is
/// Rust code, so its results are the same on every machine.
pub(super) fn rotations_at(position: u32, rope: &Rope, into: &mut Vec<[f32; 2]>) {
    for frequency in &rope.frequencies {
        let angle = f64::from(position) * frequency;
        into.push([libm::cos(angle), libm::sin(angle)].map(|side| (side * rope.magnitude) as f32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        for step in -860_000..=880_000 {
            let x = step as f32 * 1e-4;
            let (ours, exact) = (exp(x), f64::from(x).exp());
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            assert!((f64::from(ours) - exact).abs() <= 2.0 * ulp, "e^{x}: {ours} is not {exact}");
        }
    }

    #[test]
    fn exp_stays_finite_beyond_its_range() {
        assert!(exp(1e9).is_finite() && exp(f32::INFINITY).is_finite());
        assert!(exp(-1e9) > 0.0 && exp(f32::NEG_INFINITY) < 1e-37);
    }

    #[test]
    fn round_is_to_nearest_even() {
        for (x, whole) in [(0.0, 0), (0.5, 0), (1.5, 2), (-0.5, 0), (-1.5, -2), (-2.4, -2), (126.6, 127), (-127.0, -127)] {
            assert_eq!(round(x), whole, "{x}");
        }
    }
}
