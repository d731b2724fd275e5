//! Tests of the inputs of tools within a free text.

use crate::{CALL_INPUTS_MAX, CallInput, InputPlace, Kind, MatchError, Matcher, Vocabulary, check, lark::literal};
use proptest::{collection::vec, prelude::*, sample::select};

/// Tokens of several bytes.
const LONG: [&str; 9] =
    ["\": \"", "\"}", "!\"}}", "<tool_call>", "{\"name\": \"patch\", \"arguments\"", "\\n", "o!", "\n</", "x\"y"];

fn mixed() -> Vocabulary {
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    let tokens = bytes.chunks(1).map(|byte| (byte, false)).chain(LONG.iter().map(|text| (text.as_bytes(), false)));
    Vocabulary::new(tokens.chain([("<|end|>".as_bytes(), true)]), 256 + LONG.len() + 1)
}

const END: u32 = 256 + LONG.len() as u32;

fn json_input(kind: Kind) -> CallInput {
    let head = [",", "\"arguments\"", ":", "{", "\"input\"", ":", "\""];
    CallInput {
        places: vec![InputPlace::new(&["<tool_call>", "{", "\"name\"", ":", "\"patch\""], &head, None, &["}", "}"])],
        kind,
    }
}

fn raw_input(kind: Kind) -> CallInput {
    CallInput {
        places: vec![InputPlace::new(&["<function=patch>"], &["<parameter=input>\n"], Some("\n</parameter>"), &["</function>"])],
        kind,
    }
}

fn inputs(inputs: Vec<CallInput>) -> Matcher {
    mixed().compile(&Kind::CallInputs(inputs).into(), &[END]).expect("the inputs can be enforced")
}

/// Adds each token if the mask allows it. Returns how many it allows.
fn allowed_tokens(matcher: &mut Matcher, tokens: &[u32]) -> usize {
    let mut allows = |token: u32| {
        let allowed = matcher.mask().expect("some token is allowed").is_none_or(|mask| mask.allows(token));
        assert_eq!(matcher.clone().accept(token).is_ok(), allowed, "mask and text agree on token {token}");
        allowed && matcher.accept(token).is_ok()
    };
    tokens.iter().take_while(|token| allows(**token)).count()
}

fn allowed_bytes(matcher: &mut Matcher, text: &str) -> usize {
    allowed_tokens(matcher, &text.bytes().map(u32::from).collect::<Vec<_>>())
}

fn long(text: &str) -> u32 {
    256 + LONG.iter().position(|token| *token == text).expect("it is a token") as u32
}

#[test]
fn grammar_of_an_input_holds_for_the_decoded_string_in_every_call() {
    let grammar = "start: \"go\" line+ \"!\"\nline: /[a-zé\\t\"]+/ LF\n%import common.LF\n";
    let mut matcher = inputs(vec![json_input(Kind::Grammar(grammar.to_owned()))]);
    let free =
        "Text {\"name\": \"patch\"} <tool_call>\n{\"name\": \"other\", \"arguments\": {\"input\": \"no\"}}\n</tool_call>\n";
    assert_eq!(allowed_bytes(&mut matcher, free), free.len());
    for call in [
        "<tool_call>\n{\"name\": \"patch\", \"arguments\": {\"input\": \"goaé\\n\\tb\\\"\\n!\"}}\n</tool_call>",
        "<tool_call>{\"name\":\"patch\",\"arguments\":{\"input\":\"goaé\\u000a!\"}}</tool_call> and more",
    ] {
        assert_eq!(allowed_bytes(&mut matcher, call), call.len(), "{call}");
        let free = matcher.mask().expect("the text is free");
        assert!(free.is_none_or(|mask| mask.allows(END)), "the answer may end after a call");
    }
    let begin = "<tool_call>\n{\"name\": \"patch\"";
    for (call, allowed) in [
        ("} ", 0),
        (", \"arguments\": {\"other\"", ", \"arguments\": {\"".len()),
        (", \"arguments\": {\"input\": \"gx!", ", \"arguments\": {\"input\": \"g".len()),
        (", \"arguments\": {\"input\": \"goa\n", ", \"arguments\": {\"input\": \"goa".len()),
        (", \"arguments\": {\"input\": \"goa\"", ", \"arguments\": {\"input\": \"goa".len()),
        // Only a line feed, which ends the line, or a tabulator can be escaped here.
        (", \"arguments\": {\"input\": \"goa\\u0041", ", \"arguments\": {\"input\": \"goa\\u00".len()),
        (", \"arguments\": {\"input\": \"goa\\u001", ", \"arguments\": {\"input\": \"goa\\u00".len()),
        (", \"arguments\": {\"input\": \"goa\\u000a!\\", ", \"arguments\": {\"input\": \"goa\\u000a!".len()),
        (", \"arguments\": {\"input\": \"goa\\n!\", \"x\"", ", \"arguments\": {\"input\": \"goa\\n!\"".len()),
    ] {
        let mut matcher = matcher.clone();
        assert_eq!(allowed_bytes(&mut matcher, begin), begin.len());
        assert_eq!(allowed_bytes(&mut matcher, call), allowed, "{call}");
        assert!(!matcher.mask().expect("a token is allowed").expect("not all are").allows(END), "{call}");
    }
}

