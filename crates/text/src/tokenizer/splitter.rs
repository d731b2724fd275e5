//! Splits a text into words, in the way of the pre-tokenizers of byte-level vocabularies, without a record of where each word was.

use regex_automata::{
    Anchored, Input,
    meta::{Cache, Regex},
    util::pool::Pool,
};
use regex_syntax::ast::{self, Ast, parse::Parser};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior, pre_tokenizers::split::SplitPattern};

/// The last alternatives of most pre-tokenizers' patterns: the white space before a word, except its last character, is a word of its own.
const SPACES: &str = r"|\s+(?!\S)|\s+";
/// The pattern of `ByteLevel` with `use_regex`.
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The steps of a pre-tokenizer. Each splits the parts that the steps before it have left.
pub(super) struct Splitter(Vec<SplitStep>);

enum SplitStep {
    /// Each match is a part, and so is the text between two matches.
    Pattern(Box<Pattern>),
    /// Each numeric character is a part, and so is the text between two of them.
    Digits,
}

struct Pattern {
    /// The pattern without [`SPACES`] and, if it had them, the second pattern `\s+`.
    regex: Regex,
    caches: Pool<Cache, Box<dyn Fn() -> Cache + Send + Sync + std::panic::UnwindSafe + std::panic::RefUnwindSafe>>,
}

impl Splitter {
    /// Returns the splitter that does the same as this pre-tokenizer of a byte-level vocabulary; `None` if there is none.
    pub(super) fn of(pre_tokenizer: &PreTokenizerWrapper) -> Option<Self> {
        let single = std::slice::from_ref(pre_tokenizer);
        let parts = if let PreTokenizerWrapper::Sequence(parts) = pre_tokenizer { parts.as_ref() } else { single };
        let (PreTokenizerWrapper::ByteLevel(last), others) = parts.split_last()? else { return None };
        let mut steps = others.iter().map(SplitStep::of).collect::<Option<Vec<_>>>()?;
        if last.use_regex {
            steps.push(SplitStep::Pattern(Box::new(Pattern::new(GPT_2)?)));
        }
        (!last.add_prefix_space).then_some(Self(steps))
    }

    /// Calls `word` with each word of the text.
    pub(super) fn split<'a>(&self, text: &'a str, word: &mut impl FnMut(&'a str)) {
        split(&self.0, text, word);
    }
}

fn split<'a>(steps: &[SplitStep], text: &'a str, word: &mut impl FnMut(&'a str)) {
    match steps.split_first() {
        _ if text.is_empty() => {}
        None => word(text),
        Some((SplitStep::Pattern(pattern), rest)) => pattern.split(text, &mut |part| split(rest, part, word)),
        Some((SplitStep::Digits, rest)) => {
            let mut last = 0;
            for (start, digit) in text.match_indices(char::is_numeric) {
                split(rest, &text[last..start], word);
                split(rest, digit, word);
                last = start + digit.len();
            }
            split(rest, &text[last..], word);
        }
    }
}

impl SplitStep {
    fn of(pre_tokenizer: &PreTokenizerWrapper) -> Option<Self> {
        match pre_tokenizer {
            PreTokenizerWrapper::Digits(digits) => digits.individual_digits.then_some(Self::Digits),
            PreTokenizerWrapper::Split(split) if split.behavior == SplitDelimiterBehavior::Isolated && !split.invert => {
                let SplitPattern::Regex(pattern) = &split.pattern else { return None };
                Pattern::new(pattern).map(|pattern| Self::Pattern(Box::new(pattern)))
            }
            _ => None,
        }
    }
}

impl Pattern {
    /// Returns `None` if the pattern may mean something else to this engine, which has neither look-around nor possessive repetitions.
    fn new(pattern: &str) -> Option<Self> {
        let (head, has_spaces) = pattern.strip_suffix(SPACES).map_or((pattern, false), |head| (head, true));
        let ast = Parser::new().parse(head).ok()?;
        ast::visit(&ast, NoNestedRepetition).ok()?;
        if regex_syntax::parse(head).ok()?.properties().minimum_len() == Some(0) {
            return None;
        }
        let patterns: &[&str] = if has_spaces { &[head, r"\s+"] } else { &[head] };
        let regex = Regex::new_many(patterns).ok()?;
        let caches = regex.clone();
        Some(Self { regex, caches: Pool::new(Box::new(move || caches.create_cache())) })
    }

    fn split<'a>(&self, text: &'a str, part: &mut impl FnMut(&'a str)) {
        let mut cache = self.caches.get();
        let mut last = 0;
        // Most patterns match at every position, and a search that is anchored at its start is cheaper.
        let mut anchored = Anchored::Yes;
        let mut at = 0;
        while at < text.len() {
            let input = Input::new(text).range(at..).anchored(anchored);
            let Some(found) = self.regex.search_with(&mut cache, &input) else {
                if anchored == Anchored::No {
                    break;
                }
                anchored = Anchored::No;
                continue;
            };
            anchored = Anchored::Yes;
            at = found.end();
            if found.pattern().as_usize() == 1 && at < text.len() {
                // The last white space before a word belongs to the word, unless it is the only one.
                let space = text[found.range()].char_indices().next_back().map_or(0, |(space, _)| space);
                at = if space > 0 { found.start() + space } else { at };
            }
            part(&text[last..found.start()]);
            part(&text[found.start()..at]);
            last = at;
        }
        part(&text[last..]);
    }
}

/// Refuses a repetition of a repetition: in the library's syntax, `a++` is possessive.
struct NoNestedRepetition;

impl ast::Visitor for NoNestedRepetition {
    type Output = ();
    type Err = ();

    fn finish(self) -> Result<(), ()> {
        Ok(())
    }

    fn visit_pre(&mut self, ast: &Ast) -> Result<(), ()> {
        match ast {
            Ast::Repetition(outer) if matches!(*outer.ast, Ast::Repetition(_)) => Err(()),
            _ => Ok(()),
        }
    }
}
