//! Compares the tokenizer with Hugging Face's `tokenizers`, SentencePiece and llama.cpp.

use super::*;
use crate::Detokenizer;
use ring::digest::{SHA256, digest};
use std::collections::BTreeMap;

/// The goldens of `ci/goldens/make_tokenizers.py`.
#[derive(serde::Deserialize)]
struct Goldens {
    fragments: Vec<String>,
    texts: usize,
    json: BTreeMap<String, Golden>,
    gguf: BTreeMap<String, Golden>,
}

#[derive(serde::Deserialize)]
struct Golden {
    /// The content of the `tokenizer.json`.
    #[serde(default)]
    file: serde_json::Value,
    /// The fields of a GGUF file.
    data: Option<Data>,
    /// The name of the pre-tokenizer of the `tokenizer.json` in GGUF files.
    pre: Option<String>,
    ids: String,
    texts: String,
}

#[derive(serde::Deserialize)]
struct Data {
    tokens: Vec<String>,
    scores: Vec<f32>,
    token_types: Vec<i32>,
    add_space_prefix: bool,
}

fn goldens() -> Goldens {
    serde_json::from_str(include_str!("../../../../../ci/goldens/tokenizers.json")).expect("the goldens have their format")
}

impl Goldens {
    /// Returns the tokenizers of all families.
    fn tokenizers(&self) -> impl Iterator<Item = (&str, Tokenizer)> {
        let json = self.json.iter().map(|(name, golden)| {
            let json = serde_json::to_vec(&golden.file).expect("a JSON value can be serialized");
            (name.as_str(), Tokenizer::from_json(&json).expect("the tokenizer is supported").0)
        });
        let gguf = self.gguf.iter().map(|(name, golden)| {
            (name.as_str(), Tokenizer::from_data(&sentence_piece_data(golden)).expect("the tokenizer is supported"))
        });
        json.chain(gguf)
    }

    /// Returns the texts, which are the same as those of the script.
    fn texts(&self) -> Vec<String> {
        let mut number = numbers();
        let mut text = || -> String { (0..number(12)).map(|_| self.fragments[number(self.fragments.len())].as_str()).collect() };
        (0..self.texts).map(|_| text()).collect()
    }
}

/// Returns a source of numbers below a limit, the same in each run.
fn numbers() -> impl FnMut(usize) -> usize {
    let mut state = 1_u64;
    move |limit| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    }
}

fn digits(bytes: &[u8]) -> String {
    format!("{:02x}", digest(&SHA256, bytes).as_ref()[0])
}

/// Returns the text of a stream of tokens, each decoded when it arrives.
fn streamed(tokenizer: &Tokenizer, ids: &[TokenId]) -> String {
    let (mut text, mut detokenizer) = (String::new(), Detokenizer::default());
    ids.iter().for_each(|id| detokenizer.push(tokenizer.bytes(*id), &mut text));
    detokenizer.finish(&mut text);
    text
}

/// Compares a tokenizer's ids and texts with the golden. Returns the differences.
fn differences(tokenizer: &Tokenizer, golden: &Golden, texts: &[String], special: Special) -> Vec<String> {
    let digits_of = |all: &str, index: usize| all[2 * index..2 * index + 2].to_owned();
    let mut differences = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        let ids = tokenizer.encode(text, special).expect("every text can be encoded");
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let decoded = tokenizer.decode(&ids);
        if digits(&bytes) != digits_of(&golden.ids, index) {
            let pieces: Vec<_> = ids.iter().map(|id| String::from_utf8_lossy(tokenizer.bytes(*id))).collect();
            differences.push(format!("{text:?} has the ids {ids:?}, {pieces:?}"));
        } else if digits(decoded.as_bytes()) != digits_of(&golden.texts, index) {
            differences.push(format!("{text:?} is decoded to {decoded:?}"));
        }
        let streamed = streamed(tokenizer, &ids);
        assert!(streamed == decoded || streamed.strip_prefix(' ') == Some(&decoded), "{streamed:?} and {decoded:?}");
    }
    differences
}

