//! The order in which requests are served.

/// A request's priority. A request with a lower value is served earlier.
///
/// The order is lexicographic. Frontends never give a request with a lower `within` a higher `across` than another request of its account has, so
/// the requests of one account are ordered by `within`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority {
    /// The rank among the requests of all accounts. A client can raise it above 0 (served later). Only the operator can lower it below 0.
    pub across: i32,
    /// The rank among the requests of the account, which the client chooses.
    pub within: i32,
}

impl Priority {
    /// Returns whether a request of this priority is served before a request of the priority `other`. `same_account`: the two requests belong to one
    /// account.
    #[must_use]
    pub fn outranks(self, other: Self, same_account: bool) -> bool {
        self.across < other.across || (same_account && self < other)
    }
}
