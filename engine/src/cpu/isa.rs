//! The processor's instruction sets: each kernel is compiled for two of them and chosen when it runs.

/// Which compilation of the kernels runs. All of them give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Isa(Level);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Baseline,
    /// Made by [`Isa::detect`] only: to hold it proves that this processor has AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Isa {
    /// What the build's target has; runs everywhere.
    #[cfg(test)]
    pub const BASELINE: Self = Self(Level::Baseline);

    /// The best this processor has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            return Self(Level::Avx2);
        }
        Self(Level::Baseline)
    }

    #[cfg(target_arch = "x86_64")]
    pub fn has_avx2(self) -> bool {
        self.0 == Level::Avx2
    }
}

/// Compiles one plain function twice, for the build's target and for AVX2 with FMA, and chooses by the [`Isa`] it is given.
/// Kernels have no closures: a closure is compiled for the build's target alone when it is not inlined.
/// Rust neither fuses nor reorders floating-point operations by itself, so the two give the same bits.
macro_rules! kernel {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        $visibility fn $name(isa: $crate::cpu::isa::Isa, $($argument: $kind),*) {
            #[inline(always)]
            fn plain($($argument: $kind),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($argument: $kind),*) {
                plain($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            if isa.has_avx2() {
                // SAFETY: `Isa::detect` makes such a value only where the processor has these features.
                #[expect(unsafe_code)]
                return unsafe { avx2($($argument),*) };
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = isa;
            plain($($argument),*)
        }
    };
}
pub(super) use kernel;
