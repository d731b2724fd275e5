"""Small templates for make_templates.py. Each uses one part of the template language as chat templates do. A template without a context gets
the variables of CONTEXT."""

CONTEXT = {
    "text": " Hello, World! \n", "word": "straße", "number": 42, "negative": -7, "real": 0.1, "whole": 3.0, "tiny": 1e-05, "huge": 1e22, "yes": True,
    "nothing": None, "empty": "", "list": [3, 1, 2], "words": ["b", "A", "c", "a"], "mixed": [1, "two", 3.0, None, True, ["x"], {"k": "v"}],
    "object": {"z": 1, "a": [1, 2], "m": {"y": None, "x": "é"}}, "numbers": {"10": "ten", "9": "nine"},
    "methods": {"items": "i", "keys": "k", "values": "v", "get": "g"},
    "html": "<a href=\"x\">&'</a>", "awkward": "tab\t line\n quote\" back\\slash \x00\x1f\x7f\u2028 🦀",
    "messages": [
        {"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]},
        {"role": "tool", "content": "T"}, {"role": "user", "content": "V"},
    ],
}

TEMPLATES = [
    # How values are printed.
    "{{ yes }} {{ not yes }} {{ nothing }} {{ missing }} {{ number }} {{ negative }} {{ whole }} {{ real }}",
    "{{ tiny }} {{ huge }} {{ 1e16 }} {{ 1e15 }} {{ 123456789.0 }} {{ 1.5e300 }} {{ 0.0001 }} {{ 0.00001 }} {{ -0.0 }}",
    "{{ list }} {{ words }} {{ mixed }} {{ object }} {{ [] }} {{ {} }}", "{{ (1, 2) }} {{ (1,) }} {{ ('a', 'b')[1] }}",
    "{{ [\"it's\", 'say \"x\"', 'both \\' and \"', 'back\\\\slash', 'line\\nend'] }}", "{{ [awkward] }}", "{{ [html] }} {{ html }}",
    "{{ [tiny, huge, whole] }} {{ {'a': tiny, 1: none} }}", "{{ list[1:] }} {{ words[:2] }} {{ messages[1:][0].role }}",
    "{{ 'a' ~ yes ~ nothing ~ missing ~ 1 ~ whole ~ list }}", "{{ [yes, nothing, 1, 'x'] | join('-') }}", "{{ words | join }} {{ [] | join(',') }}",
    "{{ yes | string }} {{ nothing | string }} {{ whole | string }} {{ mixed | string }} {{ tiny | string }} {{ huge | string }}",
    "{{ [tiny, huge] | join(' ') }}", "{{ missing | string }}|{{ missing | list }}|{{ missing | join }}|{{ missing | length }}|{{ missing | trim }}|",
    # Filter tojson.
    "{{ object | tojson }}", "{{ mixed | tojson }}", "{{ html | tojson }} {{ awkward | tojson }}", "{{ object | tojson(indent=4) }}", "{{ object | tojson(indent=0) }}",
    "{{ object | tojson(indent='--') }}", "{{ object | tojson(sort_keys=true) }}", "{{ object | tojson(separators=(',', ':')) }}",
    "{{ object | tojson(separators=(',', ':'), indent=1) }}", "{{ [word, awkward] | tojson(ensure_ascii=true) }}", "{{ {} | tojson }} {{ [] | tojson(indent=2) }} {{ {} | tojson(indent=2) }}",
    "{{ [tiny, huge, real, whole, 1e16, 123.456, -0.0] | tojson }}", "{{ {1: 'a', 2.5: 'b', none: 'd'} | tojson }}", "{{ (1, 'a') | tojson }}",
    "{{ numbers | tojson(sort_keys=true) }}", "{{ missing | tojson }}", "{{ text | tojson | length }}", "{{ [1, [2, [3, {'a': []}]]] | tojson(indent=2) }}",
    "{{ object | tojson(false) }}", "{{ word | tojson(true) }}", "{{ list[1:] | tojson }}", "{{ messages | map(attribute='role') | list | tojson }}", "{{ '\\ud83e\\udd80' | tojson }}",
    # Undefined values.
    "{{ missing.attribute }}", "{{ missing['key'] }}", "{{ nothing.attribute is defined }} {{ nothing['key'] is defined }}", "{{ object.missing is defined }} {{ object['missing'] is none }}",
    "{{ object.missing.deeper }}", "{{ missing + 'x' }}", "{{ missing ~ 'x' }}", "{{ 'x' in missing }}", "{{ missing == none }} {{ missing == '' }} {{ missing == missing }} {{ not missing }}",
    "{% for x in missing %}x{% else %}none{% endfor %}", "{{ missing | default('d') }} {{ nothing | default('d') }} {{ nothing | default('d', true) }} {{ empty | default('e', boolean=true) }}",
    "{{ missing is undefined }} {{ missing is none }} {{ missing is string }} {{ missing is mapping }} {{ missing is iterable }} {{ missing is sequence }}", 
    "{{ nothing | length }}", "{{ 5 | length }}", "{{ missing() }}", "{{ missing.method() }}", "{{ 'abc'.missing is defined }}", "{{ words.missing is defined }}", "{{ words[9] is defined }} {{ words[-9] is defined }}",
    "{{ 'abc'[9] is defined }}", "{{ (missing or 'x') }} {{ (nothing or 0) }} {{ ('' and 'x') }} {{ (1 and 2) }} {{ ([] or {}) }}",
    # Tests.
    "{{ text is string }} {{ list is string }} {{ text is iterable }} {{ text is sequence }} {{ object is sequence }} {{ object is iterable }} {{ object is mapping }} {{ list is sequence }} {{ number is iterable }}",
    "{{ messages[1:] is sequence }} {{ messages[1:] is iterable }} {{ messages[1:] is mapping }}", "{{ yes is number }} {{ yes is integer }} {{ yes is boolean }} {{ number is integer }} {{ whole is integer }} {{ whole is float }} {{ number is number }} {{ number is boolean }}",
    "{{ yes is true }} {{ 1 is true }} {{ yes is sameas(true) }} {{ 0 is false }}", "{{ number is even }} {{ negative is odd }} {{ number is divisibleby(7) }} {{ number is divisibleby 4 }}",
    "{{ 'tojson' is filter }} {{ 'nope' is filter }} {{ 'string' is test }}", "{{ 1 is in [1] }} {{ 'x' is in 'xyz' }} {{ 3 is not in list }}",
    "{{ 'a' is eq 'a' }} {{ 2 is gt 1 }} {{ 1 is ne 1 }} {{ 'abc' is lower }} {{ 'ABC' is upper }}", "{{ nothing is not none }} {{ not nothing is defined }}",
    # Operators.
    "{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 4 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 1 + 2 * 3 }} {{ 7.5 // 2 }} {{ 1 + 1.0 }} {{ true + 1 }}", "{{ 'ab' * 3 }} {{ [1] * 2 }} {{ [1] + [2] }} {{ 'a' + 'b' }}",
    "{{ 'a' + 1 }}", "{{ '%s is %d' | format('x', 3) }}", "{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ none == false }} {{ '1' == 1 }}",
    "{{ not 1 in [2] }} {{ 1 not in [2] }} {{ 'key' in {'key': 1} }} {{ 'ell' in 'Hello' }}", "{{ -1 | abs }} {{ -negative }}", "{{ 'a' ~ 1 + 2 }}", "{{ 1 if yes else 2 }} {{ 1 if missing }}|{{ 'x' if nothing else 'y' if yes else 'z' }}",
    "{{ (1 == 1) != (2 == 2) }} {{ (messages[0]['role'] == 'user') != (0 % 2 == 0) }}", "{{ [1, 2] == (1, 2) }} {{ {'a': 1} == {'a': 1.0} }}", "{{ list[0] }} {{ list[-1] }} {{ list[:2] }} {{ list[::-1] }} {{ text[1:6] }} {{ text[::-1] }} {{ text[-3:] }} {{ word[4] }}",
    "{{ list[1:9] }} {{ list[5:] }} {{ list[-9:2] }} {{ text[3:1] }}|{{ list[:-1] }} {{ list[::2] }}", "{{ 'a' 'b' }}", "{{ object['a'][1] }} {{ object.a.1 }} {{ object.m.x }}", "{{ 1 / 0 }}", "{{ 0x1f }} {{ 1_000 }} {{ 1e3 }}",
    # Strings and their methods.
    "{{ 'a\\nb' }} {{ 'a\\tb' }} {{ 'a\\\\b' }} {{ 'a\\'b' }} {{ '\\u00e9' }} {{ '\\x41' }} {{ '\\d' }} {{ 'line\nbreak' }}", "{{ text.strip() }}|{{ text.lstrip() }}|{{ text.rstrip() }}|{{ text.strip(' \\n!') }}|", "{{ '\x1c\x85 x \u3000\x1f'.strip() }}|{{ '\x1c x \x1f' | trim }}|{{ '--x-'.strip('-') }}",
    "{{ '\ufeff x'.strip() }}|{{ '\u200b x'.strip() }}", "{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a b c'.split(' ', 1) }} {{ 'a b c d'.split(none, 2) }} {{ 'a-b-c'.rsplit('-', 1) }} {{ ''.split() }} {{ ''.split(',') }}",
    "{{ 'a b c'.split(maxsplit=1) }} {{ 'a-b'.split(sep='-') }}", "{{ 'a</think>b</think>c'.split('</think>')[-1] }} {{ 'a</think>b'.split('</think>')[0].split('<think>')[-1].lstrip('\\n') }}", "{{ 'one\\ntwo\\r\\nthree\\x0bfour\\u2028five\\n'.splitlines() }} {{ 'a\\nb'.splitlines(true) }}",
    "{{ text.upper() }} {{ text.lower() }} {{ word.upper() }} {{ 'hello world'.title() }} {{ \"don't stop\".title() }} {{ 'hELLO'.capitalize() }}",
    "{{ text | upper }} {{ text | lower }} {{ 'hello world' | title }} {{ \"don't stop\" | title }} {{ 'hELLO' | capitalize }}", "{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abc'.startswith('b', 1) }} {{ 'a'.endswith('') }}",
    "{{ 'abcabc'.replace('b', 'X') }} {{ 'abcabc'.replace('b', 'X', 1) }} {{ 'abc' | replace('c', '') }} {{ 'aaa' | replace('a', 'b', 2) }} {{ 'ab'.replace('', '-') }}", "{{ 'abcb'.find('b') }} {{ 'abcb'.rfind('b') }} {{ 'abc'.find('z') }} {{ 'abcb'.index('c') }} {{ 'abcb'.count('b') }} {{ 'éa'.find('a') }} {{ 'abcb'.find('b', 2) }}", "{{ 'abc'.index('z') }}",
    "{{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.suffix'.removesuffix('.suffix') }} {{ 'x'.removeprefix('y') }}", "{{ 'k=v=w'.partition('=') }} {{ 'k=v=w'.rpartition('=') }} {{ 'kv'.partition('=') }}",
    "{{ '12'.isdigit() }} {{ 'a1'.isalnum() }} {{ 'ab'.isalpha() }} {{ ' '.isspace() }} {{ ''.isspace() }} {{ 'Ab'.isupper() }} {{ 'ab'.islower() }}",
    "{{ '-'.join(['a', 'b']) }} {{ ', '.join(words) }} {{ ''.join([]) }}", "{{ '{} and {}'.format('a', 1) }} {{ '{x}'.format(x=2) }} {{ '{0:>5}|{0:<5}|{1:.2f}'.format('a', 3.14159) }}", "{{ 'abc'.nope() }}", "{{ text | trim | length }} {{ 'é' | length }} {{ '👩‍👩‍👧' | length }}",
    "{{ 'x' | indent(4) }} {{ 'a\\nb\\n\\nc' | indent(2) }}|{{ 'a\\nb' | indent(2, true) }}|{{ 'a\\n\\nb' | indent(width=1, blank=true) }}", "{{ 'abc' | first }} {{ 'abc' | last }} {{ 'abc' | reverse }} {{ 'abc' | list }}", "{{ html | escape }} {{ html | e }} {{ html | safe }}",
    "{{ 'İ'.lower() | length }} {{ 'ΑΣ'.lower() }} {{ 'ŉ'.upper() }}",
    # Lists, dictionaries and their methods.
    "{% for key, value in object.items() %}{{ key }}={{ value }};{% endfor %}", "{% for key in object %}{{ key }};{% endfor %}", "{% for key, value in object | items %}{{ key }}={{ value }};{% endfor %}", "{% for key, value in object | dictsort %}{{ key }}={{ value }};{% endfor %}",
    "{{ object.keys() | list }} {{ object.values() | list }} {{ object | list }} {{ object | length }}", "{{ object.get('z') }} {{ object.get('missing') }} {{ object.get('missing', 'd') }}", "{% for k, v in methods.items() %}{{ k }}{{ v }}{% endfor %} {{ methods.get('get') }} {{ methods['items'] }} {{ methods.keys() | list }}",
    "{{ list.index(1) }} {{ list.count(3) }}", "{{ list.append(4) }}", "{{ object.update({'b': 1}) }}", "{{ object.copy() }} {{ list.copy() }}", "{{ dict(a=1, b='x') }} {{ dict({'a': 1}, b=2) }}", "{{ {'b': 1, 'a': 2} | dictsort }} {{ {'b': 1, 'a': 2} | dictsort(by='value') }}",
    "{{ words | sort }} {{ words | sort(case_sensitive=true) }} {{ list | sort(reverse=true) }} {{ list | reverse | list }} {{ list | sum }} {{ list | min }} {{ list | max }}", "{{ messages | map(attribute='role') | join(',') }} {{ words | map('upper') | list }} {{ [' a '] | map('trim') | list }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('role', '==', 'user') | map(attribute='role') | list }} {{ messages | selectattr('tool_calls', 'defined') | list | length }} {{ messages | selectattr('content') | list | length }}",
    "{{ [1, 0, none, 'x', ''] | select | list }} {{ [1, 2, 3] | select('odd') | list }} {{ [1, 2, 3] | reject('odd') | list }} {{ [1, 2] | select('in', [2]) | list }}", "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}", "{{ (messages | first).role }} {{ [] | first }} {{ [] | last }}",
    "{{ [1, 1, 2] | unique | list }} {{ range(5) | batch(2) | list }} {{ range(5) | slice(2) | list }} {{ range(3) | list }} {{ range(2, 8, 3) | list }} {{ range(3, 0, -1) | list }}", "{% for role, group in messages | groupby('role') %}{{ role }}:{{ group | length }};{% endfor %}", "{{ '3' | int }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ 3.9 | int }} {{ '3.5' | float }} {{ 3 | float }} {{ 3.14159 | round(2) }} {{ 2.5 | round }} {{ true | int }}",
    # Statements.
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = i %}{% endfor %}{{ x }}", "{% set ns = namespace(x=1, found=false) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }} {{ ns.found }}", "{% if true %}{% set y = 2 %}{% endif %}{{ y }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set block %}in {{ number }}{% endset %}[{{ block }}]",
    "{% set block | upper %}in{% endset %}{{ block }}", "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.previtem.role if not loop.first }}{{ loop.nextitem.role if loop.nextitem is defined }};{% endfor %}", "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% else %}none{% endfor %}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}", "{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}", "{% for i in [1, 2] %}{% for j in [1, 2] %}{{ loop.index }}{% endfor %}{{ loop.cycle('a', 'b') }}{% endfor %}", "{% for x in [1, [2, [3]]] recursive %}{% if x is number %}{{ x }}{% else %}({{ loop(x) }}){% endif %}{% endfor %}",
    "{% macro greet(name, greeting='Hi', loud=false) %}{{ greeting }} {{ name }}{{ '!' if loud }}{% endmacro %}{{ greet('A') }} {{ greet('B', loud=true) }} {{ greet(greeting='Yo', name='C') }} {{ greet() }}|", "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}in{% endcall %}", "{% macro f(x) %}{% if x > 0 %}{{ x }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "{% macro late() %}{{ defined_later }}{% endmacro %}{% set defined_later = 'x' %}{{ late() }}", "{% set early = 'x' %}{% macro use() %}{{ early }}{% endmacro %}{{ use() }}{% set early = 'y' %}{{ use() }}", "{% macro space() %} x {% endmacro %}{{ space() | trim }}{{ space() }}{{ space() is string }}", "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}", "{% filter upper %}a{{ 'b' }}{% endfilter %}", "{% raw %}{{ x }}{% endraw %}",
    "{% generation %}{{ number }}{% endgeneration %}", "a\n{%- generation -%}\n b {%- endgeneration %}\nc", "{% for m in messages %}\n{% generation %}\n{{ m.role }}\n{% endgeneration %}\n{% endfor %}", "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "{%- generation %}\n  x\n{%- endgeneration %}",
    "{{ raise_exception('no ' ~ number) }}", "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%d %b %Y') }} {{ strftime_now('%A, %d %B %Y %H:%M:%S %p %I %j %y %a %%') }} {{ strftime_now('%-d %e') }}", "{% set ns = namespace() %}{% set ns.a = 1 %}{{ ns.a }} {{ ns.b is defined }}",
    "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% endif %}{{ system }}{{ loop_messages | length }}{{ loop_messages[0].role }}{{ loop_messages[-1].content }}", "{% set messages = messages + [{'role': 'x'}] %}{{ messages | length }} {{ messages[-1].role }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }} {% set j = joiner(', ') %}{{ j() }}x{{ j() }}y", "{% do 1 %}", "{% include 'x' %}", "{% unknown %}", "{{ 'x' | nope }}", "{{ x is nope }}", "{% block b %}in block{% endblock %}", "{% if %}",
    # White space.
    "  {% if true %}\n  a\n  {% endif %}\nb\n", "  {%- if true -%}\n  a\n  {%- endif -%}\nb\n\n", "x {{- 'y' -}} z", "{% if true +%}\na{% endif %}", "  {%+ if true %}a{% endif %}", "{# comment #}\nx\n  {# comment #}\n  y", "a  {#- comment -#}  b", "\r\n{% if true %}\r\nx\r\n{% endif %}\r\n", "{{ 'a\r\nb' }}", "a\rb\n", "\n{{ 'x' }}\n\n", "a\n\t{% if true %}\n\tb\n\t{% endif %}\nc", "{% for i in [1, 2] %}\n- {{ i }}\n{% endfor %}\nend",
    "x  {% if true %}y{% endif %}  z", "{% if true %} {% endif %}|{% if true %}\n\n{% endif %}", "\u3000{%- if true %}x{% endif %}", "{{ '\\r\\n' }}", "{%if true%}x{%endif%}", "{{number}}{{-number}}{{ - number }}", "{% if true -%}   x   {%- endif %}",
]
