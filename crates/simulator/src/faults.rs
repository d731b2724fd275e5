//! Faults in a simulation: the losses of workers.

use std::time::Duration;
use tandem_kv::mix;

/// The losses of workers. A lost worker's connections break at once, as those of a killed process do. A worker that returns has an empty
/// cache.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// Losses at given times.
    pub losses: Vec<Loss>,
    /// Losses of random workers at random times, which the cluster's seed determines.
    pub random: Option<RandomLosses>,
}

/// The loss of one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// The worker's number in the cluster. The loss of a worker that is already lost is ignored.
    pub worker: usize,
    /// The time of the loss, counted from the beginning of the simulation.
    pub at: Duration,
    /// The time after which the worker returns; `None` if it does not return.
    pub lasts: Option<Duration>,
}

/// Losses of random workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomLosses {
    /// The mean time between two losses. The times are distributed exponentially.
    pub every: Duration,
    /// The time after which a lost worker returns.
    pub lasts: Duration,
}

impl Faults {
    /// Returns whether there are no losses.
    pub fn is_empty(&self) -> bool {
        self.losses.is_empty() && self.random.is_none()
    }
}

/// A sequence of pseudo-random losses.
pub(crate) struct Draws {
    pub(crate) losses: RandomLosses,
    state: u64,
}

impl Draws {
    pub(crate) fn new(losses: RandomLosses, seed: u64) -> Self {
        Self { losses, state: mix(seed) }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.state)
    }

    /// Returns the time until the next loss.
    pub(crate) fn pause(&mut self) -> Duration {
        // The number is above 0 and at most 1.
        let uniform = ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64;
        Duration::try_from_secs_f64(self.losses.every.as_secs_f64() * -uniform.ln()).unwrap_or(Duration::MAX)
    }

    /// Returns a pseudo-random number below `bound`, which must not be 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_losses_have_the_mean_interval_and_are_determined_by_the_seed() {
        let losses = RandomLosses { every: Duration::from_secs(100), lasts: Duration::from_secs(1) };
        let draw = |seed| {
            let mut draws = Draws::new(losses, seed);
            (0..2_000).map(|_| (draws.pause(), draws.below(8))).collect::<Vec<_>>()
        };
        let drawn = draw(7);
        let mean = drawn.iter().map(|(pause, _)| pause.as_secs_f64()).sum::<f64>() / drawn.len() as f64;
        assert!((90.0..110.0).contains(&mean), "{mean}");
        assert!((0..8).all(|worker| drawn.iter().filter(|(_, drawn)| *drawn == worker).count() > 180));
        assert_eq!(drawn, draw(7));
        assert_ne!(drawn, draw(8));
    }
}
