//! Vector operations for AVX2 with FMA and F16C, and for AVX-512 with VNNI.
//!
//! Values of both types are created only by [`Avx2::detect`] and [`Avx512::detect`].
#![expect(unsafe_code, reason = "SIMD instructions are called by intrinsics")]

use super::Simd;
use std::arch::x86_64::*;

/// The instruction sets AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Avx2(());

/// The instruction sets AVX-512 (F, BW, VL and VNNI), AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Avx512(());

impl Avx2 {
    /// Returns a value if the processor and the operating system support this instruction set, otherwise `None`.
    pub fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

impl Avx512 {
    /// Returns a value if the processor and the operating system support this instruction set, otherwise `None`.
    pub fn detect() -> Option<Self> {
        let has = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        has.then_some(Self(()))
    }
}

macro_rules! instructions {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)? = $value:expr;)*) => {
        $(
            $(#[$doc])*
            #[inline(always)]
            fn $name(self $(, $argument: $kind)*) $(-> $result)? {
                // SAFETY: `self` proves that the processor has the instructions. Each pointer is to a slice of the length that is loaded or stored.
                unsafe { $value }
            }
        )*
    };
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    type Floats = __m256;
    type Ints = __m256i;
    type Bytes = __m256i;
    /// Sums of products as 16-bit integers, two in each 32-bit lane.
    type Sums = __m256i;

    instructions! {
        splat(number: f32) -> __m256 = _mm256_set1_ps(number);
        load(from: &[f32]) -> __m256 = _mm256_loadu_ps(from[..8].as_ptr());
        load_halves(from: &[u16]) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(from[..8].as_ptr().cast()));
        load_bf16(from: &[u16]) -> __m256 = {
            let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from[..8].as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
        };
        load_u8(from: &[u8]) -> __m256 = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from[..8].as_ptr().cast())));
        store(numbers: __m256, into: &mut [f32]) = _mm256_storeu_ps(into[..8].as_mut_ptr(), numbers);
        mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        mul_add(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        floats(ints: __m256i) -> __m256 = _mm256_cvtepi32_ps(ints);

        splat_int(number: i32) -> __m256i = _mm256_set1_epi32(number);
        load_i8(from: &[i8]) -> __m256i = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from[..8].as_ptr().cast()));
        add_ints(a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi32(a, b);
        mul_ints(a: __m256i, b: __m256i) -> __m256i = _mm256_mullo_epi32(a, b);

        load_bytes(from: &[u8]) -> __m256i = _mm256_loadu_si256(from[..32].as_ptr().cast());
        splat_bytes(four: &[i8; 4]) -> __m256i = _mm256_set1_epi32(four.as_ptr().cast::<i32>().read_unaligned());
        low_nibbles(bytes: __m256i) -> __m256i = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
        high_nibbles(bytes: __m256i) -> __m256i = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), _mm256_set1_epi8(15));

        no_sums() -> __m256i = _mm256_setzero_si256();
        add_products(sums: __m256i, weights: __m256i, x: __m256i) -> __m256i =
            _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, x));
        ints(sums: __m256i) -> __m256i = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));

        no_signed_sums(_x_total: i32) -> __m256i = _mm256_setzero_si256();
        /// Moves the weights' signs to `x`, because the instruction needs one unsigned factor. A sum of two products is at most 2 × 128 ×
        /// 127 in absolute value, which fits in 16 bits.
        add_signed_products(sums: __m256i, weights: __m256i, x: __m256i) -> __m256i = {
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
            _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        };
    }

    #[inline(always)]
    fn signed(self, bytes: __m256i) -> __m256i {
        bytes
    }
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    type Floats = __m512;
    type Ints = __m512i;
    type Bytes = __m512i;
    type Sums = __m512i;

    instructions! {
        splat(number: f32) -> __m512 = _mm512_set1_ps(number);
        load(from: &[f32]) -> __m512 = _mm512_loadu_ps(from[..16].as_ptr());
        load_halves(from: &[u16]) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(from[..16].as_ptr().cast()));
        load_bf16(from: &[u16]) -> __m512 = {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from[..16].as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        };
        load_u8(from: &[u8]) -> __m512 = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from[..16].as_ptr().cast())));
        store(numbers: __m512, into: &mut [f32]) = _mm512_storeu_ps(into[..16].as_mut_ptr(), numbers);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        floats(ints: __m512i) -> __m512 = _mm512_cvtepi32_ps(ints);

        splat_int(number: i32) -> __m512i = _mm512_set1_epi32(number);
        load_i8(from: &[i8]) -> __m512i = _mm512_cvtepi8_epi32(_mm_loadu_si128(from[..16].as_ptr().cast()));
        add_ints(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        mul_ints(a: __m512i, b: __m512i) -> __m512i = _mm512_mullo_epi32(a, b);

        load_bytes(from: &[u8]) -> __m512i = _mm512_loadu_si512(from[..64].as_ptr().cast());
        splat_bytes(four: &[i8; 4]) -> __m512i = _mm512_set1_epi32(four.as_ptr().cast::<i32>().read_unaligned());
        low_nibbles(bytes: __m512i) -> __m512i = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
        high_nibbles(bytes: __m512i) -> __m512i = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), _mm512_set1_epi8(15));

        no_sums() -> __m512i = _mm512_setzero_si512();
        add_products(sums: __m512i, weights: __m512i, x: __m512i) -> __m512i = _mm512_dpbusd_epi32(sums, weights, x);

        /// Adds 128 to the weights, which makes them unsigned. [`Self::no_signed_sums`] subtracts the amount by which this increases the
        /// sums.
        signed(bytes: __m512i) -> __m512i = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
        no_signed_sums(x_total: i32) -> __m512i = _mm512_set1_epi32(-128 * x_total);
        add_signed_products(sums: __m512i, weights: __m512i, x: __m512i) -> __m512i = _mm512_dpbusd_epi32(sums, weights, x);
    }

    #[inline(always)]
    fn ints(self, sums: __m512i) -> __m512i {
        sums
    }
}
