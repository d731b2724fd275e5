//! Constrains the inputs of tools within an answer that is free otherwise.
//!
//! The text is read byte by byte. Once it has begun a call of one of the tools, the next bytes must be those of the call's form: the texts before the
//! input, the input, whose decoded bytes a parser checks, and the texts after it. All other text is free and costs no mask.

use crate::{
    CallInput, GrammarError, InputPlace, Mask, MatchError,
    call_step::{CallForm, CallStep, PartsRead, Text},
};
use llguidance::{
    earley::{BiasComputer, Parser, ParserRecognizer},
    toktrie::{ApproximateTokEnv, INVALID_TOKEN, Recognizer, SimpleVob, TokTrie, TokenizerEnv},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, OnceLock},
};
use tandem_kv::TokenId;

/// The byte that ends an input for its parser. No UTF-8 text has it.
const END: u8 = 0xFE;
/// The rules around the grammar `input`.
pub(crate) const OUTER: &str = "%llguidance {\"allow_invalid_utf8\": true}\nstart: @input END\nEND: /\\xFE/\n";

/// Maximum number of beginnings that the end of a text may continue, more than any model's format of calls can have.
const BEGUN_MAX: usize = 1_024;

/// The state of a text with inputs of tools.
#[derive(Clone)]
pub(crate) struct InputMatcher {
    shared: Arc<SharedInputs>,
    state: InputState,
}

struct SharedInputs {
    places: Vec<CallPlace>,
    /// The parser of each input before the first byte.
    parsers: Vec<Parser>,
    trie: Arc<ApproximateTokEnv>,
    /// The tokens that can complete a beginning and continue: they have the last byte of a beginning before their own last byte.
    crossing: Vec<TokenId>,
}

/// A way to write the call of a tool.
struct CallPlace {
    input: usize,
    begin: Vec<Vec<u8>>,
    form: CallForm,
}

#[derive(Clone)]
enum InputState {
    /// The beginnings that the end of the text may continue, each with its place and its progress.
    Free(Vec<(usize, PartsRead)>),
    Call(BegunCall),
}

#[derive(Clone)]
struct BegunCall {
    place: usize,
    step: CallStep,
    parser: Box<Parser>,
}

impl InputMatcher {
    /// Returns the state of an empty text. `parsers` has a parser for each input.
    pub fn new(inputs: &[CallInput], parsers: Vec<Parser>, trie: Arc<ApproximateTokEnv>) -> Result<Self, GrammarError> {
        let places =
            inputs.iter().enumerate().flat_map(|(input, of)| of.places.iter().map(move |place| CallPlace::new(input, place)));
        let places = places.collect::<Result<Vec<_>, _>>()?;
        let ends: Vec<u8> = places.iter().filter_map(|place| place.begin.last()?.last().copied()).collect();
        let crosses = |token: &TokenId| {
            trie.tok_trie().token(*token).split_last().is_some_and(|(_, text)| text.iter().any(|byte| ends.contains(byte)))
        };
        let crossing = (0..trie.tok_trie().vocab_size() as TokenId).filter(crosses).collect();
        let shared = SharedInputs { places, parsers, trie, crossing };
        // The first mask of each input shows whether any text meets its grammar.
        for input in 0..inputs.len() {
            if let Some(place) = shared.places.iter().position(|place| place.input == input) {
                let mut call = shared.call(place, shared.places[place].form.input());
                call.mask(&shared).map_err(GrammarError::invalid)?;
            }
        }
        Ok(Self { shared: Arc::new(shared), state: InputState::Free(Vec::new()) })
    }

    /// Returns the tokens that are allowed next; `None` if all tokens are.
    pub fn mask(&mut self) -> Result<Option<Mask>, MatchError> {
        match &mut self.state {
            InputState::Call(call) => call.mask(&self.shared).map(Some),
            InputState::Free(begun) => Ok(self.shared.free_mask(begun)),
        }
    }

    /// Appends a token to the text.
    pub fn accept(&mut self, token: TokenId) -> Result<(), MatchError> {
        let shared = Arc::clone(&self.shared);
        // The marker of a special token is a part of its text, so that an input cannot have the token.
        let mut text = shared.trie.tok_trie().token(token);
        if let InputState::Call(call) = &mut self.state {
            let read = call.read(&shared, text)?;
            text = &text[read..];
            match call.step {
                CallStep::Done => self.state = InputState::Free(Vec::new()),
                _ if text.is_empty() => return Ok(()),
                _ => return Err(MatchError::NotAllowed),
            }
        }
        if let InputState::Free(begun) = &mut self.state
            && let Some((place, step)) = shared.begin(begun, text)?
        {
            self.state = InputState::Call(shared.call(place, step));
        }
        Ok(())
    }
}

