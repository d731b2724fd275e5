//! Measures the cost of a constraint before the first token: the time to compile each of the 200 schemas, and to compute its first mask. Then
//! the cost of each mask in a call of a custom tool whose input has a grammar.
//!
//!     TANDEM_MODEL=$(tandem model fetch | tail -1) cargo bench -p tandem-tests --bench constraints
#![expect(clippy::print_stdout, reason = "the figures are the benchmark's output")]

use anyhow::{Result, ensure};
use std::{path::Path, time::Duration};
use tandem_grammar::{CallInput, Constraint, InputPlace, Kind, Vocabulary};
use tandem_kv::TokenId;
use tandem_model::Gguf;
use tandem_tests::schemas;
use tandem_text::{ServedModel, Special};
use tokio::time::Instant;

/// The grammar of patches, in which the text of a line is free.
const PATCH: &str = r#"
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Add File: " /[^\n]+/ LF add+
add: "+" /[^\n]*/ LF
%import common.LF
"#;
/// A short text, and a call that adds a file.
const CALL: &str = r#"I add the file.
<tool_call>
{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\n*** Add File: src/main.rs\n+fn main() {\n+    println!(\"Hello\");\n+}\n*** End Patch\n"}}
</tool_call>"#;

fn main() -> Result<()> {
    let constraints: Vec<Constraint> = schemas::all()
        .iter()
        .map(|schema| Kind::JsonSchema { schema: schema.schema.to_string(), lenient: false }.into())
        .collect();
    measure("the frontend's check (bytes)", Vocabulary::bytes(), &constraints)?;
    if let Ok(path) = std::env::var("TANDEM_MODEL") {
        let tokenizer = ServedModel::from_gguf("m", "r", &Gguf::open(Path::new(&path))?)?.tokenizer;
        let vocabulary = Vocabulary::new(tokenizer.tokens(), tokenizer.vocab_size());
        measure(&format!("the worker ({} tokens)", tokenizer.vocab_size()), &vocabulary, &constraints)?;
        measure_call(&vocabulary, &tokenizer.encode(CALL, Special::Text)?)?;
    }
    Ok(())
}

/// Computes the masks before each token of a call.
fn measure_call(vocabulary: &Vocabulary, call: &[TokenId]) -> Result<()> {
    let head = [",", "\"arguments\"", ":", "{", "\"input\"", ":", "\""];
    let place = InputPlace::new(&["<tool_call>", "{", "\"name\"", ":", "\"apply_patch\""], &head, None, &["}", "}"]);
    let input = CallInput { places: vec![place], kind: Kind::Grammar(PATCH.to_owned()) };
    let mut matcher = vocabulary.compile(&Kind::CallInputs(vec![input]).into(), &[])?;
    let (mut free, mut within) = (Vec::new(), Vec::new());
    for token in call {
        let started = Instant::now();
        let mask = matcher.mask()?;
        let times = if mask.is_some() { &mut within } else { &mut free };
        times.push(started.elapsed());
        ensure!(mask.is_none_or(|mask| mask.allows(*token)), "the call does not meet the grammar");
        matcher.accept(*token)?;
    }
    println!("a call of a custom tool with a grammar: {} tokens", call.len());
    print_times("free text", free);
    print_times("in the call", within);
    Ok(())
}

fn print_times(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: usize| ms(times[(times.len() - 1) * share / 100]);
    println!("  {what:<11} median {}, 90% {}, 99% {}, longest {}", at(50), at(90), at(99), at(100));
}

/// Compiles all constraints, after the first one has built the vocabulary's tables.
fn measure(name: &str, vocabulary: &Vocabulary, constraints: &[Constraint]) -> Result<()> {
    let started = Instant::now();
    vocabulary.compile(&constraints[0], &[])?;
    let tables = started.elapsed();
    let (mut compiled, mut masks) = (Vec::new(), Vec::new());
    for constraint in constraints {
        let started = Instant::now();
        let mut matcher = vocabulary.compile(constraint, &[])?;
        compiled.push(started.elapsed());
        let started = Instant::now();
        ensure!(matcher.mask()?.is_some(), "the schema does not constrain the first token");
        masks.push(started.elapsed());
    }
    println!("{name}: {} schemas; first one with the tables of the vocabulary {}", constraints.len(), ms(tables));
    print_times("compile", compiled);
    print_times("first mask", masks);
    Ok(())
}

fn ms(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}
