//! Pseudo-random numbers from a seed.

use std::{ops::Range, time::Duration};

/// The pseudo-random number generator SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        let number = tandem_kv::mix(self.0);
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        number
    }

    /// Returns an independent generator. Later use of `self` does not change the numbers of the returned generator.
    pub(super) fn fork(&mut self) -> Self {
        Self(self.next())
    }

    /// Returns a number in the range. The range must not be empty.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    pub(super) fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.within(0..100) < percent
    }

    /// Returns one of the items. There must be at least one.
    pub(super) fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.within(0..choices.len() as u64) as usize]
    }
}
