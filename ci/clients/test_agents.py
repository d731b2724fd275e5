"""OpenAI's Agents SDK, with its chat completions model and its Responses model."""

import asyncio

import agents
import openai
import pytest

from checks import LIMIT, LIMIT_OF_MODEL, City

ASK = "What is the weather in Paris?"
SETTINGS = {"max_tokens": LIMIT, "temperature": 1.0, "include_usage": True, "extra_body": {"seed": 1}}


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def agent(request):
    def agent(cluster, **settings):
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        model = getattr(agents, request.param)(model=cluster.model, openai_client=client)
        return agents.Agent(name="Guide", instructions="Be short.", model=model, **settings)

    return agent


@pytest.fixture
def weather():
    """A tool that records its calls."""
    calls = []

    @agents.function_tool
    def get_weather(location: str) -> str:
        """Returns the weather of a city."""
        calls.append(location)
        return "Sunny, 21 degrees."

    get_weather.calls = calls
    return get_weather


def run(agent, streamed):
    if not streamed:
        return agents.Runner.run_sync(agent, ASK), []

    async def stream():
        result = agents.Runner.run_streamed(agent, ASK)
        return result, [event async for event in result.stream_events()]

    return asyncio.run(stream())


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_answer(agent, sim, streamed):
    result, _ = run(agent(sim, model_settings=agents.ModelSettings(**SETTINGS)), streamed)
    assert isinstance(result.final_output, str) and result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("choice", ["get_weather", "required"])
def test_tool_is_run_and_its_result_is_used(agent, sim, weather, streamed, choice):
    result, events = run(agent(sim, tools=[weather], model_settings=agents.ModelSettings(tool_choice=choice, **SETTINGS)), streamed)
    assert len(weather.calls) == 1 and isinstance(result.final_output, str) and result.final_output
    kinds = [type(item).__name__ for item in result.new_items]
    assert kinds == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
    names = [event.name for event in events if event.type == "run_item_stream_event"]
    assert names == (["tool_called", "tool_output", "message_output_created"] if streamed else [])
    assert result.context_wrapper.usage.requests == 2


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_output_type(agent, sim, streamed):
    result, _ = run(agent(sim, output_type=City, model_settings=agents.ModelSettings(**SETTINGS)), streamed)
    assert isinstance(result.final_output, City)


def test_handoff(agent, sim):
    to = agent(sim, model_settings=agents.ModelSettings(**SETTINGS))
    to.name = "Expert"
    first = agent(sim, handoffs=[to], model_settings=agents.ModelSettings(tool_choice="required", **SETTINGS))
    result, _ = run(first, False)
    assert result.last_agent.name == "Expert" and result.final_output


def test_conversation_continues(agent, sim):
    guide = agent(sim, model_settings=agents.ModelSettings(**SETTINGS))
    first = agents.Runner.run_sync(guide, ASK)
    second = agents.Runner.run_sync(guide, first.to_input_list() + [{"role": "user", "content": "And in Lyon?"}])
    assert second.final_output and second.context_wrapper.usage.input_tokens > first.context_wrapper.usage.input_tokens


def test_tool_of_a_model(agent, smollm, weather):
    settings = agents.ModelSettings(tool_choice="get_weather", max_tokens=LIMIT_OF_MODEL, temperature=0)
    result, _ = run(agent(smollm, tools=[weather], model_settings=settings), False)
    assert len(weather.calls) == 1 and result.final_output
