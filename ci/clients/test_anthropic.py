"""The anthropic SDK on /v1/messages."""

import json

import anthropic
import pytest

from checks import LIMIT, WEATHER, City, valid, weather_arguments, whole_blocks
from conftest import AsyncCalls, Calls

ASK = [{"role": "user", "content": "Name three rivers of France, and say where each of them ends."}]
TOOL = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
NAMED = {"type": "tool", "name": "get_weather"}


@pytest.fixture(params=["sync", "async"])
def make(request):
    opened = []

    def make(cluster, **settings):
        client, kind = (anthropic.Anthropic, Calls) if request.param == "sync" else (anthropic.AsyncAnthropic, AsyncCalls)
        opened.append(kind(client(**{"base_url": cluster.url, "api_key": "none", "max_retries": 0, **settings})))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def calls(make, sim):
    return make(sim)


@pytest.fixture
def ask(calls, sim):
    def ask(path="messages.create", temperature=0, **parameters):
        # The SDK has no parameters for sampling any more.
        parameters["extra_body"] = {"temperature": temperature, **parameters.get("extra_body", {})}
        return valid(calls(path, **{"model": sim.model, "messages": ASK, "max_tokens": 24, **parameters}))

    return ask


def prompt_tokens(usage):
    """Anthropic's parts of a prompt add up to its length."""
    return usage.input_tokens + usage.cache_read_input_tokens + (usage.cache_creation_input_tokens or 0)


def test_whole_message(ask, sim):
    message = ask(max_tokens=LIMIT)
    assert (message.type, message.role, message.model, message.stop_reason) == ("message", "assistant", sim.model, "end_turn")
    [block] = message.content
    assert block.type == "text" and block.text and message.id.startswith("msg_") and message._request_id
    assert message.usage.output_tokens > 0


def test_limit_of_tokens(ask):
    message = ask(max_tokens=2)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


def test_usage_has_the_cached_tokens(ask):
    text = "A long prompt that only this test sends, so that the second message finds it in the cache. " * 3
    first, second = (ask(messages=[{"role": "user", "content": text}]).usage for _ in range(2))
    assert prompt_tokens(first) == prompt_tokens(second)
    assert second.cache_read_input_tokens == whole_blocks(prompt_tokens(second)) >= first.cache_read_input_tokens


def test_stream_has_every_event_in_order(ask):
    events = ask(stream=True, max_tokens=LIMIT)
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"] and set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == ask(max_tokens=LIMIT).content[0].text
    assert events[-2].delta.stop_reason == "end_turn" and events[-2].usage.output_tokens > 0


def test_stream_helper(calls, ask, sim):
    parameters = {"model": sim.model, "messages": ASK, "max_tokens": 24, "extra_body": {"temperature": 0}}
    events, final = calls.helper("messages.stream", "get_final_message", **parameters)
    whole = ask()
    assert final.content[0].text == whole.content[0].text == "".join(event.text for event in events if event.type == "text")
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage) and final.usage.output_tokens == whole.usage.output_tokens


