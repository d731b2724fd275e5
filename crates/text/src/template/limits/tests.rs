use crate::{ChatTemplate, RenderError, ServedModelError};
use serde_json::json;

const SOURCE_BYTES_MAX: usize = super::super::SOURCE_BYTES_MAX;

/// Compiles and renders a template with two messages.
fn render(source: &str) -> Result<String, String> {
    let template = ChatTemplate::new(source, "", "").map_err(|error| match error {
        ServedModelError::Template(source) => source.to_string(),
        ServedModelError::TemplateEndless(..) => "exhausted".to_owned(),
        other => other.to_string(),
    })?;
    let messages = json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }]);
    let variables = serde_json::Map::from_iter([("messages".to_owned(), messages), ("go".to_owned(), true.into())]);
    template.render(variables, 1 << 20).map_err(|error| match error {
        RenderError::Refused(error) => error.to_string(),
        RenderError::Exhausted => "exhausted".to_owned(),
        RenderError::TooLong => "too long".to_owned(),
        RenderError::Failed(error) => error.to_string(),
    })
}

#[test]
fn limit_checks_change_neither_rendered_values_nor_white_space() {
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
        ("{{ 2 * 3 }}{{ 'ab' * 2 }}{{ [1] * 2 }}{{ (1,) * 2 }}{{ 2 * 'c' }}{{ 1.5 * 2 }}", "6abab[1, 1](1, 1)cc3.0"),
        ("{% macro f(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ f(*[1, 2]) }}{{ [2]|length * 3 }}{{ -1 * 2 }}", "123-2"),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{{ m.role }}{% endfor %}",
            "2assistant",
        ),
        ("{% for m in messages %}{% set outer = loop %}{% for n in [1] %}{{ outer.index }}{% endfor %}{% endfor %}", "12"),
        (
            "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% macro f() %}m{% endmacro %}{% set g = f %}{{ g() }}",
            "abm",
        ),
        (
            "{{ '%03d|%s'|format(7, 'x') }}{{ 'a-b'.replace('-', '+') }}{{ ['a', 'b']|join('/') }}{{ '/'.join(['c', 'd']) }}",
            "007|xa+ba/bc/d",
        ),
        (
            "{{ 'a b'.split() }}{{ 'a,b'.split(',') }}{{ 'a\nb'|indent(2) }}{{ 'ab'|list }}{{ [1, 2]|sum }}",
            "['a', 'b']['a', 'b']a\n  b['a', 'b']3",
        ),
        ("{{ [1, 2, 3]|batch(2)|list }}{{ 1 < 2 < 3 }}{{ 'a' in 'ab' and 2 is divisibleby 2 }}", "[[1, 2], [3]]TrueTrue"),
    ] {
        assert_eq!(render(source).as_deref(), Ok(text), "{source}");
    }
}

#[test]
fn value_nested_without_limit_is_refused() {
    let deep = "nested more than 200 levels deep";
    let many =
        |body: &str| format!("{{% set ns = namespace(v=1) %}}{{% for i in range(90000) %}}{body}{{% endfor %}}{{{{ ns.v }}}}");
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
        ("{% set ns = namespace() %}{% set ns.v = ns %}{{ ns ~ '' }}".to_owned(), "a namespace"),
        ("{% set ns = namespace() %}{% set ns.v = [ns] %}{{ ns ~ '' }}".to_owned(), "a namespace"),
        ("{% set ns = namespace() %}{% set v = {'a': ns} %}".to_owned(), "a namespace"),
        ("{% for m in messages %}{% set v = [loop] %}{% endfor %}".to_owned(), "a macro or another object"),
        ("{% for x in [1] recursive %}{{ loop([[x]]) }}{% endfor %}".to_owned(), deep),
        ("{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}".to_owned(), "recursion limit exceeded"),
        ("{% include 'chat' %}".to_owned(), "non-existing template"),
        ("{% block b %}{{ self.b() }}{% endblock %}".to_owned(), "recursion limit exceeded"),
    ] {
        let refused = render(&source).expect_err(&source);
        assert!(refused.contains(problem), "{source}: {refused}");
    }
}

#[test]
fn lazily_computed_values_do_not_nest() {
    let sliced = "{% set ns = namespace(v=[1, 2]) %}{% for i in range(90000) %}{% set ns.v = ns.v[0:] %}{% endfor %}{{ ns.v }}";
    assert_eq!(render(sliced).as_deref(), Ok("[1, 2]"));
}

