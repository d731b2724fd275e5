//! Converts grammars in EBNF to Lark. The supported forms of EBNF are llama.cpp's GBNF, and the variants of vLLM and SGLang.
//!
//! Each character becomes a lexeme of its own, because a lexeme of several characters may hide another way to parse the same text.

use crate::{GrammarError, rules::RULES_MAX};
use std::fmt::Write;

/// Returns whether a grammar is in EBNF rather than in Lark.
pub fn is_ebnf(grammar: &str) -> bool {
    grammar.contains("::=")
}

pub(crate) fn to_lark(grammar: &str) -> Result<String, GrammarError> {
    let mut parser = Parser { text: grammar.as_bytes(), at: 0, names: Vec::new(), defined: Vec::new(), depth: 0 };
    let mut lark = String::new();
    parser.skip();
    while parser.at < parser.text.len() {
        parser.rule(&mut lark)?;
    }
    let undefined = parser.names.iter().find(|name| !parser.defined.contains(name));
    match undefined {
        Some(name) => Err(GrammarError::invalid(format!("the rule '{name}' is not defined"))),
        None if !parser.defined.iter().any(|name| name == START) => {
            Err(GrammarError::invalid("the rule 'root', with which a text begins, is not defined"))
        }
        None => Ok(lark),
    }
}

/// The name of the start rule.
const START: &str = "root";
/// Maximum number of levels of nested groups.
const DEPTH_MAX: usize = 64;

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
    names: Vec<String>,
    defined: Vec<String>,
    depth: usize,
}

