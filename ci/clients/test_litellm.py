"""litellm, as its users reach OpenAI-compatible, vLLM and Anthropic servers."""

import json
import litellm
import pytest

from checks import LIMIT, WEATHER, City

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {"type": "function", "function": WEATHER}


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def provider(request):
    return request.param


@pytest.fixture
def settings(provider, sim):
    base = sim.url if provider == "anthropic" else f"{sim.url}/v1"
    return {"model": f"{provider}/{sim.model}", "api_base": base, "api_key": "none", "num_retries": 0, "max_tokens": 24, "temperature": 0}


@pytest.fixture(params=["sync", "async"])
def complete(request, settings, loop):
    def complete(**parameters):
        parameters = {"messages": ASK, **settings, **parameters}
        return litellm.completion(**parameters) if request.param == "sync" else loop.run_until_complete(collected(parameters))

    async def collected(parameters):
        answer = await litellm.acompletion(**parameters)
        return [chunk async for chunk in answer] if parameters.get("stream") else answer

    return complete


def test_whole_and_streamed(complete):
    answer = complete()
    text = answer.choices[0].message.content
    assert text and answer.usage.completion_tokens > 0 and answer.usage.prompt_tokens_details.cached_tokens is not None
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert litellm.stream_chunk_builder(chunks, messages=ASK).usage.completion_tokens == answer.usage.completion_tokens


def test_cached_tokens(complete):
    messages = [{"role": "user", "content": "A long prompt that only this test sends, so that the second answer finds it in the cache. " * 3}]
    usage = [complete(messages=messages).usage for _ in range(2)][1]
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tool_in_two_steps(complete, stream):
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = complete(tools=[TOOL], tool_choice=named, max_tokens=LIMIT, temperature=1, stream=stream)
    message = (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "get_weather"
    # litellm leaves out `additionalProperties`, so further arguments are possible.
    assert isinstance(json.loads(call.function.arguments)["location"], str)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
    assert complete(messages=[*ASK, message.model_dump(), result], tools=[TOOL]).choices[0].message


def test_response_format(provider, complete):
    if provider == "anthropic":
        # For Anthropic's endpoint litellm turns a format into a tool for models that it knows by name only.
        return
    answer = complete(response_format=City, max_tokens=LIMIT, temperature=1)
    City.model_validate_json(answer.choices[0].message.content)


def test_too_long_prompt(complete):
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(messages=[{"role": "user", "content": "word " * 100_000}])


def test_unknown_model(provider, complete):
    with pytest.raises(litellm.NotFoundError):
        complete(model=f"{provider}/missing")


def test_bad_request(complete):
    with pytest.raises(litellm.BadRequestError):
        complete(temperature=3)


def test_responses(provider, settings):
    if provider == "anthropic":
        return
    response = litellm.responses(input="Hello", **{**settings, "max_output_tokens": settings["max_tokens"], "max_tokens": None})
    assert response.output[0].content[0].text and response.usage.input_tokens_details.cached_tokens is not None
