//! Vector operations for the kernels' inner loops, for each instruction set.
//!
//! A vector has [`Simd::LANES`] lanes. In each lane, every operation gives bit for bit the same result as the same operation of [`Plain`]. All
//! operations must be inlined into a function that is compiled for the instruction set ([`kernel!`](super::isa::kernel)).

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

/// An instruction set. A value of an implementing type proves that the processor supports the instruction set.
pub(super) trait Simd: Copy {
    /// The number of lanes in a vector: 8 or 16.
    const LANES: usize;
    /// A vector of single-precision numbers.
    type Floats: Copy;
    /// A vector of 32-bit integers.
    type Ints: Copy;
    /// A vector with four 8-bit integers in each lane.
    type Bytes: Copy;
    /// A vector of sums of products. An implementation may use fewer bits for these sums than for [`Self::Ints`].
    type Sums: Copy;

    fn splat(self, number: f32) -> Self::Floats;
    /// Loads the first `LANES` numbers of a slice. Every method that loads panics if the slice is too short. `load_bytes` needs four bytes per lane,
    /// all others one number.
    fn load(self, from: &[f32]) -> Self::Floats;
    fn load_halves(self, from: &[u16]) -> Self::Floats;
    fn load_bf16(self, from: &[u16]) -> Self::Floats;
    /// Loads integers from 0 to 255 as floating-point numbers.
    fn load_u8(self, from: &[u8]) -> Self::Floats;
    fn store(self, numbers: Self::Floats, into: &mut [f32]);
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Converts integers to floating-point numbers. The conversion is exact for integers of at most 2^24 in absolute value.
    fn floats(self, ints: Self::Ints) -> Self::Floats;

    fn splat_int(self, number: i32) -> Self::Ints;
    fn load_i8(self, from: &[i8]) -> Self::Ints;
    fn add_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    fn mul_ints(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;

    fn load_bytes(self, from: &[u8]) -> Self::Bytes;
    fn splat_bytes(self, four: &[i8; 4]) -> Self::Bytes;
    fn low_nibbles(self, bytes: Self::Bytes) -> Self::Bytes;
    fn high_nibbles(self, bytes: Self::Bytes) -> Self::Bytes;

    fn no_sums(self) -> Self::Sums;
    /// Adds to each lane the dot product of its four weights and four values of `x`. The weights must not be negative. An implementation
    /// may split a lane into two 16-bit sums, to each of which a call adds two products. So the total of `weight × 127` that either 16-bit
    /// sum receives after [`Self::no_sums`] must stay below 2^15.
    fn add_products(self, sums: Self::Sums, weights: Self::Bytes, x: Self::Bytes) -> Self::Sums;
    fn ints(self, sums: Self::Sums) -> Self::Ints;

    /// Converts signed weights to the form that [`Self::add_signed_products`] takes.
    fn signed(self, bytes: Self::Bytes) -> Self::Bytes;
    /// Returns the initial sums of signed products. `x_total` must be the sum of all `x` whose products will be added.
    fn no_signed_sums(self, x_total: i32) -> Self::Ints;
    /// Adds to each lane the dot product of its four weights, from −128 to 127, and four values of `x`, from −127 to 127.
    fn add_signed_products(self, sums: Self::Ints, weights: Self::Bytes, x: Self::Bytes) -> Self::Ints;
}

/// Converts half-precision bits exactly. The number must be finite, because infinities and NaNs would become finite numbers.
#[inline(always)]
pub(super) fn widen(half: u16) -> f32 {
    /// The factor 2^112. Its exponent is the difference between the exponent biases of the two formats.
    const BIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = f32::from_bits(u32::from(half & 0x7fff) << 13) * BIAS;
    f32::from_bits(magnitude.to_bits() | u32::from(half & 0x8000) << 16)
}

/// Converts bfloat16 bits exactly.
#[inline(always)]
pub(super) fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// An implementation with arrays instead of vector registers, which runs on any processor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plain;

const LANES: usize = 8;

/// Builds an array lane by lane. This is a macro because a closure would not be compiled for the instruction set.
macro_rules! lanes {
    ($lane:ident => $value:expr) => {{
        let mut lanes = [Default::default(); LANES];
        for $lane in 0..LANES {
            lanes[$lane] = $value;
        }
        lanes
    }};
}

macro_rules! operations {
    ($($name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)? = $value:expr;)*) => {
        $(
            #[inline(always)]
            fn $name(self $(, $argument: $kind)*) $(-> $result)? {
                $value
            }
        )*
    };
}

