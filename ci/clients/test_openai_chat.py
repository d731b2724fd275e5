"""The openai SDK on /v1/chat/completions: every parameter, whole and streamed, sync and async."""

import json
import uuid

import jsonschema
import openai
import pytest

from checks import LIMIT, valid, whole_blocks

ASK = [{"role": "user", "content": "Name three rivers of France, and say where each of them ends."}]


def create(calls, cluster, **parameters):
    parameters = {"messages": ASK, "max_completion_tokens": 24, "temperature": 0, "model": cluster.model, **parameters}
    answer = calls("chat.completions.create", **parameters)
    return answer if isinstance(answer, list) else valid(answer)


def text(answer, choice=0):
    return answer.choices[choice].message.content


@pytest.fixture
def ask(openai_calls, sim):
    calls = openai_calls(sim)
    return lambda **parameters: create(calls, sim, **parameters)


@pytest.fixture
def ask_model(openai_calls, smollm):
    calls = openai_calls(smollm)
    return lambda **parameters: create(calls, smollm, **parameters)


def test_whole_answer(ask, sim):
    answer = ask()
    assert answer.object == "chat.completion" and answer.model == sim.model and answer.id.startswith("chatcmpl-")
    assert answer._request_id, "the SDK reads the request's id from a header"
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length") and choice.message.tool_calls is None
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and usage.completion_tokens <= 24


def test_stream_has_the_text_of_the_whole_answer(ask):
    chunks = valid(ask(stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text(ask())
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] in (["stop"], ["length"])
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_options_include_usage(ask):
    *chunks, last = valid(ask(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}))
    assert last.choices == [] and all(chunk.usage is None for chunk in chunks)
    whole = ask().usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)
    assert last.usage.prompt_tokens_details.cached_tokens is not None


def test_stream_options_continuous_usage_stats(ask):
    chunks = ask(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] > 0


def test_stream_helper_accumulates_the_answer(openai_calls, sim):
    events, final = openai_calls(sim).helper(
        "chat.completions.stream", "get_final_completion", model=sim.model, messages=ASK, max_completion_tokens=2000, temperature=0,
        stream_options={"include_usage": True},
    )
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    assert deltas == text(final) and final.usage.completion_tokens > 0
    assert [event.type for event in events].count("content.done") == 1