#[test]
fn token_may_cross_the_borders_of_an_input_only_as_its_grammar_allows() {
    let of = |grammar: &str| inputs(vec![json_input(Kind::Grammar(grammar.to_owned()))]);
    let call = |middle: &[&str]| -> Vec<u32> {
        let spelled = |text: &&str| match LONG.contains(text) {
            true => vec![long(text)],
            false => text.bytes().map(u32::from).collect(),
        };
        middle.iter().flat_map(spelled).collect()
    };
    let good = call(&["<tool_call>", "{\"name\": \"patch\", \"arguments\"", ":{\"input", "\": \"", "g", "o!", "\"}", "}"]);
    assert_eq!(allowed_tokens(&mut of("start: \"go!\""), &good), good.len());
    let good = call(&["<tool_call>", "{\"name\": \"patch\", \"arguments\"", ":{\"input", "\": \"", "go", "!\"}}", "<|end|>"]);
    assert_eq!(allowed_tokens(&mut of("start: \"go!\""), &good), good.len());
    // This token would end the input too early.
    let early = call(&["<tool_call>", "{\"name\": \"patch\", \"arguments\"", ":{\"input", "\": \"", "go", "!\"}}"]);
    assert_eq!(allowed_tokens(&mut of("start: \"go!!\""), &early), early.len() - 1);
    // This one would leave the format behind the name.
    let mut other = CallInput { kind: Kind::Grammar("start: \"a\"".to_owned()), ..json_input(Kind::JsonObject) };
    other.places[0].begin = vec!["x\"".to_owned()];
    assert_eq!(allowed_tokens(&mut inputs(vec![other]), &[long("x\"y")]), 0);
}

#[test]
fn raw_input_ends_where_its_closing_tag_begins_and_the_grammar_is_met() {
    let of = |kind| inputs(vec![raw_input(kind)]);
    let begin = "Hm.<tool_call>\n<function=patch>\n<parameter=input>\n";
    for (kind, text, allowed) in [
        (Kind::Regex("a\n+b".to_owned()), "a\n\nb\n</parameter>\n</function>\n</tool_call> x", None),
        // The grammar allows any text, and the first closing tag ends it.
        (Kind::Grammar("start: /(.|\\n)+/".to_owned()), "a\n</p>\n</parameter>\n</function>\n</tool_call>", None),
        (Kind::Regex("ab".to_owned()), "a\n", Some(1)),
        (Kind::Regex("a".to_owned()), "a\n</function>", Some("a\n</".len())),
        (Kind::Regex("a".to_owned()), "a\n</parameter><parameter", Some("a\n</parameter><".len())),
    ] {
        let mut matcher = of(kind);
        assert_eq!(allowed_bytes(&mut matcher, begin), begin.len());
        assert_eq!(allowed_bytes(&mut matcher, text), allowed.unwrap_or(text.len()), "{text}");
    }
    // A grammar that requires the closing tag within the text cannot be met.
    let (mut matcher, text) = (of(Kind::Regex("(a\n</parameter>)+b".to_owned())), "a\n</parameter");
    assert_eq!(allowed_bytes(&mut matcher, begin), begin.len());
    assert_eq!(allowed_bytes(&mut matcher, text), text.len());
    assert_eq!(matcher.mask(), Err(MatchError::NoToken));
    // The closing tag may be a special token.
    let mut special = raw_input(Kind::Regex("a+".to_owned()));
    special.places[0].end = Some("<|end|>".to_owned());
    let mut matcher = inputs(vec![special]);
    assert_eq!(allowed_bytes(&mut matcher, begin), begin.len());
    assert_eq!(allowed_tokens(&mut matcher.clone(), &[END]), 0, "the input is not complete");
    assert_eq!(allowed_bytes(&mut matcher, "aa"), 2);
    assert_eq!(allowed_tokens(&mut matcher, &[END, u32::from(b'<')]), 2);
}