fn assert_none(name: &str, differences: &[String]) {
    let few = differences.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    assert!(differences.is_empty(), "{name}: {} texts differ:\n{few}", differences.len());
}

#[test]
fn tokenizer_json_of_all_families_gives_the_ids_and_texts_of_hugging_face() {
    let goldens = goldens();
    let texts = goldens.texts();
    assert_eq!((goldens.json.len(), texts.len()), (11, 3_000));
    for (name, golden) in &goldens.json {
        let json = serde_json::to_vec(&golden.file).expect("a JSON value can be serialized");
        let (tokenizer, _) = Tokenizer::from_json(&json).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_none(name, &differences(&tokenizer, golden, &texts, Special::Parsed));
    }
}

#[test]
fn pre_tokenizers_of_gguf_files_give_the_ids_of_the_same_tokenizer_json() {
    let goldens = goldens();
    let texts = goldens.texts();
    let named: Vec<_> = goldens.json.values().filter_map(|golden| Some((golden, golden.pre.as_ref()?))).collect();
    assert_eq!(named.len(), 7);
    for (golden, pre) in named {
        let model = &golden.file["model"];
        let vocabulary: BTreeMap<String, usize> =
            serde_json::from_value(model["vocab"].clone()).expect("the vocabulary is a map");
        let added = golden.file["added_tokens"].as_array().expect("the file has a list of added tokens");
        let mut tokens = vec![String::new(); vocabulary.len()];
        vocabulary.into_iter().for_each(|(text, id)| tokens[id] = text);
        let mut token_types = vec![kind::NORMAL; tokens.len()];
        for token in added {
            tokens.push(token["content"].as_str().expect("a token has a text").to_owned());
            token_types.push(if token["special"] == true { kind::CONTROL } else { kind::USER_DEFINED });
        }
        let merges: Vec<(String, String)> = serde_json::from_value(model["merges"].clone()).expect("merges are pairs");
        let data = TokenizerData {
            tokens,
            token_types,
            merges: merges.iter().map(|(left, right)| format!("{left} {right}")).collect(),
            pre: pre.clone(),
            model: "gpt2".into(),
            ..TokenizerData::default()
        };
        let gguf = Tokenizer::from_data(&data).expect("the tokenizer is supported");
        // A GGUF file does not name the tokens that include the white space around them.
        let without_spaces: Vec<&String> = texts.iter().filter(|text| !text.contains("<tool>")).collect();
        let (json, _) =
            Tokenizer::from_json(&serde_json::to_vec(&golden.file).expect("a JSON value can be serialized")).expect(pre);
        for text in without_spaces {
            let ids = |tokenizer: &Tokenizer| tokenizer.encode(text, Special::Parsed).expect("every text can be encoded");
            assert_eq!(ids(&gguf), ids(&json), "{pre}: {text:?}");
        }
    }
}

#[test]
fn gguf_tokenizers_give_the_ids_and_texts_of_sentence_piece() {
    let goldens = goldens();
    let texts = goldens.texts();
    for (name, golden) in &goldens.gguf {
        let tokenizer = Tokenizer::from_data(&sentence_piece_data(golden)).expect("the tokenizer is supported");
        // SentencePiece adds no space to an empty text.
        let filled: Vec<(usize, &String)> = texts.iter().enumerate().filter(|(_, text)| !text.is_empty()).collect();
        assert!(filled.len() > 2_500);
        assert_none(name, &differences(&tokenizer, golden, &texts, Special::Text));
    }
}

fn sentence_piece_data(golden: &Golden) -> TokenizerData {
    let data = golden.data.as_ref().expect("the golden is of a GGUF file");
    TokenizerData {
        tokens: data.tokens.clone(),
        scores: data.scores.clone(),
        token_types: data.token_types.clone(),
        add_space_prefix: data.add_space_prefix,
        model: "llama".into(),
        ..TokenizerData::default()
    }
}