impl CallPlace {
    fn new(input: usize, InputPlace { begin, head, end, tail }: &InputPlace) -> Result<Self, GrammarError> {
        let ends_with_text = |parts: &Vec<String>| parts.last().is_some_and(|part| !part.is_empty());
        if ![begin, head, tail].into_iter().all(ends_with_text) || begin[0].is_empty() || end.as_deref() == Some("") {
            return Err(GrammarError::invalid("a tool's input needs texts before and after it"));
        }
        let bytes = |parts: &[String]| parts.iter().map(|part| part.clone().into_bytes()).collect();
        let form = CallForm { head: bytes(head), end: end.clone().map(String::into_bytes), tail: bytes(tail) };
        Ok(Self { input, begin: bytes(begin), form })
    }
}

impl SharedInputs {
    fn call(&self, place: usize, step: CallStep) -> BegunCall {
        // The limits on the states of a parser's lexer apply to this call alone.
        let parser = self.parsers[self.places[place].input].deep_clone();
        BegunCall { place, step, parser: Box::new(parser) }
    }

    /// Adds a free text to the beginnings of calls. Returns the place of the first call that it begins, and the step behind the text.
    ///
    /// # Errors
    /// The text continues the beginning with something else than the texts before the input.
    fn begin(&self, begun: &mut Vec<(usize, PartsRead)>, text: &[u8]) -> Result<Option<(usize, CallStep)>, MatchError> {
        for (at, byte) in text.iter().enumerate() {
            let new = (0..self.places.len()).map(|place| (place, PartsRead::START));
            let after = |(place, parts): (usize, PartsRead)| Some((place, parts.after(&self.places[place].begin, *byte)?));
            let mut next: Vec<_> = begun.drain(..).chain(new).filter_map(after).filter(|(_, parts)| parts.has_begun()).collect();
            next.sort_unstable();
            next.dedup();
            next.truncate(BEGUN_MAX);
            if let Some((place, _)) = next.iter().find(|(place, parts)| parts.is_complete(&self.places[*place].begin)) {
                let step = text[at + 1..]
                    .iter()
                    .try_fold(CallStep::HEAD, |step, byte| step.after(&self.places[*place].form, *byte, &mut ()));
                return step.map(|step| Some((*place, step))).ok_or(MatchError::NotAllowed);
            }
            *begun = next;
        }
        Ok(None)
    }

    fn free_mask(&self, begun: &[(usize, PartsRead)]) -> Option<Mask> {
        let trie = self.trie.tok_trie();
        let new = (0..self.places.len()).map(|place| (place, PartsRead::START));
        let missing = new.chain(begun.iter().copied()).map(|(place, parts)| parts.missing(&self.places[place].begin));
        let least = missing.min().unwrap_or_default();
        let leaves = |token: &&TokenId| {
            let text = trie.token(**token);
            text.len() > least && self.begin(&mut begun.to_vec(), text).is_err()
        };
        let mut mask = None;
        for token in self.crossing.iter().filter(leaves) {
            mask.get_or_insert_with(|| Mask::all(trie.vocab_size())).forbid(*token);
        }
        mask
    }
}

impl BegunCall {
    fn mask(&mut self, shared: &SharedInputs) -> Result<Mask, MatchError> {
        let (form, step, trie) = (&shared.places[self.place].form, self.step, shared.trie.tok_trie());
        let allowed = on_trial(&mut self.parser, trie, |recognizer| {
            let mut allowed = trie.alloc_token_set();
            trie.add_bias(&mut InputReader::new(form, step, recognizer), &mut allowed, &[]);
            allowed
        })?;
        let mask = Mask(allowed.as_slice()[..trie.vocab_size().div_ceil(32)].into());
        if mask.is_empty() { Err(MatchError::NoToken) } else { Ok(mask) }
    }

