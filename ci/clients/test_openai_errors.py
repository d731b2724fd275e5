"""Errors as the exception classes of the openai SDK."""

import openai
import pytest

ASK = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def calls(openai_calls, sim):
    return openai_calls(sim)


def refused(calls, cluster, path="chat.completions.create", kind=openai.BadRequestError, **parameters):
    if path == "chat.completions.create":
        parameters = {"messages": ASK, **parameters}
    with pytest.raises(kind) as error:
        calls(path, **{"model": cluster.model, **parameters})
    assert error.value.message and error.value.request_id, error.value
    return error.value


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_unknown_model(calls, sim, stream):
    error = refused(calls, sim, kind=openai.NotFoundError, model="missing", stream=stream)
    assert (error.status_code, error.code, error.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_too_long_prompt(calls, sim, stream):
    error = refused(calls, sim, messages=[{"role": "user", "content": "word " * 100_000}], stream=stream)
    assert (error.code, error.type) == ("context_length_exceeded", "invalid_request_error")


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "a"}}


@pytest.mark.parametrize(
    "parameters, named",
    [
        ({"messages": []}, "messages"), ({"temperature": 3}, "temperature"), ({"top_p": 1.5}, "top_p"), ({"n": 0}, "n"), ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"presence_penalty": -3}, "presence_penalty"), ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"), ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"), ({"seed": "a"}, "seed"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"), ({"messages": [{"role": "user", "content": [AUDIO]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [FILE]}]}, "messages[0].content[0]"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}, ""), ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"), ({"messages": ASK * 20_000}, "messages"),
        ({"functions": [{"name": "a", "parameters": {}}]}, "functions"), ({"response_format": {"type": "no such type"}}, "response_format"),
        ({"extra_body": {"kv_transfer_params": {"a": 1}}}, "kv_transfer_params"), ({"extra_body": {"nvext": {"a": 1}}}, "nvext"), ({"extra_body": {"think": True}}, "think"),
        ({"extra_body": {"options": {"num_ctx": 1}}}, "options"), ({"extra_body": {"logits_processors": ["a"]}}, "logits_processors"),
    ],
    ids=str,
)
def test_parameter_is_refused_by_name(calls, sim, parameters, named):
    error = refused(calls, sim, **parameters)
    assert error.status_code == 400 and error.param.startswith(named) and (named or "audio").split("[")[0] in error.message, error.body


def test_too_many_requests(openai_calls, limited):
    error = refused(openai_calls(limited), limited, n=2, kind=openai.APIStatusError)
    assert error.status_code in (400, 429)


def test_slow_answer_times_out(openai_calls, limited):
    calls = openai_calls(limited, timeout=0.2)
    with pytest.raises(openai.APITimeoutError):
        calls("chat.completions.create", model=limited.model, messages=ASK, max_completion_tokens=2000, extra_body={"ignore_eos": True})
    limited.wait("the abandoned request has ended", lambda: limited.metric("tandem_frontend_inflight_requests") == 0)


def test_retries_wait_for_a_free_place(openai_calls, limited):
    """The SDK repeats a request that was refused with 429 after the time that the answer names."""
    import threading

    first = threading.Thread(
        target=openai.OpenAI(base_url=f"{limited.url}/v1", api_key="none").chat.completions.create,
        kwargs={"model": limited.model, "messages": ASK, "max_completion_tokens": 100, "extra_body": {"ignore_eos": True}},
    )
    first.start()
    limited.wait("the first request runs", lambda: limited.metric("tandem_frontend_inflight_requests") == 1)
    ask = {"model": limited.model, "messages": ASK, "max_completion_tokens": 2}
    with pytest.raises(openai.RateLimitError) as error:
        openai_calls(limited)("chat.completions.create", **ask)
    assert error.value.response.headers["retry-after"]
    assert openai_calls(limited, max_retries=5)("chat.completions.create", **ask).choices
    first.join()


@pytest.mark.parametrize(
    "path, parameters",
    [
        ("embeddings.create", {"input": "a"}), ("moderations.create", {"input": "a"}), ("images.generate", {"prompt": "a"}),
        ("audio.speech.create", {"input": "a", "voice": "alloy"}),
    ],
)
def test_endpoint_that_is_not_served(calls, sim, path, parameters):
    error = refused(calls, sim, path, openai.APIStatusError, **parameters)
    assert 400 <= error.status_code < 502 and error.type and len(error.message) > 20, error.body


def test_unreachable_server(openai_calls, sim):
    class Elsewhere:
        url, model = "http://127.0.0.1:9", sim.model

    with pytest.raises(openai.APIConnectionError):
        openai_calls(Elsewhere)("chat.completions.create", model=sim.model, messages=ASK)


def test_models(calls, sim):
    models = calls("models.list").data
    assert [model.id for model in models] == [sim.model]
    assert calls("models.retrieve", sim.model).id == sim.model
    with pytest.raises(openai.NotFoundError):
        calls("models.retrieve", "missing")
