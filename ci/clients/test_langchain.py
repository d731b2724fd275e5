"""LangChain's ChatOpenAI: answers, streams, tools, structured outputs, on chat completions and on the Responses API."""

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from checks import LIMIT, LIMIT_OF_MODEL, City

ASK = "What is the weather in Paris?"


@tool
def get_weather(location: str) -> str:
    """Returns the weather of a city."""
    return "Sunny, 21 degrees."


@pytest.fixture(params=["chat", "responses"])
def make(request):
    return lambda cluster, **settings: ChatOpenAI(
        **{"model": cluster.model, "base_url": f"{cluster.url}/v1", "api_key": "none", "max_retries": 0, "max_tokens": LIMIT, "extra_body": {"seed": 1}, **settings},
        use_responses_api=request.param == "responses",
    )


@pytest.fixture(params=["invoke", "ainvoke"])
def run(request, loop):
    """Runs a chain, sync or async."""
    return lambda chain, given: chain.invoke(given) if request.param == "invoke" else loop.run_until_complete(chain.ainvoke(given))


def test_invoke(make, run, sim):
    answer = run(make(sim, temperature=0), ASK)
    assert answer.text and answer.usage_metadata["output_tokens"] > 0
    assert answer.usage_metadata["input_token_details"]["cache_read"] >= 0


def test_stream(make, sim):
    model = make(sim, temperature=0, stream_usage=True)
    chunks = list(model.stream(ASK))
    assert "".join(chunk.text for chunk in chunks) == model.invoke(ASK).text
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


def test_batch(make, sim):
    assert all(answer.text for answer in make(sim, max_tokens=16, temperature=0).batch([ASK, "Hello", "And?"]))


@pytest.mark.parametrize("choice", ["get_weather", "any"])
def test_bind_tools_in_two_steps(make, run, sim, choice):
    model = make(sim)
    call = run(model.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False), ASK)
    [asked] = call.tool_calls
    assert asked["name"] == "get_weather" and isinstance(asked["args"]["location"], str)
    result = ToolMessage(get_weather.invoke(asked["args"]), tool_call_id=asked["id"])
    # The call's arguments and id are random, and so is the answer, which may be empty.
    answer = run(model.bind_tools([get_weather]), [HumanMessage(ASK), call, result])
    assert answer.usage_metadata["input_tokens"] > call.usage_metadata["input_tokens"]


def test_bind_tools_streamed(make, sim):
    first, *rest = make(sim).bind_tools([get_weather], tool_choice="get_weather").stream(ASK)
    for chunk in rest:
        first = first + chunk
    assert first.tool_calls[0]["name"] == "get_weather" and isinstance(first.tool_calls[0]["args"]["location"], str)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_with_structured_output(make, run, sim, method):
    assert isinstance(run(make(sim).with_structured_output(City, method=method), ASK), City)


def test_with_structured_output_of_a_model(make, run, smollm):
    assert isinstance(run(make(smollm, max_tokens=LIMIT_OF_MODEL).with_structured_output(City), "Describe the city Kyoto."), City)


def test_json_mode(make, sim):
    answer = make(sim, seed=3).with_structured_output(method="json_mode") if make(sim).use_responses_api is False else None
    assert answer is None or isinstance(answer.invoke(ASK), dict)
