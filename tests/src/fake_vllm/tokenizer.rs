//! The tokenizer of the fake model: each byte is a token.

use anyhow::Result;
use serde_json::{Map, json};
use std::path::Path;

/// The id of the token that ends an answer. The fake engine never generates it.
pub const END: u32 = 256;

/// Writes the files of the fake model that a frontend needs into a directory. They include no weights.
pub fn write(directory: &Path) -> Result<()> {
    let vocabulary: Map<_, _> = (0..=255).map(|byte: u8| (character(byte).to_string(), byte.into())).collect();
    let end = json!({
        "id": END, "content": "<|im_end|>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
    });
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let tokenizer = json!({
        "version": "1.0", "normalizer": null, "pre_tokenizer": bytes, "decoder": bytes, "added_tokens": [end],
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [] },
    });
    let template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: ";
    for (name, content) in [
        ("tokenizer.json", tokenizer),
        ("config.json", json!({ "architectures": ["UnknownForCausalLM"], "max_position_embeddings": 8192, "eos_token_id": END })),
        ("tokenizer_config.json", json!({ "chat_template": template })),
    ] {
        std::fs::write(directory.join(name), content.to_string())?;
    }
    Ok(())
}

/// Returns the character that stands for a byte in vocabularies of byte-level BPE, as in GPT-2's table.
fn character(byte: u8) -> char {
    let is_shown = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_shown(byte) {
        return byte.into();
    }
    let number = (0..byte).filter(|before| !is_shown(*before)).count() as u32;
    char::from_u32(256 + number).expect("the table has 68 codes above 255")
}
