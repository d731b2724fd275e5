//! Constrains the inputs of tools within an answer that is free otherwise.
//!
//! A text is read byte by byte. Where it has begun a call of one of the tools, the next bytes are those of the format up to the input, the input, which
//! a parser checks after its encoding is undone, and those that end the call. Everything else is free, and costs no mask.

use crate::{
    CallInput, GrammarError, MatchError,
    input_steps::{Form, Parts, Step, Text},
    matcher::{Mask, SharedTrie},
};
use llguidance::{
    TokenParser,
    earley::{BiasComputer, ParserRecognizer},
    toktrie::{ApproximateTokEnv, Recognizer, SimpleVob, TokTrie, TokenizerEnv},
};
use std::sync::{Arc, Mutex, PoisonError};
use tandem_kv::TokenId;

/// The byte that ends an input for its parser. No UTF-8 text has it.
pub(crate) const END: u8 = 0xFE;
/// The rules around the grammar `input`.
pub(crate) const OUTER: &str = "start: @input END\nEND: /(?-u:\\xFE)/\n";

/// The state of a text with inputs of tools.
#[derive(Clone)]
pub(crate) struct Inputs {
    shared: Arc<SharedInputs>,
    state: State,
}

struct SharedInputs {
    places: Vec<Place>,
    /// Each input's parser before its first byte.
    parsers: Vec<Mutex<TokenParser>>,
    trie: Arc<SharedTrie>,
    /// The tokens of the parsers: each byte is one.
    bytes: Arc<ApproximateTokEnv>,
    /// The tokens that have the last byte of a beginning before their own last byte, so that they can complete a beginning and continue.
    crossing: Vec<TokenId>,
}

/// A way to write the call of a tool.
struct Place {
    input: usize,
    begin: Vec<Vec<u8>>,
    form: Form,
}

#[derive(Clone)]
enum State {
    /// The beginnings that the end of the text may continue, each with its place and its progress.
    Free(Vec<(usize, Parts)>),
    Call {
        place: usize,
        step: Step,
        parser: Box<TokenParser>,
    },
}

impl Inputs {
    /// Returns the state of an empty text. `parsers` has a parser for each input.
    pub fn new(
        inputs: &[CallInput],
        parsers: Vec<TokenParser>,
        trie: Arc<SharedTrie>,
        bytes: Arc<ApproximateTokEnv>,
    ) -> Result<Self, GrammarError> {
        let mut places = Vec::new();
        for (input, of_input) in inputs.iter().enumerate() {
            for place in &of_input.places {
                let is_valid =
                    [place.begin.first(), place.begin.last()].iter().all(|part| part.is_some_and(|part| !part.is_empty()))
                        && !place.head.is_empty()
                        && place.end.as_ref().is_none_or(|end| !end.is_empty());
                if !is_valid {
                    return Err(GrammarError::invalid("a tool's input needs texts before it and a text that ends it"));
                }
                let bytes = |parts: &[String]| parts.iter().map(|part| part.clone().into_bytes()).collect::<Vec<_>>();
                let end = place.end.as_ref().map(|end| end.clone().into_bytes());
                places.push(Place {
                    input,
                    begin: bytes(&place.begin),
                    form: Form { head: bytes(&place.head), end, tail: bytes(&place.tail) },
                });
            }
        }
        let started = |mut parser: TokenParser| {
            parser.start_without_prompt();
            Mutex::new(parser)
        };
        let parsers: Vec<_> = parsers.into_iter().map(started).collect();
        let lasts: Vec<u8> = places.iter().filter_map(|place| place.begin.last()?.last().copied()).collect();
        let crosses = |token: &TokenId| {
            let text = trie.trie.tok_trie().token(*token);
            text[..text.len().saturating_sub(1)].iter().any(|byte| lasts.contains(byte))
        };
        let crossing = (0..trie.trie.tok_trie().vocab_size() as TokenId).filter(crosses).collect();
        let mut new =
            Self { shared: Arc::new(SharedInputs { places, parsers, trie, bytes, crossing }), state: State::Free(Vec::new()) };
        // The first mask of each input shows whether any text meets its grammar.
        for place in 0..new.shared.places.len() {
            new.state = new.shared.call(place);
            if let State::Call { place, step, .. } = &mut new.state {
                *step = new.shared.places[*place].form.input();
            }
            new.mask().map_err(GrammarError::invalid)?;
        }
        new.state = State::Free(Vec::new());
        Ok(new)
    }

