"""How the models of the chat templates write texts and tool calls. The names of special tokens stand in the texts."""

import json

THOUGHT = "The next step is clear."


class Format:
    """A model's chat template, its own tokens and its way to write. `ends`: the tokens that end an answer; `words`: those that are plain text."""

    def __init__(self, template, specials, ends, begin="", words=()):
        self.template, self.ends, self.begin, self.words = template, ends, begin, words
        self.specials = [*specials, *(end for end in ends if end not in specials)]

    def text(self, prompt, text):
        return f"{self.thought(prompt)}{text}{self.ends[0]}"

    def call(self, prompt, name, arguments):
        return f"{self.thought(prompt)}{self.written(name, arguments)}{self.ends[-1]}"

    def thought(self, prompt):
        return ""


class Hermes(Format):
    """Qwen 3."""

    def thought(self, prompt):
        return "" if prompt.endswith("</think>\n\n") else f"<think>\n{THOUGHT}\n</think>\n\n"

    def written(self, name, arguments):
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


class Coder(Format):
    """Qwen 3.5, whose template opens the reasoning."""

    def thought(self, prompt):
        return f"{THOUGHT}\n</think>\n\n" if prompt.endswith("<think>\n") else ""

    def written(self, name, arguments):
        values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


class Llama(Format):
    def written(self, name, arguments):
        return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


class Mistral(Format):
    def written(self, name, arguments):
        return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


class Harmony(Format):
    """gpt-oss."""

    def text(self, prompt, text):
        return f"{self.thought(prompt)}<|channel|>final<|message|>{text}{self.ends[0]}"

    def thought(self, prompt):
        return f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"

    def written(self, name, arguments):
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments, ensure_ascii=False)}"


class Gemma(Format):
    """Gemma 4."""

    def written(self, name, arguments):
        def value(of):
            return f'<|"|>{of}<|"|>' if isinstance(of, str) else json.dumps(of)

        return f"<|tool_call>call:{name}{{{','.join(f'{name}:{value(of)}' for name, of in arguments.items())}}}<tool_call|>"


QWEN_WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *QWEN_WORDS]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
MISTRAL = [
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]",
]
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
GEMMA = [
    "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
    "<|tool_response>", "<tool_response|>", '<|"|>',
]
FORMATS = [
    Hermes("qwen-3", QWEN, ["<|im_end|>"], words=QWEN_WORDS),
    Coder("qwen-3.5", QWEN, ["<|im_end|>"], words=QWEN_WORDS),
    Llama("llama-3.1", LLAMA, ["<|eot_id|>"], "<|begin_of_text|>"),
    Mistral("mistral-small-3.2", MISTRAL, ["</s>"], "<s>"),
    Harmony("gpt-oss", HARMONY, ["<|return|>", "<|call|>"]),
    Gemma("gemma-4", GEMMA, ["<turn|>", "<|tool_response>"], "<bos>"),
]
