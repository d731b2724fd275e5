//! A model's tokens, in the form that the compiler of constraints needs.

use crate::{
    Constraint, GrammarError, Kind, Matcher, input_matcher::InputMatcher, matcher::SharedTrie, schema::PROPERTIES_MAX, source,
    stack::on_large_stack,
};
use llguidance::{
    ParserFactory,
    api::ParserLimits,
    toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie},
};
use std::sync::{Arc, LazyLock};
use tandem_kv::TokenId;

/// Maximum number of tokens of a vocabulary, given by llguidance's tree.
const TOKENS_MAX: usize = 1 << 20;
/// Maximum length in bytes of a token that a constraint can allow. Longer tokens are never sampled under a constraint.
const TOKEN_BYTES_MAX: usize = 512;

/// The number of parser items for each optional property that may come next in a text.
const ITEMS_OF_PROPERTY: usize = 4;

/// A model's tokens. The tables that constraints need are built when the first constraint is compiled. They take some tens of bytes for each byte of
/// the tokens, and are kept.
pub struct Vocabulary(LazyLock<Result<Built, GrammarError>, Build>);

type Build = Box<dyn FnOnce() -> Result<Built, GrammarError> + Send + Sync>;

struct Built {
    factory: ParserFactory,
    trie: Arc<ApproximateTokEnv>,
}

impl Vocabulary {
    /// Creates the vocabulary of a model whose logits have `size` entries. `tokens` lists the tokens in the order of their ids. Each entry has the
    /// bytes of the token's text and `false`, or the name of a special token and `true`. No text contains a special token.
    pub fn new<'a>(tokens: impl Iterator<Item = (&'a [u8], bool)>, size: usize) -> Self {
        // The tokens are kept in a compact form until the first constraint is compiled.
        let (mut text, mut ends) = (Vec::new(), Vec::with_capacity(size));
        for (bytes, special) in tokens.take(size) {
            text.extend_from_slice(bytes);
            ends.push((text.len(), special));
        }
        Self(LazyLock::new(Box::new(move || Built::new(words(&text, &ends, size)))))
    }

    /// Returns the vocabulary in which each byte is a token.
    pub fn bytes() -> &'static Self {
        static BYTES: LazyLock<Vocabulary> = LazyLock::new(|| {
            let bytes: Vec<u8> = (0..=u8::MAX).collect();
            Vocabulary::new(bytes.chunks(1).map(|byte| (byte, false)), bytes.len())
        });
        &BYTES
    }

    /// Builds the tables that constraints need, unless they are built. Blocks its thread for a fraction of a second.
    pub fn build(&self) {
        LazyLock::force(&self.0);
    }

    /// Compiles a constraint. Where the constrained text is complete, `stop_tokens` may end it. Blocks its thread for milliseconds; the first call
    /// takes a fraction of a second.
    ///
    /// # Errors
    /// Returns a [`GrammarError`] if the constraint cannot be enforced.
    pub fn compile(&self, constraint: &Constraint, stop_tokens: &[TokenId]) -> Result<Matcher, GrammarError> {
        let compiled = on_large_stack("tandem-grammar", || {
            let built = LazyLock::force(&self.0).as_ref().map_err(Clone::clone)?;
            let shared = SharedTrie { trie: Arc::clone(&built.trie), stop_tokens: stop_tokens.to_vec() };
            let marker = constraint.begins_after.as_deref();
            if let Kind::CallInputs(inputs) = &constraint.kind {
                let parser = |grammar| built.factory.create_parser(grammar).map(|parser| parser.parser);
                let parsers = source::of_inputs(constraint, inputs)?.into_iter().map(parser).collect::<Result<Vec<_>, _>>();
                let parsers = parsers.map_err(|error| GrammarError::invalid(format!("{error:#}").trim()))?;
                return Ok(Matcher::of_inputs(InputMatcher::new(inputs, parsers, Arc::clone(&built.trie))?, shared, marker));
            }
            let parser = built.factory.create_parser(source::of(constraint)?).map_err(|error| {
                let message = format!("{error:#}");
                match &constraint.kind {
                    Kind::JsonSchema { schema, .. } => source::explain(schema, &message),
                    _ => GrammarError::invalid(message.trim()),
                }
            })?;
            Matcher::new(parser, shared, marker)
        });
        compiled.unwrap_or_else(|error| Err(GrammarError::invalid(error)))
    }
}

fn words(text: &[u8], ends: &[(usize, bool)], size: usize) -> Vec<Vec<u8>> {
    let mut words = Vec::with_capacity(size);
    let mut start = 0;
    for (end, special) in ends {
        let bytes = &text[std::mem::replace(&mut start, *end)..*end];
        let marker: &[u8] = if *special { &[TokTrie::SPECIAL_TOKEN_MARKER] } else { &[] };
        words.push(if bytes.is_empty() || bytes.len() > TOKEN_BYTES_MAX { Vec::new() } else { [marker, bytes].concat() });
    }
    words.resize(size, Vec::new());
    words
}

impl Built {
    fn new(words: Vec<Vec<u8>>) -> Result<Self, GrammarError> {
        let problem = |problem: String| GrammarError::Vocabulary { problem };
        if words.len() > TOKENS_MAX {
            return Err(problem(format!("the vocabulary has {} tokens, more than the limit of {TOKENS_MAX}", words.len())));
        }
        // `Matcher` decides where a text may end, so the tree has no end-of-sequence token.
        let trie = Arc::new(ApproximateTokEnv::new(TokTrie::from(&TokRxInfo::new(words.len() as u32, INVALID_TOKEN), &words)));
        let environment: TokEnv = Arc::<ApproximateTokEnv>::clone(&trie);
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| problem(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, trie })
    }
}

/// Returns the limits of a constraint's size and of the work for one token, which takes about ten milliseconds at most.
fn limits() -> ParserLimits {
    let max_items_in_row = ITEMS_OF_PROPERTY * (PROPERTIES_MAX + 64);
    ParserLimits {
        step_lexer_fuel: 100_000,
        max_lexer_states: 50_000,
        max_items_in_row,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}