    /// Returns the tokens of the text.
    pub fn trie(&self) -> Arc<SharedTrie> {
        Arc::clone(&self.shared.trie)
    }

    /// Returns the tokens that are allowed next; `None` if all tokens are.
    pub fn mask(&mut self) -> Result<Option<Mask>, MatchError> {
        let size = self.shared.trie.trie.tok_trie().vocab_size();
        match &mut self.state {
            State::Call { place, step, parser } => {
                let form = &self.shared.places[*place].form;
                let trie = self.shared.trie.trie.tok_trie();
                let allowed = on_trial(parser, self.shared.bytes.tok_trie(), |recognizer| {
                    let mut found = trie.alloc_token_set();
                    trie.add_bias(&mut InputReader::new(form, *step, recognizer), &mut found, &[]);
                    found
                })?;
                let mask = Mask::from_words(&allowed.as_slice()[..size.div_ceil(32)]);
                if mask.is_empty() { Err(MatchError::NoToken) } else { Ok(Some(mask)) }
            }
            State::Free(begun) => {
                let missing = |place: &Place| place.begin.iter().map(Vec::len).sum::<usize>();
                let least = self.shared.places.iter().map(missing);
                let left = begun.iter().map(|(place, parts)| parts.missing(&self.shared.places[*place].begin));
                let least = least.chain(left).min().unwrap_or_default();
                let begun = begun.clone();
                let mut mask = None;
                for token in &self.shared.crossing {
                    let text = self.shared.trie.trie.tok_trie().token(*token);
                    if text.len() <= least {
                        continue;
                    }
                    let mut begun = begun.clone();
                    if let Some((place, at)) = self.shared.find(&mut begun, text)
                        && at < text.len()
                        && self.shared.call(place).after(&self.shared, &text[at..]).is_err()
                    {
                        mask.get_or_insert_with(|| Mask::all(size)).forbid(*token);
                    }
                }
                Ok(mask)
            }
        }
    }

    /// Appends a token to the text.
    pub fn accept(&mut self, token: TokenId) -> Result<(), MatchError> {
        let shared = Arc::clone(&self.shared);
        // The marker of a special token is a part of its text for a call, so that no other text stands for it.
        let text = shared.trie.trie.tok_trie().token(token);
        let state = std::mem::replace(&mut self.state, State::Free(Vec::new()));
        self.state = state.after(&shared, text)?;
        Ok(())
    }
}

impl SharedInputs {
    fn call(&self, place: usize) -> State {
        let input = self.places[place].input;
        let parser = self.parsers[input].lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        State::Call { place, step: Step::Head(Parts::default()), parser: Box::new(parser) }
    }

    /// Adds a free text to the beginnings of calls. Returns the place whose beginning it completes first, and the number of bytes up to there.
    fn find(&self, begun: &mut Vec<(usize, Parts)>, text: &[u8]) -> Option<(usize, usize)> {
        for (at, byte) in text.iter().enumerate() {
            let new = (0..self.places.len()).map(|place| (place, Parts::default()));
            let next = begun
                .drain(..)
                .chain(new)
                .filter_map(|(place, parts)| Some((place, parts.after(&self.places[place].begin, *byte)?)));
            let next = next.filter(|(_, parts)| parts.has_begun());
            let mut next: Vec<_> = next.collect();
            next.sort_unstable();
            next.dedup();
            if let Some((place, _)) = next.iter().find(|(place, parts)| parts.is_complete(&self.places[*place].begin)) {
                return Some((*place, at + 1));
            }
            *begun = next;
        }
        None
    }
}

