//! Tests of the texts that constraints allow and forbid, token by token.

use crate::{
    CHOICES_MAX, CONSTRAINT_BYTES_MAX, Constraint, GrammarError, Kind, MatchError, Matcher, Vocabulary, check,
    schema::{ENUM_VALUES_MAX, PROPERTIES_MAX},
};

/// The id of the only stop token of these tests. The vocabulary of bytes has no token with this id.
const STOP: u32 = 256;

fn vocabulary(more: &[&str]) -> Vocabulary {
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    let all = bytes.chunks(1).map(|byte| (byte, false)).chain([(&b"<|end|>"[..], true)]);
    Vocabulary::new(all.chain(more.iter().map(|token| (token.as_bytes(), false))), 257 + more.len())
}

fn matcher(kind: impl Into<Constraint>) -> Matcher {
    vocabulary(&[]).compile(&kind.into(), &[STOP]).expect("the constraint is valid")
}

fn schema(schema: &str) -> Kind {
    Kind::JsonSchema { schema: schema.to_owned(), lenient: false }
}

/// Appends a text byte by byte. The mask must allow exactly the bytes that the matcher accepts.
fn append(matcher: &mut Matcher, text: &str) -> Result<(), MatchError> {
    for byte in text.bytes().map(u32::from) {
        if matcher.is_complete() {
            return Err(MatchError::NotAllowed);
        }
        let allowed = matcher.mask()?.is_none_or(|mask| mask.allows(byte));
        let accepted = matcher.clone().accept(byte);
        assert_eq!(accepted.is_ok(), allowed, "mask and matcher disagree about {byte} in {text}");
        matcher.accept(byte)?;
    }
    Ok(())
}

fn meets(kind: &Kind, text: &str) -> bool {
    let mut matcher = matcher(kind.clone());
    append(&mut matcher, text).is_ok() && ends(&mut matcher)
}

fn ends(matcher: &mut Matcher) -> bool {
    matcher.is_complete() || matcher.mask().expect("the text can be continued or ended").is_none_or(|mask| mask.allows(STOP))
}

