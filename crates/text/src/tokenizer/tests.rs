//! Tests of encoding and decoding.

mod cost;
mod goldens;

use super::*;
use crate::{EncodingCache, EncodingMetrics};
use metrics::{Counter, Gauge};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tandem_kv::Namespace;
use tandem_model::TokenizerData;

/// Returns GPT-2's character for each byte.
fn byte_characters() -> Vec<String> {
    let Spelling::ByteLevel(byte_of) = Spelling::byte_level() else { panic!("the spelling is byte-level") };
    let mut chars: Vec<(u8, char)> = byte_of.into_iter().map(|(char, byte)| (byte, char)).collect();
    chars.sort_unstable();
    chars.into_iter().map(|(_, char)| char.to_string()).collect()
}

/// Returns a cache of this size, with the bytes of its hits and misses.
fn encodings(bytes_max: usize) -> (NamespaceEncodings, [Arc<AtomicU64>; 2]) {
    let counts = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let [hits, misses] = counts.clone().map(Counter::from_arc);
    let cache = Arc::new(EncodingCache::new(bytes_max, EncodingMetrics { bytes: Gauge::noop(), hits, misses }));
    (cache.of(Namespace::new("m", "r", "", "")), counts)
}

#[test]
fn names_of_special_tokens_become_their_ids_only_if_parsed() {
    let tokenizer = Tokenizer::sim();
    let text = "a<|im_end|>é";
    let parsed = tokenizer.encode(text, Special::Parsed).expect("bytes always encode");
    assert_eq!(parsed, [97, sim::IM_END, 0xC3, 0xA9]);
    let plain = tokenizer.encode(text, Special::Text).expect("bytes always encode");
    assert_eq!(plain, text.bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!(tokenizer.decode(&parsed), text);
    assert!(tokenizer.is_special(sim::IM_END) && !tokenizer.is_special(97) && tokenizer.is_special(9999));
}

#[test]
fn names_of_special_tokens_in_guarded_text_stay_text() {
    let tokenizer = Tokenizer::sim();
    for content in ["<|im_end|>", "<|im_<|im_start|>start|>", "<|im_end|><|im_end|>", "no names", "\u{FDD0}<|im_end|>", ""] {
        let guard = Tokenizer::guard([content].into_iter()).expect("a guard character is free");
        let text = format!("<|im_start|>{}<|im_end|>", tokenizer.mark(content, guard));
        let ids = tokenizer.encode_prompt(&text, Some(guard), &encodings(0).0).expect("bytes always encode");
        let mut expected = vec![sim::IM_START];
        expected.extend(content.bytes().map(u32::from));
        expected.push(sim::IM_END);
        assert_eq!(ids, expected, "{content:?}");
    }
    let all: String = GUARDS.collect();
    assert_eq!(Tokenizer::guard([all.as_str()].into_iter()), None);
}

#[test]
fn unsupported_tokenizer_or_pre_tokenizer_is_refused() {
    let data = TokenizerData { model: "t5".into(), ..TokenizerData::default() };
    assert!(matches!(Tokenizer::from_data(&data), Err(ServedModelError::TokenizerAlgorithm(found)) if found == "t5"));
    let data = TokenizerData { model: "gpt2".into(), pre: "chameleon".into(), ..TokenizerData::default() };
    assert!(matches!(Tokenizer::from_data(&data), Err(ServedModelError::PreTokenizer(found)) if found == "chameleon"));
    let data =
        TokenizerData { model: "llama".into(), tokens: vec!["a".into()], token_types: vec![1], ..TokenizerData::default() };
    assert!(matches!(Tokenizer::from_data(&data), Err(ServedModelError::Scores)));
    let data = TokenizerData { scores: vec![0.0], ..data };
    assert!(matches!(Tokenizer::from_data(&data), Err(ServedModelError::Bytes)));
}

/// The token ids that `ci/goldens/make_cuts.py` has computed with Hugging Face's tokenizers and llama.cpp.
#[derive(serde::Deserialize)]
struct Goldens {
    merges: Vec<String>,
    word: String,
    cuts: HashMap<String, Vec<Golden>>,
}

#[derive(serde::Deserialize)]
struct Golden {
    text: String,
    ids: Vec<TokenId>,
}

#[test]
fn pre_tokenizers_give_the_token_ids_of_hugging_face_and_llama_cpp() {
    let goldens: Goldens = serde_json::from_str(include_str!("../../../../ci/goldens/cuts.json")).expect("the goldens are JSON");
    let tokens: Vec<String> = byte_characters()
        .into_iter()
        .chain(goldens.merges.iter().map(|merge| merge.replace(' ', "")))
        .chain([goldens.word])
        .collect();
    assert_eq!(goldens.cuts.len(), 2);
    for (name, cases) in goldens.cuts {
        let data = TokenizerData {
            token_types: vec![1; tokens.len()],
            tokens: tokens.clone(),
            merges: goldens.merges.clone(),
            pre: name.clone(),
            model: "gpt2".into(),
            ..Default::default()
        };
        let tokenizer = Tokenizer::from_data(&data).expect("the goldens are a valid tokenizer");
        assert!(cases.len() >= 30, "only {} goldens", cases.len());
        for Golden { text, ids } in cases {
            assert_eq!(tokenizer.encode(&text, Special::Text).expect("every text can be encoded"), ids, "{name}: {text:?}");
        }
    }
}

/// Returns a `tokenizer.json` like that of Llama 3, with a leading token, special tokens, and a user-defined token.
fn tokenizer_json() -> serde_json::Value {
    let mut vocabulary: serde_json::Map<String, serde_json::Value> =
        (0..).zip(byte_characters()).map(|(byte, char): (u32, String)| (char, byte.into())).collect();
    vocabulary.insert("he".into(), 256.into());
    let added = |id: u32, content: &str, special: bool| {
        serde_json::json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    };
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [added(257, "<|begin|>", true), added(258, "<|end|>", true), added(260, "<tool>", false)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}| ?\\p{L}+"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [257], "tokens": ["<|begin|>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": true, "vocab": vocabulary, "merges": [["h", "e"]]},
    })
}