#[test]
fn names_of_control_tokens_in_guarded_text_stay_text_in_all_families() {
    let goldens = goldens();
    let texts = goldens.texts();
    for (name, tokenizer) in goldens.tokenizers() {
        let (encodings, _) = encodings(1 << 16);
        for text in &texts {
            let guard = Tokenizer::guard([text.as_str()].into_iter()).expect("a guard character is free");
            let ids = tokenizer
                .encode_prompt(&tokenizer.mark(text, guard), Some(guard), &encodings)
                .expect("every text can be encoded");
            let control: Vec<_> = ids.iter().filter(|id| tokenizer.is_special(**id)).collect();
            // A tokenizer without byte tokens encodes characters that it does not know as an unknown token.
            let unknown = |id: &&u32| name == "unigram" && tokenizer.bytes(**id) == b"<unk>";
            assert!(control.iter().all(unknown), "{name}: {text:?} has the control tokens {control:?}");
        }
    }
}

#[test]
fn byte_level_encoder_gives_the_ids_of_hugging_faces_library() {
    const NAMES: [&str; 9] =
        ["gpt2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "deepseek-v3", "deepseek-coder"];
    const TEXTS: usize = 10_000;
    /// Characters at which the pre-tokenizers decide, and one of each kind of letter, number and symbol.
    const CHARS: &str =
        "  \t\n\r\u{a0}\u{85}\u{2028}\u{3000}aZsStTvVdDlLmMrReEé'’\u{301}\u{30a}\u{200d}\u{17f}ǅʰß٣½Ⅷ07日あア。!?_/-.$€🙂\u{378}";
    let goldens = goldens();
    let model = &goldens.json["llama-bpe"].file["model"];
    let vocabulary: BTreeMap<String, usize> = serde_json::from_value(model["vocab"].clone()).expect("the vocabulary is a map");
    let merges: Vec<(String, String)> = serde_json::from_value(model["merges"].clone()).expect("merges are pairs");
    let mut data = TokenizerData {
        tokens: vec![String::new(); vocabulary.len()],
        merges: merges.iter().map(|(left, right)| format!("{left} {right}")).collect(),
        ..TokenizerData::default()
    };
    vocabulary.into_iter().for_each(|(text, id)| data.tokens[id] = text);
    let (chars, mut number) = (CHARS.chars().collect::<Vec<_>>(), numbers());
    let mut text = || -> String {
        let piece = |number: &mut dyn FnMut(usize) -> usize| match number(4) {
            0 => goldens.fragments[number(goldens.fragments.len())].clone(),
            _ => chars[number(chars.len())].to_string(),
        };
        (0..number(40)).map(|_| piece(&mut number)).collect()
    };
    let texts: Vec<String> = (0..TEXTS).map(|_| text()).collect();
    let compare = |name: &str, data: &mut TokenizerData| {
        data.pre = name.to_owned();
        let library = gguf::byte_level(data).expect("the tokenizer is supported");
        let own = byte_level::ByteLevel::of(&library).expect("the tokenizer is byte-level BPE");
        let library = Encoder::Library(Box::new(library));
        for text in &texts {
            let (mut expected, mut ids) = (Vec::new(), Vec::new());
            library.encode(PromptPart { text, is_first: true }, &mut expected).expect("every text can be encoded");
            own.encode(text, &mut ids);
            assert_eq!(ids, expected, "{name}: {text:?}");
        }
    };
    NAMES.iter().for_each(|name| compare(name, &mut data));
    let merged = data.merges.concat();
    let unmerged: Vec<String> = byte_characters().into_iter().filter(|char| !merged.contains(char)).collect();
    assert!(unmerged.len() > 32, "{unmerged:?}");
    for char in unmerged.iter().step_by(2) {
        let at = data.tokens.iter().position(|token| token == char).expect("each byte has a token");
        data.tokens[at] = format!("unused {at}");
    }
    ["smollm", "llama-bpe"].iter().for_each(|name| compare(name, &mut data));
}

#[test]
fn byte_level_tokenizers_are_encoded_without_the_tokenizers_crate() {
    let goldens = goldens();
    for (name, tokenizer) in goldens.tokenizers() {
        let is_byte_level = goldens.json.get(name).is_some_and(|golden| golden.pre.is_some());
        assert_eq!(matches!(tokenizer.encoder, Encoder::ByteLevel { .. }), is_byte_level, "{name}");
    }
}

#[test]
fn cached_encodings_give_the_same_ids_wherever_a_conversation_is_cut() {
    let goldens = goldens();
    let mut number = numbers();
    for (name, tokenizer) in goldens.tokenizers() {
        // A small cache, so that texts are removed from it in between.
        let (encodings, counts) = encodings(1 << 14);
        let mut conversation = String::new();
        for _ in 0..200 {
            if number(20) == 0 {
                conversation.clear();
            }
            conversation += ["<|im_start|>", "<|im_end|>\n", "<s>", ""][number(4)];
            conversation.extend((0..number(80)).map(|_| goldens.fragments[number(goldens.fragments.len())].as_str()));
            let cut = (0..=number(conversation.len() + 1)).rev().find(|cut| conversation.is_char_boundary(*cut));
            for text in [&conversation, &conversation[..cut.expect("0 is a boundary")]] {
                let plain = tokenizer.encode(text, Special::Parsed).expect("every text can be encoded");
                let found = tokenizer.encode_prompt(text, None, &encodings).expect("every text can be encoded");
                assert_eq!(found, plain, "{name}: {text:?}");
                let guard = Tokenizer::guard([text].into_iter()).expect("a guard character is free");
                let marked = tokenizer.mark(text, guard);
                let plain =
                    tokenizer.encode_cut(&marked, &tokenizer.special, Some(guard), None).expect("every text can be encoded");
                let found = tokenizer.encode_prompt(&marked, Some(guard), &encodings).expect("every text can be encoded");
                assert_eq!(found, plain, "{name}: {text:?}");
            }
        }
        let [hits, misses] = counts.map(|count| count.load(Ordering::Relaxed));
        assert!(hits > 0 && misses > 0, "{name}: {hits} bytes found, {misses} computed");
    }
}

/// Compares with the ids of the models' own tokenizers, which llama.cpp stores with their vocabularies in the folder `models` of its repository.
#[test]
#[ignore = "needs TANDEM_VOCABULARIES, a folder with llama.cpp's ggml-vocab-*.gguf, .inp and .out files"]
fn vocabularies_of_real_models_give_the_ids_of_their_own_tokenizers() {
    const NAMES: [&str; 12] = [
        "llama-spm",
        "phi-3",
        "gemma-4",
        "llama-bpe",
        "qwen2",
        "qwen35",
        "deepseek-coder",
        "gpt-2",
        "mpt",
        "command-r",
        "refact",
        "starcoder",
    ];
    let folder = std::path::PathBuf::from(std::env::var_os("TANDEM_VOCABULARIES").expect("TANDEM_VOCABULARIES is set"));
    let mut failed = Vec::new();
    for name in NAMES {
        let file = |ending: &str| folder.join(format!("ggml-vocab-{name}.gguf{ending}"));
        let data = tandem_model::Gguf::open(&file("")).expect("the file is GGUF").tokenizer().expect("the file has a tokenizer");
        let tokenizer = Tokenizer::from_data(&data).unwrap_or_else(|error| panic!("{name}: {error}"));
        let texts = std::fs::read_to_string(file(".inp")).expect("the texts can be read");
        let ids = std::fs::read_to_string(file(".out")).expect("the ids can be read");
        let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
        for (text, line) in texts.iter().zip(ids.lines()) {
            let expected: Vec<TokenId> = line.split_whitespace().map(|id| id.parse().expect("an id is a number")).collect();
            let found = tokenizer.encode(text, Special::Text).expect("every text can be encoded");
            if found != expected {
                failed.push(format!("{name}: {text:?}: found {found:?}, expected {expected:?}"));
            }
            assert_eq!(streamed(&tokenizer, &found).trim_start_matches(' '), text.trim_start_matches(' '), "{name}");
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
