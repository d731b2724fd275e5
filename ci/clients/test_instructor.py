"""instructor, which returns pydantic objects."""

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from checks import LIMIT, City

ASK = [{"role": "user", "content": "Describe the city Kyoto."}]
MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def client(request):
    def client(cluster, kind=openai.OpenAI):
        return instructor.from_openai(kind(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0), mode=request.param)

    return client


def test_create(client, sim):
    create = client(sim).chat.completions.create_with_completion
    city, answer = create(model=sim.model, messages=ASK, response_model=City, max_retries=0, max_tokens=LIMIT)
    assert isinstance(city, City) and answer.usage.prompt_tokens_details.cached_tokens is not None


def test_create_async(client, sim, loop):
    create = client(sim, openai.AsyncOpenAI).chat.completions.create
    city = loop.run_until_complete(create(model=sim.model, messages=ASK, response_model=City, max_retries=0, max_tokens=LIMIT))
    assert isinstance(city, City)


def test_partial_objects_are_streamed(client, sim):
    cities = list(client(sim).chat.completions.create_partial(model=sim.model, messages=ASK, response_model=City, max_retries=0, max_tokens=LIMIT))
    assert len(cities) > 1 and cities[-1].country in ("France", "Japan")


class Cities(BaseModel):
    model_config = ConfigDict(extra="forbid")
    cities: list[City] = Field(min_length=1, max_length=3)


def test_lists_are_streamed(client, sim):
    # docs/clients.md says why this is not create_iterable.
    parts = list(client(sim).chat.completions.create_partial(model=sim.model, messages=ASK, response_model=Cities, max_retries=0, max_tokens=LIMIT))
    assert len(parts) > 1 and 1 <= len(parts[-1].cities) <= 3
    assert all(city.country in ("France", "Japan") for city in parts[-1].cities)
