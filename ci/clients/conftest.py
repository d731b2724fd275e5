"""Fixtures of the client tests. ci/clients.sh starts pytest and sets the environment."""

import asyncio
import functools
import inspect
import os

import pytest

from cluster import Cluster

# The simulated device needs no real time; answers with a schema may be long, because its text is random.
SIM = ("--engine", "sim", "--sim-speedup", "1000")
SMOLLM = "SmolLM2-135M-Instruct"


def start(name, model, *arguments):
    cluster = Cluster(os.environ["CLIENTS_TANDEM"], os.environ["CLIENTS_LOGS"], name, model, *arguments)
    try:
        yield cluster
        cluster.check()
    finally:
        cluster.end()


@pytest.fixture(scope="session")
def sim():
    """A cluster without a model: each byte is a token, and the text is random but deterministic."""
    yield from start("sim", "sim", *SIM)


@pytest.fixture(scope="session")
def smollm():
    """A cluster with the default model on this machine's CPU."""
    yield from start("smollm", SMOLLM, "--model", os.environ["CLIENTS_MODEL"], "--served-model-name", SMOLLM)


@pytest.fixture(scope="session")
def limited():
    """A cluster on which each client may run one sequence at a time."""
    yield from start("limited", "sim", "--engine", "sim", "--max-sequences-per-account", "1")


class Calls:
    """The methods of an SDK's client, sync or async, as plain functions."""

    def __init__(self, client):
        self.client = client

    def __call__(self, path, *arguments, **parameters):
        """Calls the method at `path`, such as "chat.completions.create", and returns its answer; of a stream, the list of its events."""
        return self._finish(functools.reduce(getattr, path.split("."), self.client)(*arguments, **parameters))

    def helper(self, path, final, **parameters):
        """Runs a streaming helper, such as "chat.completions.stream". Returns the list of its events and the result of its method `final`."""
        return self._finish(functools.reduce(getattr, path.split("."), self.client)(**parameters), final)

    def _finish(self, answer, final=None):
        if final is not None:
            with answer as stream:
                return list(stream), getattr(stream, final)()
        return list(answer) if hasattr(answer, "__next__") else answer

    def close(self):
        self.client.close()


class AsyncCalls(Calls):
    def __init__(self, client):
        self.client, self.loop = client, asyncio.new_event_loop()

    def _finish(self, answer, final=None):
        return self.loop.run_until_complete(self._awaited(answer, final))

    async def _awaited(self, answer, final):
        if final is not None:
            async with answer as stream:
                return [event async for event in stream], await getattr(stream, final)()
        if inspect.isawaitable(answer):
            answer = await answer
        return [event async for event in answer] if hasattr(answer, "__anext__") else answer

    def close(self):
        self.loop.run_until_complete(self.client.close())
        self.loop.close()


@pytest.fixture(scope="session")
def loop():
    """One event loop for libraries that keep connections from call to call."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(params=["sync", "async"])
def openai_calls(request):
    """Returns a function that makes the openai SDK's sync or async client of a cluster."""
    import openai

    opened = []

    def calls(cluster, **settings):
        client, kind = (openai.OpenAI, Calls) if request.param == "sync" else (openai.AsyncOpenAI, AsyncCalls)
        settings = {"base_url": f"{cluster.url}/v1", "api_key": "none", "max_retries": 0, **settings}
        opened.append(kind(client(**settings)))
        return opened[-1]

    yield calls
    for each in opened:
        each.close()