#[test]
fn calls_of_several_tools_and_forms_are_distinguished() {
    let mut one = raw_input(Kind::Regex("1".to_owned()));
    one.places.push(InputPlace::new(&["[CALL]", "patch", "[ID]", "", "[ARGS]"], &["{", "\""], None, &["}"]));
    let mut two = json_input(Kind::Regex("2".to_owned()));
    two.places[0].begin[4] = "\"second\"".to_owned();
    let mut matcher = inputs(vec![one, two]);
    for (call, allowed) in [
        ("<function=patch><parameter=input>\n1\n</parameter></function>", None),
        ("[CALL]patch[ID]a1[ARGS]{\"1\"}", None),
        ("[CALL]patch[ID][ARGS]{\"1\"}", None),
        ("[CALL]patch[OTHER]{\"2\"}", None),
        ("[CALL]patch2[ID]a1[ARGS]{\"2\"}", None),
        ("<tool_call>{\"name\": \"second\", \"arguments\": {\"input\": \"2\"}}", None),
        ("<tool_call>{\"name\": \"second\", \"arguments\": {\"input\": \"1", Some(1)),
    ] {
        assert_eq!(allowed_bytes(&mut matcher, call), call.len() - allowed.unwrap_or(0), "{call}");
    }
}

#[test]
fn hostile_inputs_are_refused_by_name() {
    let checked = |inputs: Vec<CallInput>| check(&Kind::CallInputs(inputs).into()).map_err(|error| error.to_string());
    let nested = |depth: usize| (0..depth).map(|rule| format!("r{rule}: r{} \"a\"\n", rule + 1)).collect::<String>();
    for (kind, expected) in [
        (Kind::Regex("(?=a)".to_owned()), "look-around"),
        (Kind::Grammar("start: @input".to_owned()), ""),
        (Kind::Grammar("start: \"a\" | <|end|>".to_owned()), "special token <|end|>"),
        (Kind::Grammar("start: <[1]>".to_owned()), "special token <[1]>"),
        (Kind::Grammar("start: missing".to_owned()), "missing"),
        (Kind::Grammar(format!("start: r0\n{}r9999: \"a\"", nested(9_999))), "limit"),
        (Kind::JsonObject, "grammar"),
        (Kind::CallInputs(Vec::new()), "grammar"),
    ] {
        let error = checked(vec![json_input(kind)]).expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
    let good = || Kind::Regex("a".to_owned());
    assert!(checked(vec![json_input(good()); CALL_INPUTS_MAX]).is_ok());
    assert!(checked(vec![json_input(good()); CALL_INPUTS_MAX + 1]).expect_err("there are too many").contains("limit of 32"));
    let mut empty = json_input(good());
    empty.places[0].begin = Vec::new();
    assert!(checked(vec![empty]).is_err());
}

/// The inputs of a tool. Several of them need escapes in JSON, or contain a part of the closing tag. No white space follows such a part: with
/// one byte changed, the tag would end there, and the naive model knows only one kind of white space between parts.
const INPUTS: [&str; 6] = ["a!", "a", "é\n!", "\"\\!", "</v!x</", ""];

/// Returns all ways to write what follows the name in a call, as JSON and between tags.
fn rests() -> Vec<String> {
    let spaced = |texts: Vec<String>, part: &str| -> Vec<String> {
        texts.iter().flat_map(|text| ["", " "].map(|space| format!("{text}{space}{part}"))).collect()
    };
    let mut rests = Vec::new();
    for input in INPUTS {
        let escaped = input.replace('\\', "\\\\").replace('"', "\\\"");
        for line_feed in ["\\n", "\\u000a", "\\u000A"] {
            let heads = [":", "{", "\""].into_iter().fold(vec![String::new()], spaced);
            let quoted = heads.iter().map(|head| format!("{head}{}\"", escaped.replace('\n', line_feed))).collect();
            rests.extend(spaced(quoted, "}"));
        }
        let tagged = spaced(vec![String::new()], "<v>").iter().map(|head| format!("{head}{input}</v>")).collect();
        rests.extend(spaced(tagged, "</f>"));
    }
    rests
}

/// Returns the number of bytes of the text that are allowed.
fn allowed_naively(text: &[u8], rests: &[String]) -> usize {
    let mut at = 0;
    loop {
        let ends_name = |end: &usize| ["<t>p", "<t> p", "<f>p"].iter().any(|begin| text[at..*end].ends_with(begin.as_bytes()));
        let Some(end) = (at..=text.len()).find(ends_name) else { return text.len() };
        let is_tagged = text[..end].ends_with(b"<f>p");
        let rests = rests.iter().map(String::as_bytes);
        let rests: Vec<&[u8]> = rests.filter(|rest| rest.ends_with(b"</f>") == is_tagged).collect();
        match rests.iter().find(|rest| text[end..].starts_with(rest)) {
            Some(rest) => at = end + rest.len(),
            None => {
                let common = |rest: &&[u8]| rest.iter().zip(&text[end..]).take_while(|(one, other)| one == other).count();
                return end + rests.iter().map(common).max().unwrap_or_default();
            }
        }
    }
}

fn a_piece() -> impl Strategy<Value = Vec<u8>> {
    let call = (select(rests()), any::<bool>()).prop_map(|(rest, spaced)| {
        let begin = if rest.ends_with("</f>") {
            "<f>p"
        } else if spaced {
            "<t> p"
        } else {
            "<t>p"
        };
        format!("{begin}{rest}").into_bytes()
    });
    let changed = (call.clone(), any::<prop::sample::Index>(), select(b"<pa!\"\\}>0".to_vec()));
    let changed = changed.prop_map(|(mut call, at, byte)| {
        let at = at.index(call.len());
        call[at] = byte;
        call
    });
    let free = select(vec!["x", "<t>", "<t", "<t>q", "<f>", "é", "p:{\""]).prop_map(|text| text.as_bytes().to_vec());
    prop_oneof![2 => call, 2 => changed, 1 => free]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_split_of_a_text_into_tokens_is_judged_like_its_bytes(
        pieces in vec(a_piece(), 1..4),
        lengths in vec(1..5_usize, 1..8),
    ) {
        let text = pieces.concat();
        let mut rest = &text[..];
        let mut tokens = Vec::new();
        for length in lengths.iter().cycle() {
            let (token, after) = rest.split_at((*length).min(rest.len()));
            tokens.push(token);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        let mut words = tokens.clone();
        words.sort_unstable();
        words.dedup();
        let grammar = format!("start: {}", INPUTS.map(literal).join(" | "));
        let places = vec![InputPlace::new(&["<t>", "p"], &[":", "{", "\""], None, &["}"]), InputPlace::new(&["<f>p"], &["<v>"], Some("</v>"), &["</f>"])];
        let constraint = Kind::CallInputs(vec![CallInput { places, kind: Kind::Grammar(grammar) }]).into();
        // Every byte is a token too, so that each text can be continued.
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        let singles = bytes.chunks(1).filter(|byte| !words.contains(byte));
        let vocabulary = Vocabulary::new(words.iter().copied().chain(singles).map(|word| (word, false)), words.len() + 256);
        let mut matcher = vocabulary.compile(&constraint, &[]).expect("the grammar can be enforced");
        let (rests, mut end) = (rests(), 0);
        for token in tokens {
            end += token.len();
            let id = words.binary_search(&token).expect("it is a word") as u32;
            let expected = allowed_naively(&text[..end], &rests) == end;
            prop_assert_eq!(allowed_tokens(&mut matcher, &[id]) == 1, expected, "the token up to byte {} of {:?}", end, text);
            if !expected {
                break;
            }
        }
    }
}
