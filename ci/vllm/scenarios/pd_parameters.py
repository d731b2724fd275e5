"""With prefill and decode on two engines, every parameter of a request has the effect that it has on one engine.

Each request is sent to a pair of engines and to a mixed one, greedy, streamed and whole, for chat and completions: answers are equal, with their
logprobs and their usage. The prefill engine's own metrics say that it computes each prompt and one token, whatever the parameters ask for.
"""

import json
import math

from client import Table, prose, wait_until
from cluster import Tandem
from engines import LAYOUTS, MODEL

LAYOUT = LAYOUTS["p+d"]
WORDS = 40
LOGPROB_TOLERANCE = 1e-3
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "travel", "parameters": {"type": "object", "properties": {"to": {"enum": ["Rome", "Oslo"]}}, "required": ["to"]}}}
BOTH, CHAT, COMPLETIONS = ("chat", "completions"), ("chat",), ("completions",)
# The name of a case, the endpoints, the parameters, and the number of prompts in a body. Without max_tokens, 12 tokens are asked for.
CASES = (
    ("plain", BOTH, {}, 1),
    ("min_tokens", BOTH, {"min_tokens": 30, "max_tokens": 36}, 1),
    ("min_tokens and a stop string", BOTH, {"min_tokens": 6, "stop": ["e", "a"], "max_tokens": 24}, 1),
    ("max_tokens 1", BOTH, {"max_tokens": 1}, 1),
    ("max_tokens 0", COMPLETIONS, {"max_tokens": 0}, 1),
    ("max_completion_tokens", CHAT, {"max_completion_tokens": 3}, 1),
    ("n 3", BOTH, {"n": 3}, 1),
    ("stop strings", BOTH, {"stop": ["e", " the", "."], "max_tokens": 24}, 1),
    ("stop tokens", BOTH, {"stop_token_ids": [284, 260, 28], "max_tokens": 24}, 1),
    ("ignore_eos", BOTH, {"ignore_eos": True, "max_tokens": 40}, 1),
    ("logprobs", CHAT, {"logprobs": True, "top_logprobs": 3}, 1),
    ("logprobs", COMPLETIONS, {"logprobs": 3}, 1),
    ("prompt_logprobs", BOTH, {"prompt_logprobs": 2}, 1),
    ("echo with logprobs", COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 4}, 1),
    ("json schema", BOTH, {"response_format": NAMED_SCHEMA, "max_tokens": 60}, 1),
    ("json object", BOTH, {"response_format": {"type": "json_object"}, "max_tokens": 30}, 1),
    ("regex", BOTH, {"structured_outputs": {"regex": "(red|blue)[0-9]{4}"}, "max_tokens": 20}, 1),
    ("choice", BOTH, {"structured_outputs": {"choice": ["river", "mountain"]}, "max_tokens": 20}, 1),
    ("grammar", BOTH, {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}, "max_tokens": 20}, 1),
    ("regex, n 2, logprobs", CHAT, {"structured_outputs": {"regex": "[a-d]{6}"}, "n": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 20}, 1),
    ("required tool", CHAT, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}, 1),
    ("penalties and bias", BOTH, {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {"284": -100}}, 1),
    ("allowed tokens", BOTH, {"allowed_token_ids": [284, 260, 28, 339]}, 1),
    ("bad words", BOTH, {"bad_words": ["the", "a"]}, 1),
    ("4 prompts", COMPLETIONS, {}, 4),
    ("3 prompts, n 2, max_tokens 1", COMPLETIONS, {"n": 2, "max_tokens": 1}, 3),
    ("3 prompts, max_tokens 0", COMPLETIONS, {"max_tokens": 0}, 3),
)
# vLLM's counters of the prefill engine: requests, their prompts' tokens, and their generated tokens.
COUNTERS = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def body(endpoint, name, options, prompts, stream):
    texts = [f"{prose(f'{name} {number}', WORDS)}. Write about it." for number in range(prompts)]
    said = {"messages": [{"role": "user", "content": texts[0]}]} if endpoint == "chat" else {"prompt": texts if prompts > 1 else texts[0]}
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    tokens = {} if "max_completion_tokens" in options else {"max_tokens": 12}
    return {"model": MODEL, "temperature": 0, **tokens, **said, **streamed, **options}


def merged(into, part):
    """Adds a chunk's fields to those of the chunks before it: texts and lists are continued, numbers and names replaced."""
    for key, value in part.items():
        before = into.get(key)
        if value is None or before is None or key in ("role", "id", "type", "index", "finish_reason"):
            into[key] = before if value is None else value
        elif isinstance(value, dict):
            into[key] = merged(dict(before), value)
        elif isinstance(value, (str, list)) and key != "tool_calls":
            into[key] = before + value
        elif key == "tool_calls":
            calls = {call["index"]: call for call in before}
            for call in value:
                calls[call["index"]] = merged(dict(calls.get(call["index"], {})), call)
            into[key] = [calls[index] for index in sorted(calls)]
        else:
            into[key] = value
    return into


