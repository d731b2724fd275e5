//! Instruction sets: each kernel is compiled for all of them, and one of its versions is selected at run time.

use super::simd::Plain;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use std::fmt;

/// An instruction set of this processor. The kernels give the same bits for all of them.
#[derive(Clone, Copy, Debug)]
pub struct Isa(pub(super) Level);

#[derive(Clone, Copy, Debug)]
pub(super) enum Level {
    Baseline(Plain),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Isa {
    /// Returns the best instruction set of this processor.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// Returns all instruction sets of this processor, the best first. The last one is the build target's baseline.
    pub fn available() -> Vec<Self> {
        let levels = [
            #[cfg(target_arch = "x86_64")]
            Avx512::detect().map(Level::Avx512),
            #[cfg(target_arch = "x86_64")]
            Avx2::detect().map(Level::Avx2),
            Some(Level::Baseline(Plain)),
        ];
        levels.into_iter().flatten().map(Self).collect()
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Level::Baseline(_) => "baseline",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => "avx512",
        })
    }
}

/// Compiles a function for the build target, for AVX2 and for AVX-512. The caller's [`Isa`] argument selects one of these versions. The
/// first argument of a version is the [`Simd`](super::simd::Simd) value of its instruction set. Kernels must not have closures: a closure
/// that is not inlined is compiled for the build target only. Rust neither fuses nor reorders floating-point operations, so all versions
/// give the same bits.
macro_rules! kernel {
    (
        $(#[$meta:meta])*
        $visibility:vis fn $name:ident($simd:ident, $($argument:ident: $kind:ty),* $(,)?) $body:block
    ) => {
        $(#[$meta])*
        $visibility fn $name(isa: $crate::cpu::isa::Isa, $($argument: $kind),*) {
            #[inline(always)]
            fn plain<S: $crate::cpu::simd::Simd>($simd: S, $($argument: $kind),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2(simd: $crate::cpu::simd::Avx2, $($argument: $kind),*) {
                plain(simd, $($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
            fn avx512(simd: $crate::cpu::simd::Avx512, $($argument: $kind),*) {
                plain(simd, $($argument),*)
            }

            match isa.0 {
                $crate::cpu::isa::Level::Baseline(simd) => plain(simd, $($argument),*),
                // SAFETY: the value `simd` proves that the processor has these features.
                #[cfg(target_arch = "x86_64")]
                #[expect(unsafe_code, reason = "functions compiled for instruction sets are called")]
                $crate::cpu::isa::Level::Avx2(simd) => unsafe { avx2(simd, $($argument),*) },
                // SAFETY: the value `simd` proves that the processor has these features.
                #[cfg(target_arch = "x86_64")]
                #[expect(unsafe_code, reason = "functions compiled for instruction sets are called")]
                $crate::cpu::isa::Level::Avx512(simd) => unsafe { avx512(simd, $($argument),*) },
            }
        }
    };
}
pub(super) use kernel;
