//! Trying again for ever: longer and longer pauses, and each complaint told once.

use std::{iter, time::Duration};

/// Failures since something was well.
#[derive(Debug)]
pub struct Tries {
    pause_min: Duration,
    pause_max: Duration,
    next_pause: Duration,
    told: Option<String>,
}

impl Tries {
    /// None yet. Pauses begin with `pause_min` and double up to `pause_max`.
    pub fn new(pause_min: Duration, pause_max: Duration) -> Self {
        Self { pause_min, pause_max, next_pause: pause_min, told: None }
    }

    /// How long to wait now; longer the next time.
    pub fn pause(&mut self) -> Duration {
        let now = self.next_pause;
        self.next_pause = (now * 2).min(self.pause_max);
        now
    }

    /// All is well again.
    pub fn reset(&mut self) {
        *self = Self::new(self.pause_min, self.pause_max);
    }

    /// Whether this complaint is another than the last one told since all was well: the same one every second helps nobody.
    pub fn is_news(&mut self, complaint: &str) -> bool {
        let news = self.told.as_deref() != Some(complaint);
        if news {
            self.told = Some(complaint.to_owned());
        }
        news
    }
}

/// An error with what caused it, in one line.
pub fn complaint(error: &dyn std::error::Error) -> String {
    let causes = iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |line, cause| {
        let cause = cause.to_string();
        // Some errors repeat their cause in their own words.
        if line.ends_with(&cause) { line } else { format!("{line}: {cause}") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_a_complaint_is_told_once_until_all_is_well() {
        let ms = Duration::from_millis;
        let mut tries = Tries::new(ms(100), ms(350));
        assert_eq!([tries.pause(), tries.pause(), tries.pause(), tries.pause()], [ms(100), ms(200), ms(350), ms(350)]);
        assert_eq!([tries.is_news("a"), tries.is_news("a"), tries.is_news("b"), tries.is_news("b")], [true, false, true, false]);
        tries.reset();
        assert!(tries.is_news("b"));
        assert_eq!(tries.pause(), ms(100));
    }

    #[test]
    fn a_complaint_names_all_causes_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] Middle);
        #[derive(Debug, thiserror::Error)]
        #[error("middle: inner")]
        struct Middle(#[source] Inner);
        #[derive(Debug, thiserror::Error)]
        #[error("inner")]
        struct Inner;
        assert_eq!(complaint(&Outer(Middle(Inner))), "outer: middle: inner");
    }
}
