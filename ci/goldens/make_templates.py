#!/usr/bin/env python3
"""Writes templates.json, with which crates/text/src/template/environment/tests.rs checks that conversations are rendered as by Hugging Face's
`transformers`. Only needed if the conversations, the templates or snippets.py change.

    pip install transformers jinja2 tokenizers
    python make_templates.py                          # After make_tokenizers.py.
    python make_templates.py TEMPLATE CONVERSATION    # Prints one expected text.

Format: {"now": the time of strftime_now, "texts": {template: [text of each conversation]}, "tokenizers": {template: name}, "context": the snippets'
variables, "snippets": [[source, text]]}.
A conversation's text is [its length in bytes, the first 16 digits of its SHA-256, the first 4 of the SHA-256 of its ids]. The ids are of the tokenizer in
tokenizers.json that `tokenizers` has for the template. Instead of a text that cannot be rendered: {"refused": the
template's own message, or null if the template fails in another way}. Null: the template loops over None (the tools), which is not compared: in
Tandem's engine None is an empty list there.
"""
import datetime
import hashlib
import json
import pathlib
import struct
import sys

import jinja2
import tokenizers
from transformers.utils import chat_template_utils

import snippets

HERE = pathlib.Path(__file__).parent
NOW = datetime.datetime(2024, 7, 4, 5, 6, 7)
# Each template's tokenizer has the layout of the model's own.
TOKENIZERS = {
    "deepseek-r1-distill-llama": "llama-bpe", "deepseek-r1-distill-qwen": "qwen2", "deepseek-v3.1": "deepseek-v3", "gemma-2": "gemma", "gemma-4": "gemma",
    "gpt-oss": "gpt-4o", "hermes-3": "llama-bpe", "llama-3.1": "llama-bpe", "llama-3.2": "llama-bpe", "ministral-3": "tekken", "mistral-nemo": "tekken",
    "mistral-small-3.2": "mistral", "qwen-2.5": "qwen2", "qwen-3": "qwen2", "qwen-3-coder": "qwen2", "qwen-3.5": "qwen35", "qwq": "qwen2", "smollm-2": "smollm",
    "smollm-3": "llama-bpe",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def conversations():
    """Returns the arguments of each conversation."""
    tools = json.loads((HERE / "tools.json").read_text())
    for conversation in json.loads((HERE / "conversations.json").read_text()):
        messages = conversation["messages"] * conversation.get("repeat", 1)
        messages += [conversation["last"]] if "last" in conversation else []
        yield conversation["name"], {
            "conversations": [messages],
            "tools": [tools[name] for name in conversation["tools"]] if "tools" in conversation else None,
            "documents": conversation.get("documents"),
            "add_generation_prompt": conversation.get("add_generation_prompt", True),
            **TOKENS,
            **conversation.get("arguments", {}),
        }


def refusal(error):
    # Jinja2 raises `TemplateError` itself only for raise_exception; its own errors are of subclasses.
    return {"refused": error.message if type(error) is jinja2.exceptions.TemplateError else None}


def rendered(source, arguments):
    texts, _ = chat_template_utils.render_jinja_template(chat_template=source, **arguments)
    return texts[0]


def golden(source, arguments, tokenizer):
    try:
        text = rendered(source, arguments)
    except TypeError as error:
        return None if str(error) == "'NoneType' object is not iterable" else refusal(error)
    except Exception as error:
        return refusal(error)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    digits = lambda data: hashlib.sha256(data).hexdigest()
    return [len(text.encode()), digits(text.encode())[:16], digits(struct.pack(f"<{len(ids)}I", *ids))[:4]]


def snippet(source):
    try:
        # The template is not compiled by way of `render_jinja_template`, whose variables are those of a chat.
        return chat_template_utils._compile_jinja_template(source).render(**snippets.CONTEXT)
    except Exception as error:
        return refusal(error)


def main():
    chat_template_utils.datetime = Clock
    sources = {path.stem: path.read_text() for path in sorted((HERE / "templates").glob("*.jinja"))}
    if len(sys.argv) == 3:
        sys.stdout.write(rendered(sources[sys.argv[1]], dict(conversations())[sys.argv[2]]))
        return
    golden_lines = lambda goldens: "[\n%s\n]" % ",\n".join(json.dumps(golden, separators=(",", ":")) for golden in goldens)
    files = json.loads((HERE / "tokenizers.json").read_text())["json"]
    texts = {}
    for name, source in sources.items():
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(files[TOKENIZERS[name]]["file"]))
        texts[name] = [golden(source, arguments, tokenizer) for _, arguments in conversations()]
    small = [[source, snippet(source)] for source in snippets.TEMPLATES]
    parts = [
        '"now": %s' % json.dumps(NOW.isoformat()),
        '"texts": {\n%s\n}' % ",\n".join('%s: %s' % (json.dumps(name), json.dumps(goldens, separators=(",", ":"))) for name, goldens in texts.items()),
        '"tokenizers": %s' % json.dumps(TOKENIZERS),
        '"context": %s' % json.dumps(snippets.CONTEXT),
        '"snippets": %s' % golden_lines(small),
    ]
    (HERE / "templates.json").write_text("{\n%s\n}\n" % ",\n".join(parts))
    every = [golden for goldens in texts.values() for golden in goldens]
    refused = sum(isinstance(golden, dict) for golden in every)
    skipped = every.count(None)
    print(f"{len(sources)} templates, {len(every)} texts, {refused} of them refused, {skipped} not compared; {len(small)} snippets")


if __name__ == "__main__":
    main()