def whole(received):
    """Returns the answer's choices and usage, from one object or from the events of a stream."""
    if isinstance(received, dict):
        choices = {choice["index"]: choice for choice in received["choices"]}
        usage, prompt_logprobs = received["usage"], received.get("prompt_logprobs")
    else:
        choices, usage, prompt_logprobs = {}, None, None
        for event in received:
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                choices[choice["index"]] = merged(choices.get(choice["index"], {}), choice)
    answer = {"usage": {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}, "prompt_logprobs": prompt_logprobs}
    for index, choice in sorted(choices.items()):
        message = choice.get("message") or choice.get("delta") or {}
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        answer[index] = {
            "text": choice.get("text", message.get("content")) or "",
            "calls": [(call["name"], call["arguments"]) for call in calls],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice.get("stop_reason"),
            "logprobs": choice.get("logprobs"),
            "prompt_logprobs": choice.get("prompt_logprobs"),
        }
    return answer


def differences(one, other, path=""):
    """Yields where two answers differ; numbers that are not whole may differ by LOGPROB_TOLERANCE."""
    if isinstance(one, float) and isinstance(other, float):
        if not math.isclose(one, other, abs_tol=LOGPROB_TOLERANCE):
            yield f"{path}: {one} and {other}"
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for at, (left, right) in enumerate(zip(one, other)):
            yield from differences(left, right, f"{path}/{at}")
    elif one != other:
        yield f"{path}: {one!r} and {other!r}"


def check_effect(name, answer):
    """Checks that the parameter of this case had its effect at all."""
    choices = [answer[index] for index in answer if isinstance(index, int)]
    text, tokens = choices[0]["text"], answer["usage"]["completion_tokens"]
    if name == "min_tokens":
        assert tokens >= 30, tokens
    elif name == "json schema":
        assert set(json.loads(text)) == {"name", "age"}, text
    elif name == "choice":
        assert text in ("river", "mountain"), text
    elif name == "required tool":
        assert choices[0]["calls"] and choices[0]["finish_reason"] == "tool_calls", choices[0]
    elif name == "max_tokens 0":
        assert (text, tokens) == ("", 0), answer
    elif name == "ignore_eos":
        assert tokens == 40, tokens
    elif name == "stop strings":
        assert not any(stop in text for stop in ("e", " the", ".")), text
    elif name == "n 3":
        assert len(choices) == 3, answer
    elif name in ("4 prompts", "3 prompts, n 2, max_tokens 1"):
        assert len(choices) == (4 if name == "4 prompts" else 6), answer


class Counted:
    """What the prefill engine's metrics counted since the last call."""

    def __init__(self, engine):
        self.engine = engine
        self.last = self.now()

    def now(self):
        return [int(self.engine.metric(name)) for name in COUNTERS]

    def since(self, idle):
        wait_until("the prefill engine is idle", lambda: self.engine.metric("vllm:num_requests_running") == 0 and idle(), 60)
        now, before = self.now(), self.last
        self.last = now
        return [new - old for new, old in zip(now, before)]


def scenario(stage):
    prefill, decode = stage.engines["prefill"], stage.engines["decode"]
    table = Table("parameters", "endpoint", "streamed", "prompts × n", "usage", "prefill engine: requests, prompt tokens, generated", "equal to one engine")
    wrong = []
    with Tandem(stage) as tandem:
        pair = tandem.up("parameters-pd", [decode], [prefill], "--prefill", "remote")
        mixed = tandem.up("parameters-mixed", [decode])
        counted = Counted(prefill)
        for name, endpoints, options, prompts in CASES:
            for endpoint in endpoints:
                path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[endpoint]
                for stream in (False, True):
                    if stream and "prompt_logprobs" in options:
                        continue
                    request = body(endpoint, f"{name} {endpoint} {stream}", options, prompts, stream)
                    (status, one), (expected_status, other) = pair.post(path, request), mixed.post(path, request)
                    case = f"{name}, {endpoint}, {'streamed' if stream else 'whole'}"
                    if (status, expected_status) != (200, 200):
                        wrong.append(f"{case}: HTTP {status} {one}; one engine: HTTP {expected_status} {other}")
                        table.row(name, endpoint, stream, "", "", "", f"HTTP {status} and {expected_status}")
                        counted.since(lambda: True)
                        continue
                    answer, expected = whole(one), whole(other)
                    found = list(differences(answer, expected))
                    requests, prompt_tokens, generated = counted.since(lambda: pair.metric("tandem_router_bookings") == 0)
                    usage = answer["usage"]
                    samples = sum(isinstance(index, int) for index in answer)
                    table.row(name, endpoint, "yes" if stream else "no", samples, f"{usage['prompt_tokens']} + {usage['completion_tokens']}", f"{requests}, {prompt_tokens}, {generated}", "no" if found else "yes")
                    wrong += [f"{case}: {difference}" for difference in found[:3]]
                    # Only the engine that generates can report the logprobs of prompts, so it also prefills.
                    expects = (0, 0, 0) if "prompt_logprobs" in options or options.get("echo") else (prompts, usage["prompt_tokens"], prompts)
                    if (requests, prompt_tokens, generated) != expects:
                        wrong.append(f"{case}: the prefill engine counted {requests} requests, {prompt_tokens} prompt tokens and {generated} generated, not {expects}")
                    try:
                        check_effect(name, answer)
                    except AssertionError as error:
                        wrong.append(f"{case}: no effect: {error}")
    assert not wrong, f"{len(wrong)} differences:\n" + "\n".join(wrong)
