"""Limits what JSON Schema cannot: the sum of a request's tokens, fields that must agree with each other, and texts in other languages (grammars,
regular expressions, schemas). Only valid values are changed, to other valid ones, so that valid requests stay valid and invalid ones invalid."""

import schemathesis

TOKENS_MAX = 8
LIMITS = {"max_tokens", "max_completion_tokens"}
SAMPLES_MAX = 2
OBJECT = {"type": "object"}
GRAMMAR = 'root ::= "a"'
TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": OBJECT, "end": "</a>"}], "triggers": ["<a>"]}


def limit(fields, name, maximum):
    value = fields.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and maximum < value <= 131_072:
        fields[name] = maximum


def is_text(value):
    return isinstance(value, str) and value != ""


def is_schema(value):
    return isinstance(value, (dict, str))


def is_choice(value):
    return isinstance(value, list) and value != [] and all(isinstance(text, str) for text in value)


def is_switch(value):
    return value is None or isinstance(value, bool)


# For each constraint on the text: what a valid value looks like, and a value that a grammar can be made from.
FORMS = {
    "guided_json": (is_schema, OBJECT),
    "guided_regex": (is_text, "a+"),
    "guided_choice": (is_choice, ["a", "b"]),
    "guided_grammar": (is_text, GRAMMAR),
    "structural_tag": (is_schema, TAG),
    "json_schema": (is_schema, OBJECT),
    "regex": (is_text, "a+"),
    "ebnf": (is_text, GRAMMAR),
    "grammar": (is_text, GRAMMAR),
}
OUTPUTS = {"json": (is_schema, OBJECT), "regex": (is_text, "a+"), "choice": (is_choice, ["a"]), "grammar": (is_text, GRAMMAR),
           "structural_tag": (is_schema, TAG), "json_object": (lambda value: value is True, True)}


def constraint(name, value):
    """Returns a simple valid value in place of a valid one; None: the value is not valid."""
    if name in FORMS:
        valid, simple = FORMS[name]
        return simple if valid(value) else None
    if not isinstance(value, dict):
        return None
    if name == "structured_outputs":
        given = {key: part for key, part in value.items() if part is not None}
        if len(given) != 1 or not set(given) <= set(OUTPUTS):
            return None
        ((key, part),) = given.items()
        valid, simple = OUTPUTS[key]
        return {key: simple} if valid(part) else None
    kind, named = value.get("type"), value.get("json_schema")
    if kind == "json_object" and (value.get("schema") is None or is_schema(value["schema"])):
        return {"type": "json_object"}
    if kind == "structural_tag":
        return TAG
    if kind == "json_schema" and isinstance(named, dict) and is_text(named.get("name")) and is_schema(named.get("schema")):
        if is_switch(named.get("strict")):
            return {"type": "json_schema", "json_schema": {**named, "schema": OBJECT}}
    return None


def is_filled(value):
    return isinstance(value, list) and value != []


def simplify_constraints(fields):
    # Few tokens meet a constraint, so it cannot be combined with limits on the tokens.
    first = True if is_filled(fields.get("allowed_token_ids")) or is_filled(fields.get("bad_words")) else None
    for name in [*FORMS, "structured_outputs", "response_format"]:
        simple = constraint(name, fields.get(name))
        if simple is None:
            continue
        if first is None:
            first = fields[name] = simple
        else:
            del fields[name]


def simplify_tools(fields):
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    for number, function in enumerate(function for function in functions if isinstance(function, dict)):
        if is_text(function.get("name")) and len(function["name"]) <= 256:
            function["name"] = f"f{number}"
        if isinstance(function.get("parameters"), dict):
            function["parameters"] = OBJECT
    if choice == "required":
        fields["tool_choice"] = "auto"
    if isinstance(choice, dict):
        function, allowed = choice.get("function"), choice.get("allowed_tools")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        listed = isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required") and isinstance(allowed.get("tools"), list)
        names = [tool.get("function") for tool in allowed["tools"] if isinstance(tool, dict)] if listed else []
        listed = listed and names != [] and all(isinstance(name, dict) and isinstance(name.get("name"), str) for name in names)
        if choice.get("type") in ("function", None) and named or choice.get("type") == "allowed_tools" and listed:
            fields["tool_choice"] = "auto"


@schemathesis.hook
def before_call(context, case, kwargs):
    if not isinstance(case.body, dict):
        return
    for fields in (case.body, case.body.get("sampling_params")):
        if not isinstance(fields, dict):
            continue
        for name in LIMITS:
            limit(fields, name, TOKENS_MAX)
        # Without a limit, an answer fills the context, which takes long.
        if fields is not case.body or "messages" in fields or "prompt" in fields:
            if all(fields.get(name) is None for name in LIMITS):
                fields["max_tokens"] = TOKENS_MAX
        limit(fields, "min_tokens", 0 if fields.get("max_tokens") == 0 else 1)
        limit(fields, "n", SAMPLES_MAX)
        limit(fields, "best_of", SAMPLES_MAX)
        if fields.get("best_of") in (1, 2) and fields.get("n", 1) in (None, 1, 2):
            fields["best_of"] = fields.get("n") or 1
        simplify_constraints(fields)
        simplify_tools(fields)
