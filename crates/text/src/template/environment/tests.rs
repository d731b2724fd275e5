//! Compares rendered templates with those of Hugging Face's `transformers`, which `ci/goldens/make_templates.py` has stored.

use super::{
    super::{evaluate, instrument},
    *,
};
use crate::{Special, Tokenizer};
use minijinja::value::Serde;
use serde_json::{Map, Value as Json, json};
use std::{collections::BTreeMap, fs, path::Path};

/// A text that `transformers` rendered, or its refusal of the conversation.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Golden {
    /// The length in bytes, the first digits of the text's SHA-256, and those of its ids'.
    Digest(usize, String, String),
    Text(String),
    Refused {
        /// What the template says; `None`: the template fails in another way.
        refused: Option<String>,
    },
}

#[derive(serde::Deserialize)]
struct Goldens {
    now: String,
    texts: BTreeMap<String, Vec<Option<Golden>>>,
    /// The name of each template's tokenizer in `tokenizers.json`.
    tokenizers: BTreeMap<String, String>,
    context: Json,
    snippets: Vec<(String, Golden)>,
}

fn file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ci/goldens").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn json(name: &str) -> Json {
    serde_json::from_str(&file(name)).expect("the goldens are JSON")
}

fn goldens() -> Goldens {
    serde_json::from_str(&file("templates.json")).expect("the goldens have their format")
}

fn clock() -> jiff::Zoned {
    "2024-07-04T05:06:07[UTC]".parse().expect("the time is valid")
}

fn rendered(source: &str, variables: &Json) -> Result<String, Error> {
    let environment = environment(clock)?;
    let program = instrument::compile("chat", instrument::rewrite(&rewrite(source))?)?;
    evaluate(&environment, &program, Serde(variables).into(), 1 << 20)
}

fn digits(bytes: &[u8]) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, bytes);
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn difference(golden: &Golden, rendered: Result<String, Error>, tokenizer: &Tokenizer) -> Option<String> {
    let equal = match (golden, &rendered) {
        (Golden::Digest(len, text_digits, ids_digits), Ok(text)) => {
            let ids = tokenizer.encode(text, Special::Parsed).expect("every text can be encoded");
            let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            text.len() == *len && digits(text.as_bytes()).starts_with(text_digits) && digits(&ids).starts_with(ids_digits)
        }
        (Golden::Text(expected), Ok(text)) => expected == text,
        (Golden::Refused { refused: Some(message) }, Err(error)) => error.detail() == Some(message),
        (Golden::Refused { refused: None }, Err(_)) => true,
        _ => false,
    };
    let expected = match golden {
        Golden::Text(text) => format!("{text:?}"),
        Golden::Digest(len, text, ids) => format!("{len} bytes, {text}, ids {ids}"),
        Golden::Refused { refused } => format!("refused: {refused:?}"),
    };
    (!equal).then(|| format!("expected {expected}, found {rendered:?}"))
}

/// Returns the names of the conversations, and their variables in a template.
fn conversations() -> Vec<(String, Json)> {
    let tools = json("tools.json");
    let Json::Array(conversations) = json("conversations.json") else { panic!("the file is a list") };
    let variables = |conversation: &Json| {
        let list = |name: &str| conversation[name].as_array().cloned().unwrap_or_default();
        let repeat = conversation["repeat"].as_u64().unwrap_or(1) as usize;
        let mut messages = vec![list("messages"); repeat].concat();
        messages.extend(conversation.get("last").cloned());
        for message in &mut messages {
            // `transformers` gives the reasoning another name, too.
            let reasoning = message["reasoning_content"].clone();
            if !reasoning.is_null() {
                message["thinking"] = reasoning;
            }
        }
        let tools = conversation
            .get("tools")
            .map(|_| list("tools").iter().map(|name| tools[name.as_str().unwrap_or("")].clone()).collect());
        let mut variables = json!({
            "messages": messages, "tools": tools.unwrap_or(Json::Null), "documents": conversation.get("documents"),
            "add_generation_prompt": conversation.get("add_generation_prompt").unwrap_or(&Json::Bool(true)),
            "bos_token": "<s>", "eos_token": "</s>",
        });
        let arguments: Map<String, Json> = conversation["arguments"].as_object().cloned().unwrap_or_default();
        variables.as_object_mut().expect("the variables are an object").extend(arguments);
        variables
    };
    conversations.iter().map(|one| (one["name"].as_str().unwrap_or_default().to_owned(), variables(one))).collect()
}

#[test]
fn conversations_have_the_texts_and_tokens_of_transformers() {
    let (goldens, conversations, tokenizers) = (goldens(), conversations(), json("tokenizers.json"));
    assert_eq!(conversations.len(), 40);
    assert!(goldens.texts.len() >= 15);
    let (mut compared, mut differences) = (0, Vec::new());
    for (template, texts) in &goldens.texts {
        assert_eq!(texts.len(), conversations.len(), "{template}");
        let source = file(&format!("templates/{template}.jinja"));
        let tokenizer = &tokenizers["json"][&goldens.tokenizers[template]]["file"];
        let (tokenizer, _) = Tokenizer::from_json(tokenizer.to_string().as_bytes()).expect("the tokenizer is supported");
        for (golden, (name, variables)) in texts.iter().zip(&conversations) {
            let Some(golden) = golden else { continue };
            compared += 1;
            let found = difference(golden, rendered(&source, variables), &tokenizer);
            differences.extend(found.map(|found| format!("{template}, {name}: {found}")));
        }
    }
    assert!(compared > 700, "only {compared} texts were compared");
    assert!(differences.is_empty(), "{} texts differ:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn constructs_of_the_template_language_render_as_in_transformers() {
    let goldens = goldens();
    assert_eq!(clock().datetime().to_string(), goldens.now);
    let found = goldens.snippets.iter().filter_map(|(source, golden)| {
        difference(golden, rendered(source, &goldens.context), &Tokenizer::sim()).map(|found| format!("{source:?}: {found}"))
    });
    let differences: Vec<String> = found.collect();
    assert!(differences.is_empty(), "{} of {} differ:\n{}", differences.len(), goldens.snippets.len(), differences.join("\n"));
}

#[test]
fn generation_blocks_become_with_blocks() {
    for (source, rewritten) in [
        ("{% generation %}a{% endgeneration %}", "{% with %}a{% endwith %}"),
        ("x{%- generation -%}\n{%+endgeneration+%}", "x{%- with -%}\n{%+endwith+%}"),
        ("{% generations %}{% generation = 1 %}{{ generation }}{%", "{% generations %}{% generation = 1 %}{{ generation }}{%"),
        ("{% if add_generation_prompt %}é{% endif %}", "{% if add_generation_prompt %}é{% endif %}"),
        ("a\r\nb\rc\n", "a\nb\nc\n"),
    ] {
        assert_eq!(rewrite(source), rewritten);
    }
}