/// Each of these templates would take gigabytes or minutes, but not for the conversations that are rendered when a template is loaded.
#[test]
fn work_and_memory_of_a_rendering_are_bounded() {
    const MEGABYTE: &str = "{% set mb = 'x\ny ' * 250000 %}";
    let many = |count: usize, body: &str| (0..count).map(|number| body.replace('#', &number.to_string())).collect::<String>();
    let times = |count: usize, body: &str| {
        format!("{{% set ns = namespace(x='x' * 1000, l=[1]) %}}{{% for i in range({count}) %}}{body}{{% endfor %}}")
    };
    for body in [
        times(28, "{% set ns.x = ns.x ~ ns.x %}"),
        times(28, "{% set ns.x = ns.x + ns.x %}"),
        times(28, "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}"),
        times(28, "{% set ns.x = ns.x|replace('x', 'xx') %}"),
        times(28, "{% set ns.x = ns.x.replace('x', 'xx') %}"),
        times(28, "{% set ns.x = [ns.x, ns.x]|join %}"),
        times(28, "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        times(100, "{% set ns.l = [ns.l, ns.l] %}"),
        times(100, "{% set ns.l = ns.l + ns.l %}"),
        times(100, "{% set ns.l = {'a': ns.l, 'b': ns.l} %}"),
        "{{ '%1000000000d'|format(1) }}".to_owned(),
        "{{ '%*d'|format(1000000000, 1) }}".to_owned(),
        "{{ '{:1000000000}'.format(1) }}".to_owned(),
        "{{ 'x\ny'|indent(2000000000) }}".to_owned(),
        "{{ 'x\ny'|indent(width=2000000000) }}".to_owned(),
        "{{ range(10)|batch(3000000000, 'x')|list }}".to_owned(),
        "{{ range(10)|slice(300000000)|list }}".to_owned(),
        "{{ 'x' * 1000000000 }}".to_owned(),
        "{{ (1,) * 100000000 }}".to_owned(),
        "{{ 100000000 * [1] }}".to_owned(),
        MEGABYTE.to_owned() + "{{ range(100000)|join(mb) }}{{ mb|replace('', mb) }}",
        MEGABYTE.to_owned() + "{{ mb.join(range(100000)|list|string) }}",
        "{{ ['%9000000000d']|map('format', 1)|list }}".to_owned(),
        "{{ ['x\ny']|map('indent', 9000000000)|list }}".to_owned(),
        "{{ [['x\ny']]|map('map', 'indent', 9000000000)|list }}".to_owned(),
        MEGABYTE.to_owned() + "{{ [mb]|map('replace', 'x', mb)|list }}",
        MEGABYTE.to_owned() + "{{ [" + &"mb[1:],".repeat(9_000) + "] }}",
        MEGABYTE.to_owned() + "{% set n = namespace() %}" + &many(1_000, "{% set n.a# = mb %}") + "{{ n }}",
        MEGABYTE.to_owned() + "{% set n = namespace() %}" + &many(2_000, "{% set n.a# = mb %}") + "{{ n ~ '' }}",
        MEGABYTE.to_owned() + "{% set n = namespace(a=mb) %}{{ [" + &"n,".repeat(9_000) + "] ~ '' }}",
        MEGABYTE.to_owned() + "{{ cycler(" + &"mb,".repeat(200) + ") }}",
        "{{ ('x' * 200000)|list|reject('in', ('y' * 200000)|list)|list }}".to_owned(),
        "{{ ('x' * 200000)|list|selectattr('a', 'in', ('y' * 200000)|list)|list }}".to_owned(),
        MEGABYTE.to_owned() + "{{ [mb] * 10000 ~ '' }}",
        MEGABYTE.to_owned() + "{{ [[mb, mb, mb]] * 100000 ~ '' }}",
        MEGABYTE.to_owned() + "{{ ([[0] * 1000] * 100)|tojson(indent=mb) }}{{ ([0] * 100000)|tojson(separators=[mb, mb]) }}",
        MEGABYTE.to_owned() + "{% for i in range(100000) %}{% set x = mb|upper %}{% endfor %}",
        MEGABYTE.to_owned()
            + "{% for i in range(100000) %}{% for j in range(100000) %}{% if mb == mb ~ '' %}{% endif %}{% endfor %}{% endfor %}",
        MEGABYTE.to_owned()
            + "{% for i in range(100000) %}{% for j in range(100000) %}{% if 'q' in mb %}{% endif %}{% endfor %}{% endfor %}",
        "{% set s = 'x' * 100000 %}{% for i in range(100000) %}{% for j in range(100000) %}{% set x %}".to_owned()
            + &"x".repeat(10_000)
            + "{% endset %}{% endfor %}{% endfor %}",
    ] {
        let source = format!("{{% if go %}}{body}{{% endif %}}ok");
        let found = render(&source);
        assert!(
            found.as_ref().is_err_and(|error| ["exhausted", "too long"].contains(&error.as_str())),
            "{}: {found:?}",
            &body[..body.len().min(200)]
        );
    }
}

/// Each source has the maximum length, and the deepest syntax tree or value that this length permits.
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
    for source in ["{{ x".to_owned() + &".a".repeat(100_000) + " }}", "{{ ".to_owned() + &"not ".repeat(100_000) + "1 }}"] {
        let refused = render(&source).expect_err("the template is too long");
        assert!(refused.starts_with("the model file's chat template has"), "{refused}");
    }
}
