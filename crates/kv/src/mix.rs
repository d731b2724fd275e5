//! A fast mixing function for counters and seeds.

/// Returns a pseudo-random number for a counter or seed: the step and finalizer of SplitMix64 (Steele, Lea and Flood 2014). It is a bijection in
/// which every input bit affects every output bit. It must not be used for secrets, because it is easily inverted.
pub const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}
