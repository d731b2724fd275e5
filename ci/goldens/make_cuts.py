#!/usr/bin/env python3
"""Writes cuts.json, with which crates/text/src/tokenizer/tests.rs checks how the tokenizer splits texts before it merges bytes. Only needed if the
texts change.

    pip install tokenizers gguf numpy llama-cpp-python
    python make_cuts.py

A small byte-level BPE is trained on texts.py. Its token ids are computed by Hugging Face's `tokenizers`, with the settings of the model
families' public tokenizer.json files. llama.cpp, with the same vocabulary as a GGUF file, must give the same ids (except for texts with
decomposed characters and `qwen2`, which llama.cpp does not normalise).

Format: {"merges", "word", "cuts": {name: [{"text", "ids"}]}}. The first 256 tokens are the bytes, as GPT-2's characters; the results of the
merges follow; the last one is `word`, a token that no merges produce.
"""
import json
import pathlib
import tempfile

import gguf
import llama_cpp
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

import texts

HERE = pathlib.Path(__file__).parent
MERGES = 250
WORD = "ishmael"
FAMILY = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {"llama-bpe": FAMILY.replace("DIGITS", "{1,3}"), "qwen2": FAMILY.replace("DIGITS", "")}
CASES = [
    "Hello world", " two  spaces   three", "I'm we'LL they'd don'T 's", "1 12 123 1234 12345678 3.14159", "a\nb\n\nc\r\n\r\nd \n e  \n\n  f",
    "tabs\t\there\t", "   leading and trailing   ", "punctuation!!! ...and--more?! (yes) [no] {maybe} <tags/>", "x=y+z*2; // code\n\tif (a && b) {\n",
    "naïve café Ünïcödé", "cafe\u0301 A\u030a \u1100\u1161", "Привет, мир! 123", "你好，世界。第42章", "こんにちは ٣٤٥ १२३ Ⅷ ½", "🙂👩‍👩‍👧 emoji",
    "ishmael", " ishmael Ishmael ishmaels", "\u00a0nbsp\u3000wide", "\u2028line\u2029para", "''quotes'' \"double\" `back`", "$100,000.50 €20 50%", "_under_score_ __x__",
    "UPPER lower MiXeD", "the and that of in to", "http://example.com/a?b=c&d=e#f", "\n", " ", "  ", "\n\n ", " \n", "0", "a", "é", "\r", "word\r\nword",
]


def characters():
    """Returns GPT-2's character for each byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def train():
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(texts.DOCUMENTS, trainers.BpeTrainer(vocab_size=256 + MERGES, initial_alphabet=alphabet, show_progress=False))
    return [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]


def encoder(name, vocabulary, merges):
    whole = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
    split = pre_tokenizers.Split(tokenizers.Regex(CUTS[name]), behavior="isolated")
    whole.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if name == "qwen2":
        whole.normalizer = normalizers.NFC()
    return whole


def llama_cpp_tokenizer(name, tokens, merges, path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return llama_cpp.Llama(path, vocab_only=True, verbose=False)


def main():
    merges = train()
    tokens = characters() + ["".join(merge) for merge in merges] + [WORD]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    assert len(vocabulary) == len(tokens)
    cuts = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CUTS:
            ours, other = encoder(name, vocabulary, merges), llama_cpp_tokenizer(name, tokens, merges, f"{folder}/{name}.gguf")
            cuts[name] = []
            for text in CASES + texts.DOCUMENTS[:3]:
                ids = ours.encode(text).ids
                composed = name == "qwen2" and normalizers.NFC().normalize_str(text) != text
                reference = other.tokenize(text.encode(), add_bos=False, special=False)
                assert composed or ids == reference, (name, text, ids, reference)
                cuts[name].append({"text": text, "ids": ids})
    golden = {"merges": [" ".join(merge) for merge in merges], "word": WORD, "cuts": cuts}
    (HERE / "cuts.json").write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")
    print({name: len(cases) for name, cases in cuts.items()}, (HERE / "cuts.json").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
