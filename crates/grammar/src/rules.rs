//! Bounds grammars in Lark before llguidance sees them, because it follows rules and terminals by recursion.

use crate::{GrammarError, lark::UnenforcedKeywords, schema};
use serde_json::Value;
use std::collections::HashMap;

/// Maximum number of rules and terminals of a grammar.
pub(crate) const RULES_MAX: usize = 4_096;
/// Maximum length of a chain of rules or terminals that refer to each other.
pub(crate) const CHAIN_MAX: usize = 256;
/// The name of the rule with which a text begins.
const START: &str = "start";

/// Checks the number of rules and the longest chain of references between them, and the JSON schemas within the grammar.
pub(crate) fn check(lark: &str) -> Result<(), GrammarError> {
    let mut reader = LexemeReader { text: lark, at: 0 };
    let mut numbers = HashMap::new();
    // The references of each name, in the order of the text, and whether the name is defined.
    let mut references: Vec<(&str, Vec<usize>)> = Vec::new();
    let (mut begins_line, mut rule) = (true, None);
    // The number of open parentheses and brackets within each open brace. A nested grammar in braces has lines of its own.
    let mut open = vec![0_usize];
    while let Some(lexeme) = reader.next()? {
        match lexeme {
            Lexeme::Line => begins_line = open.last().is_none_or(|depth| *depth == 0),
            Lexeme::Open | Lexeme::Close => {
                if let Some(depth) = open.last_mut() {
                    *depth = if matches!(lexeme, Lexeme::Open) { *depth + 1 } else { depth.saturating_sub(1) };
                }
            }
            Lexeme::OpenBrace => {
                open.push(0);
                begins_line = true;
            }
            Lexeme::CloseBrace => drop(open.pop()),
            Lexeme::Name(name) => {
                let number = *numbers.entry(name).or_insert_with(|| {
                    references.push((name, Vec::new()));
                    references.len() - 1
                });
                match rule {
                    _ if begins_line => rule = Some(number),
                    Some(rule) => references[rule].1.push(number),
                    None => {}
                }
                begins_line = false;
            }
            Lexeme::SpecialToken(_) | Lexeme::Other => begins_line = false,
        }
        if references.len() > RULES_MAX {
            return Err(GrammarError::TooLarge { found: references.len(), max: RULES_MAX, unit: "rules and terminals" });
        }
    }
    let Some(start) = numbers.get(START) else { return Ok(()) };
    check_chains(&references, *start)
}

/// Returns the first special token that the grammar names, with its angle brackets.
pub(crate) fn special_token(lark: &str) -> Result<Option<&str>, GrammarError> {
    let mut reader = LexemeReader { text: lark, at: 0 };
    while let Some(lexeme) = reader.next()? {
        if let Lexeme::SpecialToken(name) = lexeme {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Follows all references in the order in which llguidance does, each name once.
fn check_chains(references: &[(&str, Vec<usize>)], start: usize) -> Result<(), GrammarError> {
    let mut seen = vec![false; references.len()];
    seen[start] = true;
    // The rules from the start to the current one, each with the number of its references that were followed.
    let mut chain = vec![(start, 0)];
    while let Some((rule, next)) = chain.last_mut() {
        let Some(reference) = references[*rule].1.get(*next).copied() else {
            chain.pop();
            continue;
        };
        *next += 1;
        if !std::mem::replace(&mut seen[reference], true) {
            chain.push((reference, 0));
        }
        if chain.len() > CHAIN_MAX {
            let name = references[reference].0;
            return Err(GrammarError::invalid(format!(
                "the chain of references from '{START}' to '{name}' is longer than the limit of {CHAIN_MAX} rules"
            )));
        }
    }
    Ok(())
}

enum Lexeme<'a> {
    /// The end of a line.
    Line,
    Name(&'a str),
    /// A special token, with its angle brackets.
    SpecialToken(&'a str),
    /// An opening parenthesis or bracket.
    Open,
    /// A closing parenthesis or bracket.
    Close,
    OpenBrace,
    CloseBrace,
    /// Anything else that is not white space.
    Other,
}

struct LexemeReader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> LexemeReader<'a> {
    fn next(&mut self) -> Result<Option<Lexeme<'a>>, GrammarError> {
        let rest = &self.text[self.at..];
        let Some(first) = rest.bytes().next() else { return Ok(None) };
        let (len, lexeme) = match first {
            b'\n' => (1, Lexeme::Line),
            b' ' | b'\t' | b'\r' => {
                self.at += 1;
                return self.next_after_space();
            }
            b'"' => (quoted(rest, b'"'), Lexeme::Other),
            b'/' if rest.starts_with("//") => (rest.find('\n').unwrap_or(rest.len()), Lexeme::Other),
            b'/' => (quoted(rest, b'/'), Lexeme::Other),
            b'<' => {
                let len = rest.find('>').map_or(rest.len(), |end| end + 1);
                (len, Lexeme::SpecialToken(&rest[..len]))
            }
            b'(' | b'[' => (1, Lexeme::Open),
            b')' | b']' => (1, Lexeme::Close),
            b'{' => (1, Lexeme::OpenBrace),
            b'}' => (1, Lexeme::CloseBrace),
            b'%' => return self.directive().map(Some),
            b'_' | b'a'..=b'z' | b'A'..=b'Z' => {
                let len = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-').unwrap_or(rest.len());
                (len, Lexeme::Name(&rest[..len]))
            }
            _ => (rest.chars().next().map_or(1, char::len_utf8), Lexeme::Other),
        };
        self.at += len;
        Ok(Some(lexeme))
    }

    fn next_after_space(&mut self) -> Result<Option<Lexeme<'a>>, GrammarError> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\r']).len();
        self.next()
    }

    /// Reads a directive, such as `%ignore`, with the JSON that some of them have.
    fn directive(&mut self) -> Result<Lexeme<'a>, GrammarError> {
        let rest = &self.text[self.at + 1..];
        let len = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        self.at += 1 + len;
        if let name @ ("json" | "regex" | "llguidance") = &rest[..len] {
            let mut values = serde_json::Deserializer::from_str(&rest[len..]).into_iter::<Value>();
            if let Some(value) = values.next() {
                let value = value.map_err(|error| GrammarError::invalid(format!("after '%{name}': {error}")))?;
                self.at += values.byte_offset();
                if name == "json" {
                    schema::bounded(value, UnenforcedKeywords::Refused)?;
                }
            }
        }
        Ok(Lexeme::Other)
    }
}

/// Returns the length of a text in quotes, with the quotes.
fn quoted(text: &str, quote: u8) -> usize {
    let mut escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let ends = byte == quote && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}
