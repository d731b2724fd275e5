//! The reasons for which a constraint cannot be used, or a text cannot be continued.

/// The reason why a constraint cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the fields")]
pub enum GrammarError {
    /// The constraint is not well-formed, or cannot be enforced.
    #[error("{problem}")]
    Invalid { problem: String },
    /// A part of a JSON schema cannot be enforced.
    #[error("at {place}, {problem}")]
    Schema { place: String, problem: String },
    /// The constraint is larger than the limit.
    #[error("the constraint has {found} {unit}, more than the limit of {max}")]
    TooLarge { found: usize, max: usize, unit: &'static str },
    /// No constraint can be compiled for the model's vocabulary.
    #[error("structured outputs are not available: the model's vocabulary cannot be used ({problem})")]
    Vocabulary { problem: String },
}

impl GrammarError {
    pub(crate) fn invalid(problem: impl ToString) -> Self {
        Self::Invalid { problem: problem.to_string() }
    }
}

/// The reason why a text cannot be continued under its constraint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    /// The parser reached its limits at this point of the text.
    #[error("the constraint is too complex: {0}; simplify it")]
    TooComplex(String),
    /// No token of the vocabulary continues the text.
    #[error("no token of the model's vocabulary continues the text under the constraint")]
    NoToken,
    /// The parser failed on this text because of a bug in the parser.
    #[error("the parser failed on the text under the constraint; simplify the constraint")]
    Failed,
    /// The constraint does not allow the token.
    #[error("the text does not meet the constraint; other parameters, such as allowed_token_ids, may leave no token for it")]
    NotAllowed,
}