impl Parser<'_> {
    fn rule(&mut self, lark: &mut String) -> Result<(), GrammarError> {
        let name = self.name().ok_or_else(|| self.error("a rule's name"))?;
        self.skip();
        if !self.text[self.at..].starts_with(b"::=") {
            return Err(self.error("'::='"));
        }
        self.at += 3;
        self.skip();
        if self.defined.contains(&name) {
            return Err(GrammarError::invalid(format!("the rule '{name}' is defined twice")));
        }
        if self.names.len() > RULES_MAX {
            return Err(GrammarError::TooLarge { found: self.names.len(), max: RULES_MAX, unit: "rules" });
        }
        let number = self.number(&name);
        self.defined.push(name);
        let body = self.alternatives(false)?;
        let _ = writeln!(lark, "{number}: {body}");
        if self.at < self.text.len() && !self.begins_rule() {
            return Err(self.error("an element, or the beginning of the next rule"));
        }
        Ok(())
    }

    fn number(&mut self, name: &str) -> String {
        if name == START && !self.names.iter().any(|other| other == START) {
            self.names.push(name.to_owned());
        }
        let index = self.names.iter().position(|other| other == name).unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        if name == START { "start".to_owned() } else { format!("rule_{index}") }
    }

    fn alternatives(&mut self, in_group: bool) -> Result<String, GrammarError> {
        let mut all = String::new();
        loop {
            let mut elements = 0;
            loop {
                self.skip();
                match self.text.get(self.at) {
                    None | Some(b'|' | b')') => break,
                    Some(_) if !in_group && self.begins_rule() => break,
                    Some(_) => {}
                }
                let element = self.element()?;
                all.push_str(&element);
                all.push(' ');
                elements += 1;
            }
            if elements == 0 {
                all.push_str("\"\" ");
            }
            if self.text.get(self.at) != Some(&b'|') {
                return Ok(all);
            }
            self.at += 1;
            all.push_str("| ");
        }
    }

    fn element(&mut self) -> Result<String, GrammarError> {
        let item = match self.text[self.at] {
            b'"' => self.literal()?,
            b'[' => self.class()?,
            b'.' => {
                self.at += 1;
                r"/(.|\n)/".to_owned()
            }
            b'(' => {
                self.at += 1;
                self.depth += 1;
                if self.depth > DEPTH_MAX {
                    return Err(GrammarError::TooLarge { found: self.depth, max: DEPTH_MAX, unit: "nested groups" });
                }
                let group = self.alternatives(true)?;
                self.depth -= 1;
                if self.text.get(self.at) != Some(&b')') {
                    return Err(self.error("')'"));
                }
                self.at += 1;
                format!("({group})")
            }
            _ => {
                let name = self.name().ok_or_else(|| self.error("a text, a class, a group or a rule's name"))?;
                self.number(&name)
            }
        };
        self.repeated(item)
    }

    fn repeated(&mut self, mut item: String) -> Result<String, GrammarError> {
        while let Some(symbol @ (b'*' | b'+' | b'?' | b'{')) = self.text.get(self.at).copied() {
            self.at += 1;
            if symbol != b'{' {
                item = format!("({item}){}", char::from(symbol));
                continue;
            }
            let end = self.text[self.at..].iter().position(|byte| *byte == b'}').ok_or_else(|| self.error("'}'"))?;
            let range: String = String::from_utf8_lossy(&self.text[self.at..][..end]).split_whitespace().collect();
            let numbers: Vec<&str> = range.split(',').collect();
            let is_number = |text: &&str| !text.is_empty() && text.len() < 6 && text.bytes().all(|byte| byte.is_ascii_digit());
            let valid = match numbers[..] {
                [count] => is_number(&count),
                [least, most] => is_number(&least) && (most.is_empty() || is_number(&most)),
                _ => false,
            };
            if !valid {
                return Err(self.error("a repetition like '{2}', '{2,}' or '{2,5}'"));
            }
            self.at += end + 1;
            item = format!("({item}){{{range}}}");
        }
        Ok(item)
    }

    fn literal(&mut self) -> Result<String, GrammarError> {
        self.at += 1;
        let mut characters = Vec::new();
        loop {
            match self.text.get(self.at) {
                None => return Err(self.error("'\"'")),
                Some(b'"') => break,
                Some(_) => characters.push(format!("/{}/", escaped(self.character()?))),
            }
        }
        self.at += 1;
        Ok(match characters.len() {
            0 => "\"\"".to_owned(),
            1 => characters.remove(0),
            _ => format!("({})", characters.join(" ")),
        })
    }

    fn class(&mut self) -> Result<String, GrammarError> {
        self.at += 1;
        let mut class = String::from("/[");
        if self.text.get(self.at) == Some(&b'^') {
            self.at += 1;
            class.push('^');
        }
        let start = class.len();
        loop {
            match self.text.get(self.at) {
                None => return Err(self.error("']'")),
                Some(b']') => break,
                Some(b'-') if class.len() > start && self.text.get(self.at + 1).is_some_and(|next| *next != b']') => {
                    self.at += 1;
                    class.push('-');
                }
                Some(_) => class.push_str(&escaped(self.character()?)),
            }
        }
        self.at += 1;
        match class.as_str() {
            "/[" => Err(self.error("at least one character in the class before this")),
            "/[^" => Ok(r"/(.|\n)/".to_owned()),
            _ => Ok(class + "]/"),
        }
    }

    fn character(&mut self) -> Result<char, GrammarError> {
        let rest = std::str::from_utf8(&self.text[self.at..]).unwrap_or_default();
        let mut characters = rest.chars();
        let first = characters.next().ok_or_else(|| self.error("a character"))?;
        self.at += first.len_utf8();
        if first != '\\' {
            return Ok(first);
        }
        let escape = characters.next().ok_or_else(|| self.error("an escaped character"))?;
        self.at += escape.len_utf8();
        let digits = match escape {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => return Ok(other),
        };
        let code = rest.get(2..2 + digits).and_then(|code| u32::from_str_radix(code, 16).ok()).and_then(char::from_u32);
        self.at += digits;
        code.ok_or_else(|| self.error("the hexadecimal code of a character before this"))
    }

    fn name(&mut self) -> Option<String> {
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        let len = self.text[self.at..].iter().take_while(|byte| is_name(byte)).count();
        let name = String::from_utf8_lossy(&self.text[self.at..][..len]).into_owned();
        self.at += len;
        (len > 0).then_some(name)
    }

    fn begins_rule(&self) -> bool {
        let mut ahead = Parser { text: self.text, at: self.at, names: Vec::new(), defined: Vec::new(), depth: 0 };
        let named = ahead.name().is_some();
        ahead.skip();
        named && ahead.text[ahead.at..].starts_with(b"::=")
    }

    fn skip(&mut self) {
        while let Some(byte) = self.text.get(self.at) {
            match byte {
                b'#' => self.at += self.text[self.at..].iter().take_while(|byte| **byte != b'\n').count(),
                byte if byte.is_ascii_whitespace() => self.at += 1,
                _ => return,
            }
        }
    }

    fn error(&self, expected: &str) -> GrammarError {
        let line = self.text[..self.at.min(self.text.len())].iter().filter(|byte| **byte == b'\n').count() + 1;
        GrammarError::invalid(format!("line {line} of the grammar: expected {expected}"))
    }
}

/// Returns a character in the form in which regular expressions have it, inside or outside a class.
fn escaped(character: char) -> String {
    if character.is_ascii_alphanumeric() { character.into() } else { format!(r"\x{{{:x}}}", u32::from(character)) }
}
