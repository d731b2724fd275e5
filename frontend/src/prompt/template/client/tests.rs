use super::*;
use crate::{
    model::ServedModelError,
    prompt::{ChatTemplate, RenderError},
};
use serde_json::json;
use std::thread;

/// Compiles and renders a client's template with two messages, with the stack that it has in a request.
fn render(source: &str) -> Result<String, String> {
    let rendered = || {
        let template = ChatTemplate::of_client(source, "", "").map_err(|error| match error {
            ServedModelError::Template(source) => source.to_string(),
            ServedModelError::TemplateEndless(..) => "steps".to_owned(),
            other => other.to_string(),
        })?;
        let messages = json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }]);
        let variables = serde_json::Map::from_iter([("messages".to_owned(), messages)]);
        template.render(variables, 1 << 20).map_err(|error| match error {
            RenderError::Refused(error) => error.to_string(),
            RenderError::Steps => "steps".to_owned(),
            RenderError::TooLong => "too long".to_owned(),
        })
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, rendered).expect("a thread starts");
        thread.join().expect("the template does not panic")
    })
}

#[test]
fn assignments_keep_their_values_and_the_text_its_white_space() {
    for (source, text) in [
        ("{% set a = 1 %}{{ a }}", "1"),
        ("{% set a = 1, 'b' -%}\n {{ a }}{% set b = 2, %}{{ b }}", "(1, 'b')(2,)"),
        ("{% set a, b = 'x', ['y'] %}\n{{ a }}{{ b }}", "x['y']"),
        ("{% set a = 1 if messages else [2] %}{{ a }}{% set b = {'c': messages[1:]} %}{{ b.c[0].content }}", "1b"),
        ("{% set a %} x {% endset %}[{{ a }}]{% set a | trim | upper %} x {% endset %}{{ a }}", "[ x ]X"),
        (
            "{%- set ns = namespace(a=1, l=[]) -%} {% for m in messages %}{% set ns.a = ns.a + 1 %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.a }}{{ ns.l[1].content }}",
            "3b",
        ),
        (
            "{% set x = '{% set y = 1 %}' %}{{ x }}{# {% set x = ' #}{% raw %}{% set x = 1 %}{% endraw %}",
            "{% set y = 1 %}{% set x = 1 %}",
        ),
        (
            "{% macro f(a, b=[1, 2], c={'d': 3}) -%}\n  {{ a }}{{ b[1] }}{{ c.d }}{{ undefined }}\n{%- endmacro %}{{ f('x') }}{{ f('y', b=[4, 5]) }}",
            "x23y53",
        ),
        ("{% macro f(ns) %}{% set ns.a = 2 %}{% endmacro %}{% set ns = namespace(a=1) %}{{ f(ns) }}{{ ns.a }}", "2"),
        ("{% macro f(v) %}{{ v }}{% if v %}{{ f(v[1:]) }}{% endif %}{% endmacro %}{{ f('abc') }}", "abcbcc"),
    ] {
        assert_eq!(render(source).as_deref(), Ok(text), "{source}");
    }
}

#[test]
fn value_nested_without_limit_is_refused() {
    let deep = "nested more than 200 levels deep";
    let many =
        |body: &str| format!("{{% set ns = namespace(v=1) %}}{{% for i in range(100000) %}}{body}{{% endfor %}}{{{{ ns.v }}}}");
    for (source, problem) in [
        (many("{% set ns.v = [ns.v] %}"), deep),
        (many("{% set ns.v = (ns.v,) %}"), deep),
        (many("{% set ns.v = {'a': ns.v} %}"), deep),
        (many("{% set ns.v = [ns.v]|batch(1) %}"), deep),
        (many("{% set v = [ns.v] %}{% set ns.v = v %}"), deep),
        (many("{% set ns.v, x = [ns.v], 1 %}"), deep),
        (many("{% set ns.v | default([ns.v], true) %}{% endset %}"), deep),
        (many("{% with v = [ns.v] %}{% set ns.v = v %}{% endwith %}"), deep),
        (many("{% for v in [[ns.v]] %}{% set ns.v = v %}{% endfor %}"), deep),
        ("{% set v = 1 %}".to_owned() + &"{% set v = [[[[[[v]]]]]] %}".repeat(100), deep),
        (
            "{% macro f(v, n) %}{% if n %}{{ f([[[[[[[[[[v]]]]]]]]]], n - 1) }}{% endif %}{% endmacro %}{{ f(1, 100) }}"
                .to_owned(),
            deep,
        ),
        ("{% set ns = namespace() %}{% set ns.v = ns %}{{ ns ~ '' }}".to_owned(), "a namespace within another value"),
        ("{% set ns = namespace() %}{% set ns.v = [ns] %}{{ ns ~ '' }}".to_owned(), "a namespace within another value"),
        ("{% set ns = namespace() %}{% set v = {'a': ns} %}".to_owned(), "a namespace within another value"),
        ("{% macro f() %}{% endmacro %}{% set v = f %}".to_owned(), "a macro or another object"),
        ("{% for m in messages %}{% set v = [loop] %}{% endfor %}".to_owned(), "a macro or another object"),
        ("{% for x in [[1]] recursive %}{{ loop(x) }}{% endfor %}".to_owned(), "recursive loops"),
        ("{% include 'chat' %}".to_owned(), "'include' is not supported"),
        ("{% block b %}{{ self.b() }}{% endblock %}".to_owned(), "'block' is not supported"),
    ] {
        let refused = render(&source).expect_err(&source);
        assert!(refused.contains(problem), "{source}: {refused}");
    }
}

#[test]
fn values_that_are_computed_when_they_are_read_do_not_nest() {
    let sliced = "{% set ns = namespace(v=[1, 2]) %}{% for i in range(100000) %}{% set ns.v = ns.v[0:] %}{% endfor %}{{ ns.v }}";
    assert_eq!(render(sliced).as_deref(), Ok("[1, 2]"));
}

#[test]
fn work_for_assignments_is_bounded() {
    let doubled = "{% set ns = namespace(v=1) %}{% for i in range(100) %}{% set ns.v = [ns.v, ns.v] %}{% endfor %}";
    assert!(render(doubled).is_err_and(|error| error.contains("steps")));
}

/// The longest sources whose syntax trees or values are as deep as possible.
#[test]
fn stack_is_enough_for_the_deepest_source() {
    let longest = |begin: &str, body: &str, end: &str| {
        let count = (SOURCE_BYTES_MAX - begin.len()) / (body.len() + end.len());
        begin.to_owned() + &body.repeat(count) + &end.repeat(count)
    };
    let padded = |before: &str, body: &str, after: &str| {
        before.to_owned() + &body.repeat((SOURCE_BYTES_MAX - before.len() - after.len()) / body.len()) + after
    };
    let nested = format!("{{% with v=[{}v{}] %}}", "[".repeat(70), "]".repeat(70));
    for source in [
        padded("{{ 1", "+1", " }}"),
        padded("{{ 1", "~1", " }}"),
        padded("{{ 1", "|e", " }}"),
        padded("{{ a", ".a", " }}"),
        padded("{{ 1", "|batch(1)|list", "|string }}"),
        padded("{{ [1]", "|batch(1)", " ~ '' }}"),
        padded("{% if a %}", "{%elif a%}", "{% endif %}"),
        longest("{{ ", "(", ")"),
        longest("{{ ", "[", "]"),
        longest("", &nested, "{% endwith %}"),
        padded("{{ ", "not ", "1 }}"),
        padded("{{ ", "-", "1 }}"),
    ] {
        // Whether it renders or is refused does not matter.
        let _ = render(&source);
    }
}
