#!/usr/bin/env python3
"""Writes the golden files in this directory from independent reference implementations.

    python3 -m venv /tmp/goldens && . /tmp/goldens/bin/activate
    pip install numpy gguf
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON" pip install llama-cpp-python
    python make_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf

tokenizer.json  llama.cpp's token ids of many strings: [{"text", "ids", "special"}]
logprobs.json   logprobs of given texts in float32 numpy: [{"tokens", "logprobs", "top1"}]; entry i belongs to tokens[i + 1]
greedy.json     greedy continuations in float32 numpy: [{"prompt", "tokens", "top_two"}]; top_two holds each step's two largest logits
"""
import json
import pathlib
import sys

import llama_cpp
import numpy as np
from gguf import GGUFReader, quants

import texts

HERE = pathlib.Path(__file__).parent
NEW_TOKENS = 32


class Oracle:
    """A simple implementation of Llama in float32, with dequantised weights. It shares no code with Tandem."""

    def __init__(self, path):
        reader = GGUFReader(path)
        meta = lambda key: reader.fields["llama." + key].contents()
        self.w = {t.name: quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
        self.layers, self.heads, self.kv_heads = meta("block_count"), meta("attention.head_count"), meta("attention.head_count_kv")
        self.dim, self.eps, self.base = meta("embedding_length") // self.heads, meta("attention.layer_norm_rms_epsilon"), meta("rope.freq_base")

    def rms(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.eps)) * self.w[name]

    def rope(self, x, pos):  # GGUF stores a Llama's rows so that the pairs are (2i, 2i + 1)
        angle = pos[:, None] * (self.base ** (-np.arange(0, self.dim, 2) / self.dim))[None]
        c, s = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)
        y = np.empty_like(x)
        y[..., 0::2] = x[..., 0::2] * c - x[..., 1::2] * s
        y[..., 1::2] = x[..., 0::2] * s + x[..., 1::2] * c
        return y

    def forward(self, tokens, past):
        """Returns the logits of every token, and adds the tokens' keys and values to `past`, a list with one entry for each layer."""
        n, start = len(tokens), len(past[0][0]) if past else 0
        x, pos = self.w["token_embd.weight"][tokens], np.arange(start, start + n)
        mask = np.where(np.arange(start + n)[None] > pos[:, None], np.float32(-np.inf), np.float32(0))
        grown = []
        for i in range(self.layers):
            p, g = f"blk.{i}.", self.heads // self.kv_heads
            h = self.rms(x, p + "attn_norm.weight")
            q = self.rope((h @ self.w[p + "attn_q.weight"].T).reshape(n, self.heads, self.dim), pos)
            k = self.rope((h @ self.w[p + "attn_k.weight"].T).reshape(n, self.kv_heads, self.dim), pos)
            v = (h @ self.w[p + "attn_v.weight"].T).reshape(n, self.kv_heads, self.dim)
            if past:
                k, v = np.concatenate([past[i][0], k]), np.concatenate([past[i][1], v])
            grown.append((k, v))
            s = np.einsum("ihd,jhd->hij", q, np.repeat(k, g, 1)) / np.float32(np.sqrt(self.dim)) + mask
            s = np.exp(s - s.max(-1, keepdims=True))
            s /= s.sum(-1, keepdims=True)
            x = x + np.einsum("hij,jhd->ihd", s, np.repeat(v, g, 1)).reshape(n, -1) @ self.w[p + "attn_output.weight"].T
            h = self.rms(x, p + "ffn_norm.weight")
            u = h @ self.w[p + "ffn_gate.weight"].T
            x = x + (u / (1 + np.exp(-u)) * (h @ self.w[p + "ffn_up.weight"].T)) @ self.w[p + "ffn_down.weight"].T
        past[:] = grown
        return self.rms(x, "output_norm.weight") @ self.w.get("output.weight", self.w["token_embd.weight"]).T


def write(name, rows):
    text = "[\n" + ",\n".join(json.dumps(row, ensure_ascii=True, separators=(",", ":")) for row in rows) + "\n]\n"
    (HERE / name).write_text(text)
    print(name, len(rows), "entries,", len(text), "bytes")


def logprobs(oracle, tokens):
    logits = oracle.forward(tokens, []).astype(np.float64)[:-1]
    peak = logits.max(-1)
    log_sum = peak + np.log(np.exp(logits - peak[:, None]).sum(-1))
    true_next = logits[np.arange(len(tokens) - 1), tokens[1:]] - log_sum
    return {"tokens": tokens, "logprobs": [round(float(p), 4) for p in true_next], "top1": logits.argmax(-1).tolist()}


def greedy(oracle, prompt):
    past, tokens, top_two, step = [], [], [], prompt
    for _ in range(NEW_TOKENS):
        logits = oracle.forward(step, past)[-1]
        first, second = np.argsort(logits)[::-1][:2]
        tokens.append(int(first))
        top_two.append([round(float(logits[first]), 4), round(float(logits[second]), 4)])
        step = [int(first)]
    return {"prompt": prompt, "tokens": tokens, "top_two": top_two}


def main():
    path = sys.argv[1]
    vocabulary = llama_cpp.Llama(path, vocab_only=True, verbose=False)

    def ids(text, special):
        return vocabulary.tokenize(text.encode(), add_bos=False, special=special)

    write("tokenizer.json", [{"text": text, "ids": ids(text, special), "special": special} for text, special in texts.tokenizer_cases()])
    if sys.argv[2:] == ["--tokenizer-only"]:
        return
    oracle = Oracle(path)
    write("logprobs.json", [logprobs(oracle, ids(text, True)) for text in texts.DOCUMENTS])
    write("greedy.json", [greedy(oracle, ids(prompt, True)) for prompt in texts.PROMPTS])


if __name__ == "__main__":
    main()