def test_usage_has_the_cached_tokens(ask):
    prompt = [{"role": "user", "content": f"{uuid.uuid4()} begins a prompt that no other test sends, so that its first answer has no cache to use."}]
    first, second = (ask(messages=prompt) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens < first.usage.prompt_tokens / 2
    assert second.usage.prompt_tokens_details.cached_tokens == whole_blocks(second.usage.prompt_tokens)


def test_cache_salt_separates_caches(ask):
    cached = lambda salt: ask(extra_body={"cache_salt": salt}).usage.prompt_tokens_details.cached_tokens
    one, other = str(uuid.uuid4()), str(uuid.uuid4())
    assert [cached(one), cached(one) > 0, cached(other)] == [0, True, 0]


def test_temperature_0_is_deterministic(ask):
    assert text(ask()) == text(ask())


def test_seed_repeats_an_answer(ask):
    one, same, other = (text(ask(temperature=1, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("parameters", [{"top_p": 0.01}, {"top_p": 0}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}], ids=str)
def test_parameter_leaves_the_likeliest_token_only(ask, parameters):
    assert text(ask(temperature=1, **parameters)) == text(ask())


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limit_of_tokens(openai_calls, sim, name):
    parameters = {"model": sim.model, "messages": ASK, name: 5, "extra_body": {"ignore_eos": True}}
    answer = valid(openai_calls(sim)("chat.completions.create", **parameters))
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")


def test_min_tokens(ask):
    assert ask(max_completion_tokens=300, extra_body={"min_tokens": 300}).usage.completion_tokens == 300


def test_n_answers(ask):
    answer = ask(n=3, temperature=1, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({text(answer, choice) for choice in range(3)}) == 3
    assert answer.usage.prompt_tokens == ask().usage.prompt_tokens, "a prompt counts once"
    chunks = valid(ask(n=3, temperature=1, seed=5, stream=True))
    parts = [[chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices[0].index == index] for index in range(3)]
    assert ["".join(part) for part in parts] == [text(answer, choice) for choice in range(3)]


@pytest.mark.parametrize("kind", [lambda stop: stop, lambda stop: [stop, "\u2603"]], ids=["string", "list"])
def test_stop(ask, kind):
    whole = text(ask())
    stop = whole[6:9]
    answer = ask(stop=kind(stop))
    assert (text(answer), answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def test_stop_token_ids(ask):
    whole = text(ask())
    answer = ask(extra_body={"stop_token_ids": [ord(whole[6])]})
    assert (text(answer), answer.choices[0].finish_reason) == (whole[: whole.index(whole[6])], "stop")


@pytest.mark.parametrize("parameters", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"extra_body": {"repetition_penalty": 2}}], ids=str)
def test_penalty_changes_the_answer(ask, parameters):
    assert text(ask(max_completion_tokens=60, **parameters)) != text(ask(max_completion_tokens=60))


def test_logit_bias_forbids_and_forces_tokens(ask, ask_model):
    letter = text(ask())[0]
    assert letter not in text(ask(logit_bias={str(ord(letter)): -100}))
    answer = ask_model(logit_bias={"28": 100}, max_completion_tokens=4, logprobs=True)
    assert len({token.token for token in answer.choices[0].logprobs.content}) == 1


def test_logprobs(ask_model):
    answer = ask_model(logprobs=True, top_logprobs=3, max_completion_tokens=8)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens and "".join(token.token for token in tokens) == text(answer)
    for token in tokens:
        assert token.logprob <= 0 and bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token
    chunks = valid(ask_model(logprobs=True, top_logprobs=3, max_completion_tokens=8, stream=True))
    streamed = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in tokens]


@pytest.mark.parametrize(
    "parameters",
    [
        {"user": "a"}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"}, {"safety_identifier": "a"},
        {"prompt_cache_key": "a"}, {"parallel_tool_calls": True}, {"parallel_tool_calls": False}, {"verbosity": "medium"}, {"modalities": ["text"]},
        {"reasoning_effort": "none"}, {"n": 1}, {"tools": []}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"logprobs": False},
        {"frequency_penalty": 0, "presence_penalty": 0.0}, {"top_p": 1}, {"stop": None}, {"logit_bias": {}}, {"stream": False},
        {"extra_body": {"best_of": 1}}, {"extra_body": {"priority": 0}}, {"extra_body": {"detokenize": True}}, {"extra_body": {"max_tokens": 5.0}},
        {"extra_body": {"add_generation_prompt": True}}, {"extra_body": {"unknown_field": 1}},
    ],
    ids=str,
)
def test_parameter_that_does_not_change_the_answer(ask, parameters):
    assert text(ask(**parameters)) == text(ask())


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be short."}, *ASK],
        [{"role": "user", "content": [{"type": "text", "text": "Name a river"}, {"type": "text", "text": " of France."}]}],
        [{"role": "user", "content": "Hello", "name": "Ada"}],
        [*ASK, {"role": "assistant", "content": "The Seine."}, {"role": "user", "content": "And?"}],
        [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "The Seine."}]}, {"role": "user", "content": "And?"}],
        [*ASK, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I would rather not."}]}, {"role": "user", "content": "Why?"}],
        [*ASK, {"role": "assistant", "refusal": "I would rather not.", "content": None}, {"role": "user", "content": "Why?"}],
    ],
    ids=["developer", "parts", "name", "history", "history of parts", "refusal part", "refusal"],
)
def test_messages(ask, messages):
    assert ask(messages=messages).choices


def test_answer_is_sent_back_as_it_came(ask):
    message = ask().choices[0].message
    again = ask(messages=[*ASK, message, {"role": "user", "content": "Continue."}])
    dumped = ask(messages=[*ASK, message.model_dump(), {"role": "user", "content": "Continue."}])
    assert text(again) == text(dumped)


def test_json_object(ask):
    answer = ask(response_format={"type": "json_object"}, max_completion_tokens=LIMIT, temperature=1, seed=3)
    assert answer.choices[0].finish_reason == "stop" and isinstance(json.loads(text(answer)), dict)


SCHEMA = {
    "type": "object",
    "properties": {"river": {"type": "string", "pattern": "^[A-Z][a-z]{2,10}$"}, "length_km": {"type": "integer", "minimum": 1, "maximum": 7000}},
    "required": ["river", "length_km"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_json_schema(ask, stream):
    response_format = {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA, "strict": True}}
    answer = ask(response_format=response_format, max_completion_tokens=2000, temperature=1, stream=stream)
    content = "".join(chunk.choices[0].delta.content or "" for chunk in answer) if stream else text(answer)
    jsonschema.validate(json.loads(content), SCHEMA)


@pytest.mark.parametrize("n", [1, 3])
def test_json_schema_with_a_model(ask_model, n):
    response_format = {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA, "strict": True}}
    answer = ask_model(response_format=response_format, max_completion_tokens=200, temperature=0.7, n=n, logprobs=True)
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and "".join(token.token for token in choice.logprobs.content).startswith(choice.message.content)
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_schema_that_cannot_be_enforced_is_refused(ask):
    schema = {"type": "object", "properties": {"a": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError) as error:
        ask(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}})
    assert error.value.param.startswith("response_format")