fn from_json(json: &serde_json::Value) -> Result<(Tokenizer, Option<TokenId>), ServedModelError> {
    Tokenizer::from_json(&serde_json::to_vec(json).expect("a JSON value can be serialized"))
}

#[test]
fn tokenizer_json_encodes_like_the_same_gguf() {
    let (tokenizer, first) = from_json(&tokenizer_json()).expect("the tokenizer is supported");
    assert_eq!(first, Some(257));
    let text = "he 12<|end|><tool>é";
    assert_eq!(
        tokenizer.encode(text, Special::Parsed).expect("the text can be encoded"),
        [256, 32, 49, 50, 258, 260, 0xC3, 0xA9]
    );
    let plain = tokenizer.encode(text, Special::Text).expect("the text can be encoded");
    assert!(!plain.contains(&258) && plain.contains(&260), "{plain:?}");
    assert_eq!(tokenizer.decode(&plain), text);
    assert_eq!((tokenizer.vocab_size(), tokenizer.special_id("<|end|>")), (261, Some(258)));
    assert_eq!(tokenizer.bytes(259), b"", "an id that no token has");
    let guard = Tokenizer::guard(["<|end|>"].into_iter()).expect("a guard character is free");
    let guarded = tokenizer
        .encode_prompt(&tokenizer.mark("<|end|>", guard), Some(guard), &encodings(0).0)
        .expect("the text can be encoded");
    assert_eq!(tokenizer.decode(&guarded), "<|end|>");
    assert!(!guarded.contains(&258));
    let mut silent = tokenizer_json();
    silent["post_processor"] = serde_json::Value::Null;
    assert_eq!(from_json(&silent).expect("the tokenizer is supported").1, None);
}

#[test]
fn unsupported_tokenizer_json_is_refused() {
    let refused = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut json = tokenizer_json();
        change(&mut json);
        from_json(&json).err().expect("the tokenizer is refused")
    };
    let error = refused(&|json| json["model"]["type"] = "WordPiece".into());
    assert!(matches!(error, ServedModelError::TokenizerAlgorithm(found) if found == "WordPiece"));
    let error = refused(&|json| json["pre_tokenizer"] = serde_json::json!({"type": "Whitespace"}));
    assert!(matches!(error, ServedModelError::PreTokenizer(found) if found == "Whitespace"));
    let error = refused(&|json| {
        json["pre_tokenizer"] = serde_json::Value::Null;
        json["decoder"] = serde_json::json!({"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": true});
    });
    assert!(matches!(error, ServedModelError::Decoder(found) if found == "CTC"));
    let error = refused(&|json| json["added_tokens"][1]["single_word"] = true.into());
    assert!(matches!(error, ServedModelError::AddedToken(name) if name == "<|end|>"));
    let error = refused(&|json| {
        let end = serde_json::json!({"SpecialToken": {"id": "<|begin|>", "type_id": 0}});
        json["post_processor"]["single"].as_array_mut().expect("the post-processor has a list of tokens").push(end);
    });
    assert!(matches!(error, ServedModelError::PostProcessor));
    let error = refused(&|json| json["model"]["vocab"]["he"] = u32::MAX.into());
    assert!(matches!(error, ServedModelError::TokenIds(..)));
    assert!(matches!(Tokenizer::from_json(b"{"), Err(ServedModelError::Tokenizer(_))));
}

#[test]
fn byte_level_bpe_merges_and_decodes_to_the_same_bytes() {
    let mut tokens = byte_characters();
    tokens.extend(["he".into(), "<|end|>".into(), "<user>".into()]);
    let mut token_types = vec![1; 257];
    token_types.extend([kind::CONTROL, kind::USER_DEFINED]);
    let merges = vec!["h e".to_owned()];
    let data = TokenizerData { tokens, token_types, merges, pre: "smollm".into(), model: "gpt2".into(), ..Default::default() };
    let tokenizer = Tokenizer::from_data(&data).expect("the vocabulary is valid");
    let text = "he 12<|end|><user>é";
    let parsed = tokenizer.encode(text, Special::Parsed).expect("bytes always encode");
    assert_eq!(parsed, [256, 32, 49, 50, 257, 258, 0xC3, 0xA9]);
    let plain = tokenizer.encode(text, Special::Text).expect("bytes always encode");
    assert!(!plain.contains(&257) && plain.contains(&258), "{plain:?}");
    assert_eq!(tokenizer.decode(&plain), text);
    assert_eq!(tokenizer.bytes(0xC3), [0xC3]);
    assert!(!tokenizer.is_special(258));
}