#[test]
fn constraints_allow_exactly_the_specified_texts() {
    let object = r#"{"type":"object","properties":{"a":{"type":"integer","minimum":3,"maximum":12},"b":{"enum":["x","y"]}},"required":["a"],"additionalProperties":false}"#;
    let tree = r##"{"$ref":"#/$defs/n","$defs":{"n":{"type":"object","properties":{"v":{"type":"integer"},"c":{"type":"array","items":{"$ref":"#/$defs/n"}}},"required":["v","c"],"additionalProperties":false}}}"##;
    let ebnf =
        "root ::= greeting \" \" name[0-9]{2,3} # a comment\ngreeting ::= \"Hi\" | \"Hello\"\nname ::= [A-Z] [a-z]* | \"é\"";
    let ambiguous = "root ::= item item\nitem ::= \"ab\" | [a-b] | \"\"";
    let lark = "start: \"a\"+ B\nB: /[0-9]{2}/";
    for (kind, allowed, refused) in [
        (
            schema(object),
            vec![r#"{"a":3}"#, r#"{"a": 12, "b": "y"}"#, "{\n \"a\":7\n}"],
            vec![r#"{"a":2}"#, r#"{"b":"x"}"#, r#"{"a":3,"c":1}"#, r#"{"a":3"#],
        ),
        (schema(tree), vec![r#"{"v":1,"c":[{"v":2,"c":[]}]}"#], vec![r#"{"v":1}"#, r#"{"v":1,"c":[2]}"#]),
        (
            schema(r#"{"anyOf":[{"type":"null"},{"type":"string","pattern":"^[a-c]{2}$"}]}"#),
            vec!["null", r#""ab""#],
            vec![r#""abc""#, "1"],
        ),
        (schema("true"), vec!["1", "[]", r#"{"a":"b"}"#], vec!["", "x"]),
        (Kind::JsonObject, vec!["{}", r#"{"a":[1,{"b":null}]}"#], vec!["[]", "1", "{"]),
        (Kind::Regex("[a-z]+@(x|y)/".into()), vec!["ab@x/", "c@y/"], vec!["@x/", "a@z/", "a@x"]),
        (Kind::Regex("^a+$".into()), vec!["a", "aaa"], vec!["", "ab"]),
        (Kind::Regex(r"a\$".into()), vec!["a$"], vec!["a"]),
        (
            Kind::Choice(vec!["yes".into(), "yes, \"sure\"\n".into(), "no/".into()]),
            vec!["yes", "yes, \"sure\"\n", "no/"],
            vec!["ye", "no", "maybe"],
        ),
        (Kind::Grammar(ebnf.into()), vec!["Hi Ann12", "Hello B123", "Hi é12"], vec!["Hi ann12", "Hi Ann1", "Hi Ann1234"]),
        (Kind::Grammar(ambiguous.into()), vec!["", "a", "ab", "aba", "abab", "bab"], vec!["ababa", "c"]),
        (Kind::Grammar(lark.into()), vec!["a12", "aaa34"], vec!["12", "a1"]),
    ] {
        check(&kind.clone().into()).expect("the constraint is valid");
        for text in allowed {
            assert!(meets(&kind, text), "{kind:?} allows {text:?}");
        }
        for text in refused {
            assert!(!meets(&kind, text), "{kind:?} refuses {text:?}");
        }
    }
}

#[test]
fn structural_tags_constrain_only_the_text_between_tags() {
    let older = r#"{"type":"structural_tag","triggers":["<f"],"structures":[
        {"begin":"<f=a>","schema":{"type":"object","properties":{"x":{"type":"integer"}},"required":["x"],"additionalProperties":false},"end":"</f>"},
        {"begin":"<f=b>","schema":{"type":"null"},"end":"</f>"}]}"#;
    let newer = r#"{"type":"structural_tag","format":{"type":"sequence","elements":[
        {"type":"tag","begin":"<think>","content":{"type":"any_text"},"end":"</think>"},
        {"type":"or","elements":[{"type":"const_string","value":"OK"},{"type":"regex","pattern":"[0-9]/"}]},
        {"type":"tags_with_separator","separator":";","at_least_one":true,"tags":[{"begin":"[","content":{"type":"json_schema","json_schema":{"type":"boolean"}},"end":["]",")"]}]}]}}"#;
    let tags = |text: &str| Kind::StructuralTag(text.to_owned());
    for text in ["", "free < text", "so <f=a>{\"x\":1}</f> and <f=b>null</f>."] {
        assert!(meets(&tags(older), text), "{text}");
    }
    for text in ["<f=c>", "<f=a>1</f>", "<f=b>null"] {
        assert!(!meets(&tags(older), text), "{text}");
    }
    for text in ["<think>so < it</think>OK[true]", "<think></think>3/[true];[false)"] {
        assert!(meets(&tags(newer), text), "{text}");
    }
    for text in ["OK[true]", "<think></think>OK", "<think></think>no[true]", "<think></think>OK[1]"] {
        assert!(!meets(&tags(newer), text), "{text}");
    }
}

#[test]
fn text_ends_only_where_it_is_complete() {
    let mut open = matcher(Kind::Regex("ab*".into()));
    assert!(!ends(&mut open));
    append(&mut open, "a").expect("the text is allowed");
    assert!(!open.is_complete() && ends(&mut open));
    let mut closed = matcher(schema(r#"{"type":"object","properties":{},"additionalProperties":false}"#));
    append(&mut closed, "{").expect("the text is allowed");
    assert!(!closed.is_complete() && !ends(&mut closed));
    append(&mut closed, "}").expect("the text is allowed");
    assert!(closed.is_complete(), "nothing follows an object, not even white space");
}

#[test]
fn text_without_stop_tokens_continues_to_its_longest_form() {
    let mut matcher = vocabulary(&[]).compile(&Kind::Regex("ab?".into()).into(), &[]).expect("the constraint is valid");
    append(&mut matcher, "a").expect("the text is allowed");
    let mask = matcher.mask().expect("the text continues").expect("not all tokens are allowed");
    assert!(mask.allows(b'b'.into()) && !mask.allows(STOP) && mask.first() == u32::from(b'b'));
    append(&mut matcher, "b").expect("the text is allowed");
    assert!(matcher.is_complete());
}

#[test]
fn white_space_in_json_is_bounded() {
    let mut matcher = matcher(Kind::JsonObject);
    append(&mut matcher, &format!("{{{}", " ".repeat(32))).expect("the text is allowed");
    assert!(append(&mut matcher.clone(), " ").is_err());
    append(&mut matcher, "}").expect("the text is allowed");
}

#[test]
fn cloned_matchers_do_not_affect_each_other() {
    let mut one = matcher(Kind::Choice(vec!["ab".into(), "ac".into()]));
    append(&mut one, "a").expect("the text is allowed");
    let mut other = one.clone();
    append(&mut one, "b").expect("the text is allowed");
    assert!(one.is_complete() && !other.is_complete());
    append(&mut other, "c").expect("the text is allowed");
    assert!(other.is_complete());
}

#[test]
fn special_tokens_are_never_part_of_a_text() {
    let mut text = matcher(Kind::Regex("(.|\n)*".into()));
    assert!(text.mask().expect("the text continues").expect("not all tokens are allowed").allows(STOP), "as the end");
    let mut no_end = vocabulary(&[]).compile(&Kind::Regex("(.|\n)*".into()).into(), &[]).expect("the constraint is valid");
    assert!(!no_end.mask().expect("the text continues").expect("not all tokens are allowed").allows(STOP));
    assert_eq!(no_end.accept(STOP), Err(MatchError::NotAllowed));
}

#[test]
fn constraint_begins_after_its_marker() {
    let vocabulary = vocabulary(&["</think>x", ">x", ">\n\n", "think"]);
    let [whole, over, spaces, think] = [257, 258, 259, 260];
    let constraint = Constraint { kind: Kind::Choice(vec!["yes".into()]), begins_after: Some("</think>".into()) };
    let start = vocabulary.compile(&constraint, &[STOP]).expect("the constraint is valid");
    let allows = |matcher: &mut Matcher, token| matcher.mask().expect("the text continues").is_none_or(|mask| mask.allows(token));

    let mut matcher = start.clone();
    assert!(allows(&mut matcher, STOP) && allows(&mut matcher, over) && !allows(&mut matcher, whole));
    append(&mut matcher, "so: <</").expect("free text");
    matcher.accept(think).expect("free text");
    assert!(allows(&mut matcher, spaces) && allows(&mut matcher, b'>'.into()) && !allows(&mut matcher, over));
    assert!(!matcher.is_complete());
    for end in [vec![spaces], vec![u32::from(b'>')]] {
        let mut matcher = matcher.clone();
        end.iter().try_for_each(|token| matcher.accept(*token)).expect("the marker is allowed");
        assert!(allows(&mut matcher, b'y'.into()) && !allows(&mut matcher, b'n'.into()) && !allows(&mut matcher, STOP));
        append(&mut matcher, "yes").expect("the text is allowed");
        assert!(matcher.is_complete());
    }
    assert_eq!(matcher.accept(over), Err(MatchError::NotAllowed));
}

#[test]
fn invalid_constraints_are_refused_with_the_part_at_fault() {
    let nested =
        r#"{"type":"object","properties":{"if":{"type":"string"},"b":{"anyOf":[{"type":"null"},{"type":"object","if":{}}]}}}"#;
    for (kind, expected) in [
        (schema("{"), "not valid JSON"),
        (schema("3"), "a schema must be an object"),
        (schema(nested), "at $.properties.b.anyOf[1], the keyword 'if' is not supported"),
        (schema(r#"{"items":{"type":"string","format":"odd"}}"#), "at $.items, the format 'odd' is not supported"),
        (schema(r#"{"type":"objekt"}"#), "objekt"),
        (schema(r#"{"type":"integer","minimum":3,"maximum":2}"#), "minimum"),
        (schema(r##"{"$ref":"#/$defs/x"}"##), "x"),
        (Kind::Regex("(".into()), "regex"),
        (Kind::Choice(vec![]), "at least one"),
        (Kind::Grammar("start: a".into()), "a"),
        (Kind::Grammar("root ::= a".into()), "the rule 'a' is not defined"),
        (Kind::Grammar("a ::= \"b\"".into()), "'root'"),
        (Kind::Grammar("root ::= \"b".into()), "line 1 of the grammar: expected '\"'"),
        (Kind::Grammar("root ::= a\na ::= (b\nb ::= \"\"".into()), "line 3 of the grammar"),
        (Kind::StructuralTag("{}".into()), "'format'"),
        (Kind::StructuralTag(r#"{"triggers":["<x"],"structures":[{"begin":"<f","schema":{},"end":""}]}"#.into()), "<f"),
        (Kind::Choice(vec![String::new(); CHOICES_MAX + 1]), "choices"),
        (Kind::Regex("a".repeat(CONSTRAINT_BYTES_MAX + 1)), "bytes"),
    ] {
        let error = check(&kind.clone().into()).expect_err("the constraint is invalid").to_string();
        assert!(error.contains(expected), "{kind:?}: {error}");
    }
}

#[test]
fn lenient_schema_ignores_keywords_that_cannot_be_enforced() {
    let odd = r#"{"type":"string","format":"odd","if":{}}"#;
    assert!(matches!(check(&schema(odd).into()), Err(GrammarError::Schema { .. })));
    check(&Kind::JsonSchema { schema: odd.to_owned(), lenient: true }.into()).expect("the schema is used without the format");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the computation itself is timed; there is no clock to pause")]
fn too_complex_constraints_fail_within_bounded_time() {
    let huge = Kind::Regex("(a?){3000}(b?c?){3000}[a-c]{3000}".to_owned());
    let started = std::time::Instant::now();
    if let Ok(mut matcher) = vocabulary(&[]).compile(&huge.into(), &[STOP]) {
        for _ in 0..20 {
            if matcher.mask().is_err() || matcher.accept(b'a'.into()).is_err() {
                break;
            }
        }
    }
    assert!(started.elapsed().as_secs() < 20, "the check took {:?}", started.elapsed());
}

/// Returns a constraint whose rules or definitions form a chain of this length, in every form that a client can write one.
fn chains(links: usize) -> Vec<(&'static str, Kind)> {
    let numbers = || 0..links;
    let rules = |first: &str, last: &str, rule: &dyn Fn(usize) -> String| {
        let all: Vec<String> = numbers().map(rule).collect();
        format!("{first}\n{}\n{last}\n", all.join("\n"))
    };
    let definitions = |body: &dyn Fn(usize) -> String| {
        let all: Vec<String> = numbers().map(|i| format!(r#""d{i}":{}"#, body(i + 1))).collect();
        schema(&format!(r##"{{"$ref":"#/$defs/d0","$defs":{{{},"d{links}":{{"type":"integer"}}}}}}"##, all.join(",")))
    };
    let through = |before: &'static str, after: &'static str| move |i| format!(r##"{before}{{"$ref":"#/$defs/d{i}"}}{after}"##);
    let lark = rules("start: r0", &format!("r{links}: \"a\""), &|i| format!("r{i}: r{}", i + 1));
    let tag = r##"{"format":{"type":"json_schema","json_schema":SCHEMA}}"##;
    let Kind::JsonSchema { schema: plain, .. } = definitions(&through("", "")) else { unreachable!("it is a schema") };
    vec![
        ("nested grammar", Kind::Grammar(format!("start: (%lark {{\n{lark}}})\n"))),
        ("rules", Kind::Grammar(lark)),
        (
            "groups",
            Kind::Grammar(rules("start: (r0 | \"b\")", &format!("r{links}: \"a\""), &|i| format!("r{i}: (\"c\"? (r{}))", i + 1))),
        ),
        ("terminals", Kind::Grammar(rules("start: T0", &format!("T{links}: \"a\""), &|i| format!("T{i}: T{}", i + 1)))),
        ("EBNF", Kind::Grammar(rules("root ::= r0", &format!("r{links} ::= \"a\""), &|i| format!("r{i} ::= r{}", i + 1)))),
        ("references", definitions(&through("", ""))),
        ("properties", definitions(&through(r#"{"type":"object","properties":{"p":"#, "}}"))),
        ("allOf", definitions(&through(r#"{"allOf":["#, "]}"))),
        ("anyOf", definitions(&through(r#"{"anyOf":["#, r#",{"type":"null"}]}"#))),
        ("items", definitions(&through(r#"{"type":"array","items":"#, "}"))),
        ("schema in Lark", Kind::Grammar(format!("start: %json {plain}"))),
        ("schema in a structural tag", Kind::StructuralTag(tag.replace("SCHEMA", &plain))),
    ]
}

#[test]
fn long_chains_of_references_are_refused_by_name() {
    for links in [400, 800, 1_600, 4_000] {
        for (form, kind) in chains(links) {
            let text = match &kind {
                Kind::JsonSchema { schema: text, .. } | Kind::Grammar(text) | Kind::StructuralTag(text) => text,
                other => unreachable!("no chain is a {other:?}"),
            };
            let is_too_large = text.len() > CONSTRAINT_BYTES_MAX;
            let error = check(&kind.clone().into()).expect_err(form).to_string();
            assert!(is_too_large || error.contains("256"), "{form}, {links} links: {error}");
        }
    }
}

#[test]
fn chains_below_the_limit_are_enforced() {
    // Each definition through `properties` or `items` is two levels.
    for (form, kind) in chains(100) {
        check(&kind.into()).unwrap_or_else(|error| panic!("{form}: {error}"));
    }
}

#[test]
fn recursive_rules_and_schemas_are_accepted() {
    let lark = "start: value\nvalue: \"a\" | \"[\" value (\",\" value)* \"]\" // value: r0\n";
    let tree = r##"{"type":"object","properties":{"left":{"$ref":"#"},"right":{"$ref":"#"}}}"##;
    for kind in [Kind::Grammar(lark.into()), schema(tree)] {
        check(&kind.into()).expect("recursion is allowed");
    }
}

#[test]
fn wide_schemas_are_compiled_or_refused_with_place_and_limit() {
    let wide = |properties: usize| {
        let all: Vec<String> = (0..properties).map(|i| format!(r#""p{i}":{{"type":"integer"}}"#)).collect();
        schema(&format!(r#"{{"type":"object","properties":{{"of":{{"type":"object","properties":{{{}}}}}}}}}"#, all.join(",")))
    };
    let mut matcher = matcher(wide(PROPERTIES_MAX));
    for byte in *b"{\"of\":{\"p3\":14,\"p511\":9}}" {
        let mask = matcher.mask().expect("the widest object can be written").expect("not all tokens are allowed");
        assert!(mask.allows(byte.into()), "{:?}", char::from(byte));
        matcher.accept(byte.into()).expect("the token is allowed");
    }
    for properties in [1_000, 2_000, 4_000, 8_000] {
        let error = check(&wide(properties).into()).expect_err("the object is too wide").to_string();
        assert_eq!(error, format!("at $.properties.of, 'properties' has {properties} entries, more than the limit of 512"));
    }
    let values = vec!["1"; ENUM_VALUES_MAX + 1].join(",");
    let error = check(&schema(&format!(r#"{{"enum":[{values}]}}"#)).into()).expect_err("there are too many values").to_string();
    assert!(error.contains("'enum'"), "{error}");
}

#[test]
fn property_that_is_described_twice_is_refused() {
    let score = r#"{"type":"object","properties":{"a":{"type":"object","properties":{"score":{"type":"integer","multipleOf":5}},
        "patternProperties":{"^score$":{"maximum":20}}}},"required":["a"]}"#;
    let error = check(&schema(score).into()).expect_err("both describe the key").to_string();
    assert!(error.starts_with("at $.properties.a, 'properties' and the pattern '^score$'"), "{error}");
    check(&schema(&score.replace("^score$", "^x-")).into()).expect("no key has two schemas");
    check(&Kind::JsonSchema { schema: score.to_owned(), lenient: true }.into()).expect("a lenient schema loses the pattern");
    let large = score.replace("^score$", "^.{1,5000}x$");
    let error = check(&schema(&large).into()).expect_err("the pattern is not compared").to_string();
    assert!(error.starts_with("at $.properties.a, the pattern") && error.contains("too large to be compared"), "{error}");
    check(&Kind::JsonSchema { schema: large, lenient: true }.into()).expect("a lenient schema loses the pattern");
}

#[test]
fn pattern_with_long_repetitions_is_enforced() {
    for pattern in [r"^[\\w ]{1,500}$", "^.{1,5000}$"] {
        let text = format!(r#"{{"type":"string","pattern":"{pattern}"}}"#);
        check(&schema(&text).into()).unwrap_or_else(|error| panic!("{pattern}: {error}"));
    }
}

#[test]
fn pattern_that_cannot_be_enforced_is_refused_with_its_place_or_dropped_if_lenient() {
    for (pattern, cause) in [(r"^(?!\\.)a", "look-around"), (r"(a)\\1", "backreference"), ("^(a$", "unclosed group")] {
        let text = format!(
            r#"{{"anyOf":[{{"type":"null"}},{{"type":"object","properties":{{"to":{{"type":"string","pattern":"{pattern}"}}}}}}]}}"#
        );
        let error = check(&schema(&text).into()).expect_err("the pattern is not supported").to_string();
        assert!(error.starts_with("at $.anyOf[1].properties.to, the pattern '"), "{error}");
        assert!(error.contains(cause), "{error}");
        check(&Kind::JsonSchema { schema: text, lenient: true }.into()).expect("a lenient schema loses the pattern");
        let key = format!(r#"{{"type":"object","patternProperties":{{"{pattern}":{{}}}}}}"#);
        assert!(check(&schema(&key).into()).is_err());
        check(&Kind::JsonSchema { schema: key, lenient: true }.into()).expect("a lenient schema loses the pattern");
    }
}

mod call_inputs;