impl State {
    /// Returns the state after a text.
    fn after(mut self, shared: &SharedInputs, mut text: &[u8]) -> Result<Self, MatchError> {
        loop {
            match &mut self {
                Self::Free(begun) => {
                    let Some((place, at)) = shared.find(begun, text) else { return Ok(self) };
                    text = &text[at..];
                    self = shared.call(place);
                }
                Self::Call { place, step, parser } => {
                    let form = &shared.places[*place].form;
                    let (next, read, pushed) = on_trial(parser, shared.bytes.tok_trie(), |recognizer| {
                        let mut reader = InputReader::new(form, *step, recognizer);
                        reader.trie_started("input");
                        let read = text.iter().take_while(|byte| !reader.is_done() && reader.try_push_byte(**byte)).count();
                        let (next, pushed) = (reader.step(), reader.text.pushed.clone());
                        reader.pop_bytes(read);
                        reader.trie_finished();
                        (next, read, pushed)
                    })?;
                    for byte in pushed {
                        parser.consume_token(byte.into()).map_err(|_| MatchError::NotAllowed)?;
                    }
                    *step = next;
                    text = &text[read..];
                    match next {
                        Step::Done => self = Self::Free(Vec::new()),
                        _ if text.is_empty() => return Ok(self),
                        _ => return Err(MatchError::NotAllowed),
                    }
                }
            }
        }
    }
}

/// Calls `work` with the parser, which may be given bytes on trial, within the limits of the work for one token.
fn on_trial<T: Send>(
    parser: &mut TokenParser,
    bytes: &TokTrie,
    work: impl FnOnce(&mut ParserRecognizer<'_>) -> T + Send,
) -> Result<T, MatchError> {
    struct Trial<'a, W, T> {
        work: Mutex<Option<W>>,
        found: Mutex<Option<T>>,
        bytes: &'a TokTrie,
    }

    impl<T: Send, W: FnOnce(&mut ParserRecognizer<'_>) -> T + Send> BiasComputer for Trial<'_, W, T> {
        fn compute_bias(&self, recognizer: &mut ParserRecognizer<'_>, _: &[u8]) -> SimpleVob {
            let work = self.work.lock().unwrap_or_else(PoisonError::into_inner).take();
            *self.found.lock().unwrap_or_else(PoisonError::into_inner) = work.map(|work| work(recognizer));
            self.bytes.alloc_token_set()
        }

        fn trie(&self) -> &TokTrie {
            self.bytes
        }
    }

    let trial = Trial { work: Mutex::new(Some(work)), found: Mutex::new(None), bytes };
    parser.parser.invalidate_bias_cache();
    parser.parser.compute_bias(&trial, &[]);
    if let Some(error) = parser.parser.get_error() {
        return Err(MatchError::TooComplex(error.message().lines().next().unwrap_or_default().to_owned()));
    }
    trial.found.into_inner().unwrap_or_else(PoisonError::into_inner).ok_or(MatchError::NoToken)
}

/// Reads a text of a call, and can take back its last bytes.
struct InputReader<'a, 'b, 'c> {
    form: &'a Form,
    /// The steps before each byte, and the number of bytes that the parser had then.
    steps: Vec<(Step, usize)>,
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
        let allowed = byte < 0xF8 && self.recognizer.try_push_byte(byte);
        if allowed {
            self.pushed.push(byte);
        }
        allowed
    }

    fn is_complete(&mut self) -> bool {
        let complete = self.recognizer.try_push_byte(END);
        if complete {
            self.recognizer.pop_bytes(1);
        }
        complete
    }
}

impl<'a, 'b, 'c> InputReader<'a, 'b, 'c> {
    fn new(form: &'a Form, step: Step, recognizer: &'b mut ParserRecognizer<'c>) -> Self {
        Self { form, steps: vec![(step, 0)], text: ParserText { recognizer, pushed: Vec::new() } }
    }

    fn step(&self) -> Step {
        self.steps.last().map_or(Step::Done, |(step, _)| *step)
    }

    fn is_done(&self) -> bool {
        self.step() == Step::Done
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
