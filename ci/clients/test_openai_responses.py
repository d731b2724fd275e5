"""The openai SDK on /v1/responses."""

import json

import openai
import pytest

from checks import LIMIT, WEATHER, City, valid, weather_arguments, whole_blocks

INPUT = "Name three rivers of France, and say where each of them ends."
TOOL = {"type": "function", "strict": True, **WEATHER}
NAMED = {"type": "function", "name": "get_weather"}


@pytest.fixture
def calls(openai_calls, sim):
    return openai_calls(sim)


@pytest.fixture
def respond(calls, sim):
    def respond(path="responses.create", **parameters):
        answer = calls(path, **{"model": sim.model, "input": INPUT, "max_output_tokens": 24, "temperature": 0, **parameters})
        # The SDK's own type of a parsed answer does not validate.
        answer = answer if path == "responses.parse" else valid(answer)
        if isinstance(answer, list):
            assert [event.sequence_number for event in answer] == list(range(len(answer)))
        return answer

    return respond


def test_whole_response(respond, sim):
    response = respond(max_output_tokens=LIMIT)
    assert (response.object, response.status, response.model) == ("response", "completed", sim.model) and response.id.startswith("resp_")
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert response.output_text == message.content[0].text != "" and response._request_id
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_limit_of_tokens_makes_the_response_incomplete(respond):
    response = respond(max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason, response.usage.output_tokens) == ("incomplete", "max_output_tokens", 2)
    assert respond(max_output_tokens=2, stream=True)[-1].type == "response.incomplete"


def test_usage_has_the_cached_tokens(respond):
    text = "A long input that only this test sends, so that the second response finds it in the cache. " * 3
    first, second = (respond(input=text).usage for _ in range(2))
    assert second.input_tokens_details.cached_tokens == whole_blocks(second.input_tokens) >= first.input_tokens_details.cached_tokens


def test_stream_has_every_event_in_order(respond):
    events = respond(stream=True, max_output_tokens=LIMIT)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-4].text == events[-1].response.output_text == respond(max_output_tokens=LIMIT).output_text
    assert events[-1].response.usage.output_tokens > 0 and events[0].response.id == events[-1].response.id


def test_stream_helper(calls, sim):
    events, final = calls.helper("responses.stream", "get_final_response", model=sim.model, input=INPUT, text_format=City, max_output_tokens=LIMIT)
    assert isinstance(final.output_parsed, City) and events[-1].type == "response.completed"


def test_parse_with_pydantic(respond):
    assert isinstance(respond("responses.parse", text_format=City, max_output_tokens=LIMIT, temperature=1).output_parsed, City)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_text_format(respond, kind):
    schema = {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}}
    response = respond(text={"format": {"type": kind, **(schema if kind == "json_schema" else {})}}, max_output_tokens=LIMIT, temperature=1)
    assert isinstance(json.loads(response.output_text), dict)


def test_tool_in_two_steps(respond):
    response = respond(tools=[TOOL], tool_choice=NAMED, max_output_tokens=LIMIT, temperature=1)
    [call] = response.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed") and call.call_id
    weather_arguments(call.arguments)
    question = {"role": "user", "content": INPUT}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}
    short = respond(input=[question, *response.output], tools=[TOOL])
    answer = respond(input=[question, *response.output, result], tools=[TOOL])
    assert answer.usage.input_tokens > short.usage.input_tokens > response.usage.input_tokens
    dumped = respond(input=[question, *(item.model_dump() for item in response.output), result], tools=[TOOL])
    assert dumped.usage.input_tokens == answer.usage.input_tokens


def test_streamed_tool_call(respond):
    events = respond(tools=[TOOL], tool_choice=NAMED, max_output_tokens=LIMIT, temperature=1, stream=True)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == events[-3].arguments == events[-1].response.output[0].arguments
    weather_arguments(deltas)


def test_required_tool(respond):
    [call] = respond(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_output_tokens=LIMIT, temperature=1).output
    assert call.name == "get_weather"


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": INPUT}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": INPUT}]}],
    ],
    ids=["easy", "parts"],
)
def test_input_items_are_the_same_prompt(respond, given):
    assert respond(input=given).output_text == respond().output_text


def test_instructions_are_a_system_message(respond):
    given = [{"role": "system", "content": "Be short."}, {"role": "user", "content": INPUT}]
    developer = [{"role": "developer", "content": "Be short."}, given[1]]
    assert respond(instructions="Be short.").output_text == respond(input=given).output_text == respond(input=developer).output_text


def test_response_is_sent_back_as_input(respond):
    first = respond()
    again = respond(input=[{"role": "user", "content": INPUT}, *first.output, {"role": "user", "content": "Continue."}])
    assert again.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_logprobs(respond):
    response = respond(include=["message.output_text.logprobs"], top_logprobs=2)
    part = response.output[0].content[0]
    assert "".join(token.token for token in part.logprobs) == part.text and len(part.logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize(
    "parameters",
    [
        {"store": False}, {"metadata": {"a": "b"}}, {"user": "a"}, {"parallel_tool_calls": True}, {"truncation": "disabled"}, {"service_tier": "auto"},
        {"include": []}, {"tools": []}, {"tool_choice": "none"}, {"text": {"format": {"type": "text"}}}, {"background": False}, {"prompt_cache_key": "a"},
        {"reasoning": {"effort": "none"}}, {"top_p": 1}, {"safety_identifier": "a"}, {"previous_response_id": None}, {"stream": False},
    ],
    ids=str,
)
def test_parameter_that_does_not_change_the_response(respond, parameters):
    assert respond(**parameters).output_text == respond().output_text


@pytest.mark.parametrize(
    "parameters, named",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"background": True}, "background"), ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"), ({"tools": [{"type": "custom"}]}, "tools"), ({"input": []}, "input"), ({"temperature": 3}, "temperature"), ({"prompt": {"id": "a"}}, "prompt"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]}]}, "input"),
        ({"text": {"format": {"type": "no such type"}}}, "text"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
    ids=str,
)
def test_parameter_is_refused_by_name(respond, parameters, named):
    with pytest.raises(openai.BadRequestError) as error:
        respond(**parameters)
    assert error.value.param.startswith(named), error.value.body


def test_unknown_model_and_unknown_response(calls):
    with pytest.raises(openai.NotFoundError):
        calls("responses.create", model="missing", input=INPUT)
    with pytest.raises(openai.APIStatusError) as error:
        calls("responses.retrieve", "resp_1")
    assert error.value.status_code in (404, 405)


def test_input_tokens_are_counted_without_an_answer(calls, respond, sim):
    assert calls("responses.input_tokens.count", model=sim.model, input=INPUT).input_tokens == respond().usage.input_tokens