/// Returns `sum` plus the dot product of a lane's four weights and `x`.
#[inline(always)]
fn add_dot(sum: i32, weights: [i32; 4], x: [u8; 4]) -> i32 {
    let mut sum = sum;
    for i in 0..4 {
        sum += weights[i] * i32::from(x[i] as i8);
    }
    sum
}

impl Simd for Plain {
    const LANES: usize = LANES;
    type Floats = [f32; LANES];
    type Ints = [i32; LANES];
    type Bytes = [[u8; 4]; LANES];
    type Sums = [i32; LANES];

    operations! {
        splat(number: f32) -> Self::Floats = [number; LANES];
        load(from: &[f32]) -> Self::Floats = lanes!(l => from[l]);
        load_halves(from: &[u16]) -> Self::Floats = lanes!(l => widen(from[l]));
        load_bf16(from: &[u16]) -> Self::Floats = lanes!(l => widen_bf16(from[l]));
        load_u8(from: &[u8]) -> Self::Floats = lanes!(l => f32::from(from[l]));
        store(numbers: Self::Floats, into: &mut [f32]) = into[..LANES].copy_from_slice(&numbers);
        mul(a: Self::Floats, b: Self::Floats) -> Self::Floats = lanes!(l => a[l] * b[l]);
        mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats = lanes!(l => a[l].mul_add(b[l], c[l]));
        floats(ints: Self::Ints) -> Self::Floats = lanes!(l => ints[l] as f32);

        splat_int(number: i32) -> Self::Ints = [number; LANES];
        load_i8(from: &[i8]) -> Self::Ints = lanes!(l => i32::from(from[l]));
        add_ints(a: Self::Ints, b: Self::Ints) -> Self::Ints = lanes!(l => a[l] + b[l]);
        mul_ints(a: Self::Ints, b: Self::Ints) -> Self::Ints = lanes!(l => a[l] * b[l]);

        load_bytes(from: &[u8]) -> Self::Bytes =
            lanes!(l => [from[l * 4], from[l * 4 + 1], from[l * 4 + 2], from[l * 4 + 3]]);
        splat_bytes(four: &[i8; 4]) -> Self::Bytes =
            [[four[0] as u8, four[1] as u8, four[2] as u8, four[3] as u8]; LANES];
        low_nibbles(bytes: Self::Bytes) -> Self::Bytes =
            lanes!(l => [bytes[l][0] & 15, bytes[l][1] & 15, bytes[l][2] & 15, bytes[l][3] & 15]);
        high_nibbles(bytes: Self::Bytes) -> Self::Bytes =
            lanes!(l => [bytes[l][0] >> 4, bytes[l][1] >> 4, bytes[l][2] >> 4, bytes[l][3] >> 4]);

        no_sums() -> Self::Sums = [0; LANES];
        add_products(sums: Self::Sums, weights: Self::Bytes, x: Self::Bytes) -> Self::Sums = lanes!(l => {
            let w = weights[l];
            add_dot(sums[l], [w[0].into(), w[1].into(), w[2].into(), w[3].into()], x[l])
        });
        ints(sums: Self::Sums) -> Self::Ints = sums;

        signed(bytes: Self::Bytes) -> Self::Bytes = bytes;
        no_signed_sums(_x_total: i32) -> Self::Ints = [0; LANES];
        add_signed_products(sums: Self::Ints, weights: Self::Bytes, x: Self::Bytes) -> Self::Ints = lanes!(l => {
            let w = weights[l];
            add_dot(sums[l], [(w[0] as i8).into(), (w[1] as i8).into(), (w[2] as i8).into(), (w[3] as i8).into()], x[l])
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn widening_of_finite_half_precision_numbers_is_exact() {
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            if half.is_finite() {
                assert_eq!(widen(bits).to_bits(), half.to_f32().to_bits(), "{bits:#x}");
            }
        }
    }
}
