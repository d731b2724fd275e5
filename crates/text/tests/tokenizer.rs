//! Compares the tokenizer's ids with those of llama.cpp for stored texts. Needs `TANDEM_MODEL`, the path of the real model's GGUF file.

use serde::Deserialize;
use tandem_model::Gguf;
use tandem_text::{ServedModel, Special};

#[derive(Deserialize)]
struct Golden {
    text: String,
    ids: Vec<u32>,
    /// Whether the names of special tokens become their ids.
    special: bool,
}

const GOLDENS_MIN: usize = 250;

#[test]
#[expect(clippy::print_stderr, reason = "a skip is loud")]
fn golden_texts_encode_to_llama_cpps_ids_and_decode_to_themselves() {
    let Some(path) = std::env::var_os("TANDEM_MODEL") else {
        eprintln!("SKIPPED: set TANDEM_MODEL to SmolLM2-135M-Instruct's .gguf to compare the tokenizer with llama.cpp's");
        return;
    };
    let file = Gguf::open(path.as_ref()).expect("TANDEM_MODEL must name a GGUF file");
    let model = ServedModel::from_gguf("m", "r", &file).expect("the model can be served");
    let goldens = include_str!("../../../ci/goldens/tokenizer.json");
    let goldens: Vec<Golden> = serde_json::from_str(goldens).expect("the goldens are JSON");
    assert!(goldens.len() >= GOLDENS_MIN, "only {} goldens", goldens.len());
    for golden in goldens {
        let special = if golden.special { Special::Parsed } else { Special::Text };
        let ids = model.tokenizer.encode(&golden.text, special).expect("every text can be encoded");
        assert_eq!(ids, golden.ids, "{:?}", golden.text);
        assert_eq!(model.tokenizer.decode(&ids), golden.text);
    }
}