def test_stop_sequences(ask):
    whole = ask().content[0].text
    stop = whole[6:9]
    message = ask(stop_sequences=[stop, "\u2603"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == whole[: whole.index(stop)]


def test_system_text_and_blocks_are_the_same(ask):
    blocks = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    assert ask(system="Be short.").content[0].text == ask(system=blocks).content[0].text


def test_content_blocks(ask):
    content = [{"type": "text", "text": ASK[0]["content"], "cache_control": {"type": "ephemeral"}}]
    assert ask(messages=[{"role": "user", "content": content}]).content[0].text == ask().content[0].text


def test_message_is_sent_back_as_it_came(ask):
    first = ask()
    again = ask(messages=[*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Continue."}])
    assert prompt_tokens(again.usage) > prompt_tokens(first.usage)


@pytest.mark.parametrize(
    "parameters",
    [
        {"metadata": {"user_id": "a"}}, {"service_tier": "auto"}, {"thinking": {"type": "disabled"}}, {"tools": []}, {"stop_sequences": []}, {"extra_body": {"top_p": 1}},
        {"cache_control": {"type": "ephemeral"}}, {"extra_headers": {"anthropic-beta": "a"}}, {"stream": False},
    ],
    ids=str,
)
def test_parameter_that_does_not_change_the_message(ask, parameters):
    assert ask(**parameters).content[0].text == ask().content[0].text


def test_top_k(ask):
    assert ask(temperature=1, extra_body={"top_k": 1}).content[0].text == ask().content[0].text


def tool_use(message):
    [block] = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use") and block.id
    weather_arguments(json.dumps(block.input))
    return block


def test_tool_in_two_steps(ask):
    message = ask(tools=[TOOL], tool_choice=NAMED, max_tokens=LIMIT, temperature=1)
    block = tool_use(message)
    asked = [*ASK, {"role": "assistant", "content": message.content}]
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny, 21 degrees."}
    answer = ask(tools=[TOOL], messages=[*asked, {"role": "user", "content": [result]}])
    blocks = ask(tools=[TOOL], messages=[*asked, {"role": "user", "content": [{**result, "content": [{"type": "text", "text": result["content"]}]}]}])
    assert prompt_tokens(blocks.usage) == prompt_tokens(answer.usage) > prompt_tokens(message.usage) > prompt_tokens(ask().usage)
    # The call's arguments and id are random, and so is the answer, which may be empty.
    failed = ask(tools=[TOOL], messages=[*asked, {"role": "user", "content": [{**result, "is_error": True}, {"type": "text", "text": "Try again."}]}])
    assert prompt_tokens(failed.usage) > prompt_tokens(answer.usage)


def test_any_tool(ask):
    tool_use(ask(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=LIMIT, temperature=1))


def test_streamed_tool_use(calls, sim):
    parameters = {"model": sim.model, "messages": ASK, "tools": [TOOL], "tool_choice": NAMED, "max_tokens": LIMIT}
    events, final = calls.helper("messages.stream", "get_final_message", **parameters)
    tool_use(final)
    parts = "".join(event.delta.partial_json for event in events if event.type == "content_block_delta")
    assert json.loads(parts) == final.content[0].input


def test_tool_runner_runs_the_tool(make, sim, request):
    """The runner asks for a conversation that the server keeps; the refusal makes it send the whole conversation with each request."""
    called, asynchronous = [], "async" in request.node.name

    def get_weather(location: str) -> str:
        """Returns the weather of a city.

        Args:
            location: The city.
        """
        called.append(location)
        return "Sunny, 21 degrees."

    async def get_weather_later(location: str) -> str:
        return get_weather(location)

    get_weather_later.__name__, get_weather_later.__doc__ = "get_weather", get_weather.__doc__
    tool = anthropic.beta_async_tool(get_weather_later) if asynchronous else anthropic.beta_tool(get_weather)
    calls = make(sim)
    parameters = {"model": sim.model, "messages": ASK, "tools": [tool], "tool_choice": NAMED, "max_tokens": LIMIT, "max_iterations": 2}
    first, second = calls("beta.messages.tool_runner", **parameters)
    assert len(called) == 2 and prompt_tokens(second.usage) > prompt_tokens(first.usage) + 10, (called, first, second)


def test_parse_with_pydantic(ask):
    message = ask("messages.parse", output_format=City, max_tokens=LIMIT, temperature=1)
    assert isinstance(message.parsed_output, City)


def test_tokens_are_counted_without_an_answer(calls, ask, sim):
    count = lambda **more: calls("messages.count_tokens", model=sim.model, messages=ASK, **more).input_tokens
    assert count() == prompt_tokens(ask().usage)
    assert count(tools=[TOOL], system="Be short.") == prompt_tokens(ask(tools=[TOOL], system="Be short.").usage) > count()


@pytest.mark.parametrize(
    "parameters, kind, named",
    [
        ({"model": "missing"}, anthropic.NotFoundError, "missing"), ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"temperature": 3}, anthropic.BadRequestError, "temperature"), ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 100_000}]}, anthropic.BadRequestError, "prompt is too long"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "a"}}]}]}, anthropic.BadRequestError, "image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        ({"tool_choice": NAMED}, anthropic.BadRequestError, "tool_choice"),
    ],
    ids=["model", "no messages", "temperature", "max_tokens", "context", "image", "server tool", "tool_choice"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_error(ask, parameters, kind, named, stream):
    with pytest.raises(kind) as error:
        ask(**parameters, stream=stream)
    body = error.value.body
    assert body["type"] == "error" and named in body["error"]["message"] and error.value.request_id, body
    assert body["error"]["type"] == ("not_found_error" if kind is anthropic.NotFoundError else "invalid_request_error")


def test_too_many_requests(make, limited):
    import threading

    ask = {"model": limited.model, "messages": ASK}
    client = anthropic.Anthropic(base_url=limited.url, api_key="none")
    first = threading.Thread(target=client.messages.create, kwargs={**ask, "max_tokens": 100, "extra_body": {"ignore_eos": True}})
    first.start()
    limited.wait("the first request runs", lambda: limited.metric("tandem_frontend_inflight_requests") == 1)
    with pytest.raises(anthropic.RateLimitError) as error:
        make(limited)("messages.create", **ask, max_tokens=2)
    assert error.value.body["error"]["type"] == "rate_limit_error"
    assert make(limited, max_retries=5)("messages.create", **ask, max_tokens=2).usage.output_tokens
    first.join()


def test_models(calls, sim):
    assert [model.id for model in calls("models.list").data] == [sim.model]
