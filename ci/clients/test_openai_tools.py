"""The openai SDK with tools, reasoning and pydantic types on /v1/chat/completions."""

import json

import openai
import pytest
from pydantic import BaseModel

from checks import LIMIT, LIMIT_OF_MODEL, WEATHER, City, valid, weather_arguments

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {"type": "function", "function": WEATHER}
CLOCK = {"type": "function", "function": {"name": "get_time", "description": "Returns the time.", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(params=["sim", "smollm"])
def cluster(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def ask(openai_calls, cluster):
    calls = openai_calls(cluster)
    limit = LIMIT if cluster.model == "sim" else LIMIT_OF_MODEL
    defaults = {"model": cluster.model, "messages": ASK, "max_completion_tokens": limit, "tools": [TOOL, CLOCK], "temperature": 0.7, "seed": 1}
    return lambda path="chat.completions.create", **parameters: calls(path, **{**defaults, **parameters})


def call_of(answer):
    choice = valid(answer).choices[0]
    assert choice.finish_reason in ("tool_calls", "stop") and not choice.message.content, choice
    [call] = choice.message.tool_calls
    assert call.type == "function" and call.id
    return call


def test_named_tool(ask):
    call = call_of(ask(tool_choice=NAMED))
    assert call.function.name == "get_weather"
    weather_arguments(call.function.arguments)


def test_required_tool(ask):
    answer = ask(tool_choice="required", parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    call = call_of(answer)
    weather_arguments(call.function.arguments) if call.function.name == "get_weather" else json.loads(call.function.arguments)
    assert call.function.name in ("get_weather", "get_time")


def test_streamed_tool_call(ask):
    chunks = valid(ask(tool_choice=NAMED, stream=True))
    deltas = [delta for chunk in chunks if chunk.choices for delta in chunk.choices[0].delta.tool_calls or []]
    first, *rest = deltas
    assert first.id and first.type == "function" and first.function.name == "get_weather" and first.index == 0
    assert rest and not any(delta.id or delta.function.name for delta in rest), "id and name are sent once, because clients join them"
    weather_arguments("".join(delta.function.arguments or "" for delta in deltas))
    assert not any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)


def test_stream_helper_parses_the_call(openai_calls, sim):
    tool = openai.pydantic_function_tool(City)
    events, final = openai_calls(sim).helper(
        "chat.completions.stream", "get_final_completion", model=sim.model, messages=ASK, tools=[tool], max_completion_tokens=LIMIT,
        tool_choice={"type": "function", "function": {"name": "City"}},
    )
    [call] = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, City)
    assert "tool_calls.function.arguments.delta" in {event.type for event in events}


def test_two_steps(ask):
    call = ask(tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "Sunny, 21 degrees."}
    answer = valid(ask(messages=[*ASK, call, result], max_completion_tokens=16))
    without = ask(messages=[*ASK, call], max_completion_tokens=16)
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens > ask(tools=[], max_completion_tokens=16).usage.prompt_tokens
    for message in ({"role": "assistant", "content": None, "tool_calls": call.model_dump()["tool_calls"]}, call.model_dump(), call.to_dict()):
        parts = {**result, "content": [{"type": "text", "text": result["content"]}]}
        again = ask(messages=[*ASK, message, parts], max_completion_tokens=16)
        assert again.usage.prompt_tokens == answer.usage.prompt_tokens


def test_tool_choice_none_has_no_call(ask):
    answer = ask(tool_choice="none", max_completion_tokens=16)
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_n_answers_call_the_tool(openai_calls, sim):
    answer = openai_calls(sim)("chat.completions.create", model=sim.model, messages=ASK, tools=[TOOL], tool_choice=NAMED, n=2, max_completion_tokens=LIMIT)
    for choice in valid(answer).choices:
        weather_arguments(choice.message.tool_calls[0].function.arguments)


def test_auto_call_is_parsed(ask):
    """A constraint makes the model write a call in its own format, which the server must recognize."""
    written = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"location": "Paris", "unit": "celsius"\}\}\n</tool_call>'
    for stream in (False, True):
        answer = ask(tool_choice="auto", stream=stream, extra_body={"structured_outputs": {"regex": written}})
        if stream:
            deltas = [delta for chunk in valid(answer) if chunk.choices for delta in chunk.choices[0].delta.tool_calls or []]
            name, arguments = deltas[0].function.name, "".join(delta.function.arguments or "" for delta in deltas)
            assert "tool_calls" in {chunk.choices[0].finish_reason for chunk in answer if chunk.choices}
            assert not any(chunk.choices and chunk.choices[0].delta.content for chunk in answer)
        else:
            assert answer.choices[0].finish_reason == "tool_calls"
            function = call_of(answer).function
            name, arguments = function.name, function.arguments
        assert (name, weather_arguments(arguments)) == ("get_weather", {"location": "Paris", "unit": "celsius"})


def test_parse_with_pydantic(ask):
    answer = ask("chat.completions.parse", tools=openai.omit if hasattr(openai, "omit") else openai.NOT_GIVEN, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)


def test_parse_streamed(openai_calls, sim):
    events, final = openai_calls(sim).helper(
        "chat.completions.stream", "get_final_completion", model=sim.model, messages=ASK, response_format=City, max_completion_tokens=LIMIT
    )
    assert isinstance(final.choices[0].message.parsed, City)


class Node(BaseModel):
    label: str
    children: list["Node"]


def test_parse_of_a_recursive_type(openai_calls, sim):
    answer = openai_calls(sim)("chat.completions.parse", model=sim.model, messages=ASK, response_format=Node, max_completion_tokens=20000, seed=4)
    assert isinstance(answer.choices[0].message.parsed, Node)


def test_too_few_tokens_raise_the_sdk_s_error(openai_calls, sim):
    with pytest.raises(openai.LengthFinishReasonError):
        openai_calls(sim)("chat.completions.parse", model=sim.model, messages=ASK, response_format=City, max_completion_tokens=3)


@pytest.mark.parametrize(
    "parameters, named",
    [
        ({"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "code"}}]}, "tools"),
    ],
    ids=str,
)
def test_tools_that_cannot_work_are_refused(ask, parameters, named):
    with pytest.raises(openai.BadRequestError) as error:
        ask(**parameters)
    assert error.value.param.startswith(named), error.value
