//! Measures the cost of a constraint before the first token: the time to compile each of the 200 schemas, and to compute its first mask.
//!
//!     TANDEM_MODEL=$(tandem model fetch | tail -1) cargo bench -p tandem-tests --bench constraints
#![expect(clippy::print_stdout, reason = "the figures are the benchmark's output")]

use anyhow::{Result, ensure};
use std::{path::Path, time::Duration};
use tandem_grammar::{Constraint, Kind, Vocabulary};
use tandem_model::Gguf;
use tandem_tests::schemas;
use tandem_text::ServedModel;
use tokio::time::Instant;

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
    }
    Ok(())
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
    for (what, mut times) in [("compile", compiled), ("first mask", masks)] {
        times.sort_unstable();
        let at = |share: usize| ms(times[(times.len() - 1) * share / 100]);
        println!("  {what:<10}  median {}, 90% {}, 99% {}, longest {}", at(50), at(90), at(99), at(100));
    }
    Ok(())
}

fn ms(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}
