"""The openai SDK on /v1/completions, and parameters of vLLM and SGLang on both endpoints."""

import json

import jsonschema
import openai
import pytest

from checks import valid

PROMPT = "The longest river of France is the"


@pytest.fixture
def complete(openai_calls, sim):
    calls = openai_calls(sim)

    def complete(**parameters):
        answer = calls("completions.create", **{"model": sim.model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, **parameters})
        # The SDK's types lack null for the logprob of the first token and the finish reason of a chunk, which OpenAI sends too.
        return answer if isinstance(answer, list) or "echo" in parameters else valid(answer)

    return complete


@pytest.fixture(params=["chat", "completions"])
def ask(request, openai_calls, smollm):
    """Asks the model on one of the two endpoints, and returns the answer's first choice and its text."""
    calls = openai_calls(smollm)

    def ask(content=PROMPT, **extra):
        body = {"model": smollm.model, "temperature": 0, "max_tokens": 24, "extra_body": extra}
        if request.param == "chat":
            choice = calls("chat.completions.create", messages=[{"role": "user", "content": content}], **body).choices[0]
            return choice, choice.message.content
        choice = calls("completions.create", prompt=content, **body).choices[0]
        return choice, choice.text

    return ask


def test_whole_and_streamed(complete):
    answer = complete()
    assert answer.object == "text_completion" and answer.usage.completion_tokens <= 16
    *chunks, last = complete(stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert last.choices == [] and last.usage.completion_tokens == answer.usage.completion_tokens


@pytest.mark.parametrize("prompt", [[PROMPT, "Another prompt"], [[80, 97], [82, 105, 118]]], ids=["texts", "tokens"])
def test_several_prompts(complete, prompt):
    assert [choice.index for choice in complete(prompt=prompt).choices] == [0, 1]


def test_prompt_of_tokens(complete):
    assert complete(prompt=list(PROMPT.encode())).choices[0].text == complete().choices[0].text


def test_echo_and_logprobs(complete):
    choice = complete(echo=True, logprobs=2).choices[0]
    assert choice.text.startswith(PROMPT) and "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None and all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert [choice.text[offset:].startswith(token) for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens)]


@pytest.mark.parametrize("parameters", [{"best_of": 1}, {"n": 2, "temperature": 1}, {"seed": 3}, {"stop": "e"}, {"user": "a"}, {"suffix": None}, {"suffix": ""}], ids=str)
def test_parameter(complete, parameters):
    assert len(complete(**parameters).choices) == parameters.get("n", 1)


def test_suffix_is_refused(complete):
    with pytest.raises(openai.BadRequestError) as error:
        complete(suffix="sea")
    assert error.value.param == "suffix"


RIVER = {"type": "object", "properties": {"river": {"enum": ["Loire", "Rhone"]}}, "required": ["river"], "additionalProperties": False}
GRAMMAR = 'root ::= "yes" | "no"'


@pytest.mark.parametrize(
    "constraint",
    [
        {"structured_outputs": {"choice": ["yes", "no"]}}, {"structured_outputs": {"regex": "yes|no"}}, {"structured_outputs": {"grammar": GRAMMAR}},
        {"guided_choice": ["yes", "no"]}, {"guided_regex": "yes|no"}, {"guided_grammar": GRAMMAR}, {"regex": "yes|no"}, {"ebnf": GRAMMAR},
    ],
    ids=str,
)
def test_constraint_of_other_servers(ask, constraint):
    choice, text = ask(**constraint)
    assert (text in ("yes", "no"), choice.finish_reason) == (True, "stop"), choice


@pytest.mark.parametrize(
    "constraint",
    [{"structured_outputs": {"json": RIVER}}, {"guided_json": RIVER}, {"guided_json": json.dumps(RIVER)}, {"json_schema": json.dumps(RIVER)}],
    ids=["structured_outputs", "guided_json", "guided_json text", "json_schema"],
)
def test_json_constraint_of_other_servers(ask, constraint):
    jsonschema.validate(json.loads(ask(**constraint)[1]), RIVER)


def test_allowed_token_ids(ask, smollm):
    choice, text = ask(allowed_token_ids=[28, 30])
    ids = ask(allowed_token_ids=[28, 30], return_token_ids=True)[0].model_extra["token_ids"]
    assert text and set(ids) <= {28, 30}


def test_bad_words(ask):
    _, text = ask()
    # A word that the model has as one token: it can spell others with other tokens.
    word = next(word for word in text.split() if word.isascii() and word.isalpha() and len(word) > 1)
    assert word not in ask(bad_words=[word])[1].split()


def test_return_token_ids(ask):
    choice, _ = ask(return_token_ids=True, ignore_eos=True)
    assert len(choice.model_extra["token_ids"]) == 24


def test_include_stop_str_in_output(ask):
    _, text = ask()
    stop = text[4:8]
    assert ask(stop=[stop], include_stop_str_in_output=True)[1] == text[: text.index(stop) + 4]


def test_skip_special_tokens(ask):
    kept = ask(skip_special_tokens=False, logit_bias={"2": 100}, ignore_eos=True, min_tokens=4)[1]
    assert "<|im_end|>" in kept and "<|im_end|>" not in ask(logit_bias={"2": 100}, ignore_eos=True)[1]


def test_truncate_prompt_tokens(openai_calls, smollm):
    calls = openai_calls(smollm)
    for path, content in (("completions.create", {"prompt": PROMPT}), ("chat.completions.create", {"messages": [{"role": "user", "content": PROMPT}]})):
        answer = calls(path, model=smollm.model, max_tokens=2, extra_body={"truncate_prompt_tokens": 4}, **content)
        assert answer.usage.prompt_tokens == 4


def test_priority_and_unknown_fields(ask):
    assert ask(priority=0)[1] == ask(priority=-7)[1] == ask(unknown_field=1)[1] == ask()[1]


def test_continue_final_message(openai_calls, smollm):
    calls, start = openai_calls(smollm), "The longest river of France is the Lo"
    messages = [{"role": "user", "content": "What is the longest river of France?"}, {"role": "assistant", "content": start}]
    body = {"add_generation_prompt": False, "continue_final_message": True}
    answer = calls("chat.completions.create", model=smollm.model, messages=messages, temperature=0, max_tokens=3, extra_body=body)
    assert answer.choices[0].message.content and not answer.choices[0].message.content.startswith("The")
