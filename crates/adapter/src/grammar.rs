//! Grammars that are sent to engines.

use serde_json::Value;

/// Returns a grammar in EBNF, as llama.cpp and SGLang read it, whose sentences are these texts.
pub(crate) fn choice(texts: &[String]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
    format!("root ::= {}", texts.join(" | "))
}