    /// Reads a text up to the end of the call, or to the first byte that is not allowed. Returns the number of bytes.
    fn read(&mut self, shared: &SharedInputs, text: &[u8]) -> Result<usize, MatchError> {
        let (form, step, trie) = (&shared.places[self.place].form, self.step, shared.trie.tok_trie());
        let (step, read, pushed) = on_trial(&mut self.parser, trie, |recognizer| {
            let mut reader = InputReader::new(form, step, recognizer);
            reader.trie_started("input");
            let read = text.iter().take_while(|byte| reader.step() != CallStep::Done && reader.try_push_byte(**byte)).count();
            let found = (reader.step(), read, std::mem::take(&mut reader.text.pushed));
            reader.trie_finished();
            found
        })?;
        self.step = step;
        // The bytes need not be a token of the vocabulary.
        let applied = pushed.is_empty()
            || catch_unwind(AssertUnwindSafe(|| matches!(self.parser.apply_token(&pushed, INVALID_TOKEN), Ok(0))))
                .unwrap_or(false);
        if applied { Ok(read) } else { Err(MatchError::Failed) }
    }
}

/// Calls `work` with the parser, to which it may give bytes on trial, within the limits of the work for one token.
fn on_trial<T: Send + Sync>(
    parser: &mut Parser,
    trie: &TokTrie,
    work: impl Fn(&mut ParserRecognizer<'_>) -> T + Send + Sync,
) -> Result<T, MatchError> {
    struct Trial<'a, W, T> {
        work: W,
        found: OnceLock<T>,
        trie: &'a TokTrie,
    }

    impl<T: Send + Sync, W: Fn(&mut ParserRecognizer<'_>) -> T + Send + Sync> BiasComputer for Trial<'_, W, T> {
        fn compute_bias(&self, recognizer: &mut ParserRecognizer<'_>, _: &[u8]) -> SimpleVob {
            self.found.get_or_init(|| (self.work)(recognizer));
            self.trie.alloc_token_set()
        }

        fn trie(&self) -> &TokTrie {
            self.trie
        }
    }

    let trial = Trial { work, found: OnceLock::new(), trie };
    // The mask that it would keep is not the parser's own.
    parser.invalidate_bias_cache();
    catch_unwind(AssertUnwindSafe(|| parser.compute_bias(&trial, &[]))).map_err(|_| MatchError::Failed)?;
    if let Some(error) = parser.get_error() {
        return Err(MatchError::TooComplex(error.message().lines().next().unwrap_or_default().to_owned()));
    }
    trial.found.into_inner().ok_or(MatchError::Failed)
}

/// Reads a text of a call, and can take back its last bytes.
struct InputReader<'a, 'b, 'c> {
    form: &'a CallForm,
    /// The steps before each byte, and the number of bytes that the parser had then.
    steps: Vec<(CallStep, usize)>,
    text: ParserText<'b, 'c>,
}

/// The bytes that were given to the parser on trial.
struct ParserText<'b, 'c> {
    recognizer: &'b mut ParserRecognizer<'c>,
    pushed: Vec<u8>,
}

impl Text for ParserText<'_, '_> {
    fn push(&mut self, byte: u8) -> bool {
        // `END` and a special token's marker are no text.
        let is_allowed = byte < END && self.recognizer.try_push_byte(byte);
        if is_allowed {
            self.pushed.push(byte);
        }
        is_allowed
    }

    fn allows(&mut self, byte: u8) -> bool {
        self.recognizer.byte_allowed(byte)
    }

    fn is_complete(&mut self) -> bool {
        self.allows(END)
    }
}

impl<'a, 'b, 'c> InputReader<'a, 'b, 'c> {
    fn new(form: &'a CallForm, step: CallStep, recognizer: &'b mut ParserRecognizer<'c>) -> Self {
        Self { form, steps: vec![(step, 0)], text: ParserText { recognizer, pushed: Vec::new() } }
    }

    fn step(&self) -> CallStep {
        self.steps.last().map_or(CallStep::Done, |(step, _)| *step)
    }

    fn take_back(&mut self, len: usize) {
        self.text.recognizer.pop_bytes(self.text.pushed.len() - len);
        self.text.pushed.truncate(len);
    }
}

impl Recognizer for InputReader<'_, '_, '_> {
    fn pop_bytes(&mut self, num: usize) {
        self.steps.truncate(self.steps.len() - num);
        self.take_back(self.steps.last().map_or(0, |(_, len)| *len));
    }

    fn collapse(&mut self) {}

    fn trie_started(&mut self, label: &str) {
        self.text.recognizer.trie_started(label);
    }

    fn trie_finished(&mut self) {
        self.text.recognizer.trie_finished();
    }

    fn try_push_byte(&mut self, byte: u8) -> bool {
        let before = self.text.pushed.len();
        let next = self.step().after(self.form, byte, &mut self.text);
        match next {
            Some(next) => self.steps.push((next, self.text.pushed.len())),
            None => self.take_back(before),
        }
        next.is_some()
    }
}
