#!/usr/bin/env python3
"""Writes small.json, with which crates/devices/src/cpu/tests/goldens.rs checks small random models: all types of weights, all families, all kinds of
RoPE scaling. The test writes the models. Run this script only if these models change.

    pip install gguf numpy llama-cpp-python
    mkdir /tmp/small && TANDEM_SMALL_MODELS=/tmp/small cargo test -p tandem-devices --lib models_for_the_reference_script_are_written -- --ignored
    python make_small.py /tmp/small

Format: [{"model", "revision", "tokens", "logits"}], with numpy's logits of the last token, computed in double precision from weights that the
`gguf` package has dequantised. llama.cpp's logits must be close to them; those are not stored, because llama.cpp rounds activations.
"""
import json
import pathlib
import sys

import llama_cpp
import numpy as np
from gguf import GGUFReader, quants

HERE = pathlib.Path(__file__).parent
ORDER = (
    "llama-f32 llama-f16 llama-bf16 llama-q4_0 llama-q4_1 llama-q8_0 llama-divisors llama-linear "
    "qwen2-f32 qwen2-q8_0 qwen3-bf16 qwen3-yarn qwen3-q4_k qwen3-q6_k"
).split()


class Oracle:
    """A simple implementation of Llama, Qwen 2 and Qwen 3 in double precision. It shares no code with Tandem."""

    def __init__(self, path):
        reader = GGUFReader(path)
        self.family = reader.fields["general.architecture"].contents()
        self.meta = lambda key, default=None: (
            reader.fields[f"{self.family}.{key}"].contents() if f"{self.family}.{key}" in reader.fields else default
        )
        self.w = {t.name: quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
        self.layers, self.heads, self.kv_heads = self.meta("block_count"), self.meta("attention.head_count"), self.meta("attention.head_count_kv")
        self.dim, self.eps = self.meta("attention.key_length"), self.meta("attention.layer_norm_rms_epsilon")
        self.frequencies, self.magnitude = self.rope_frequencies()

    def rope_frequencies(self):
        base, half = self.meta("rope.freq_base"), self.dim // 2
        plain = base ** (-np.arange(half) / half)
        if "rope_freqs.weight" in self.w:
            plain = plain / self.w["rope_freqs.weight"]
        kind, factor = self.meta("rope.scaling.type"), self.meta("rope.scaling.factor")
        if kind == "linear":
            return plain / factor, 1
        if kind == "yarn":
            pair = lambda turns: self.dim * np.log(self.meta("rope.scaling.original_context_length") / (turns * 2 * np.pi)) / (2 * np.log(base))
            low, high = max(np.floor(pair(32)), 0), min(np.ceil(pair(1)), self.dim - 1)
            ramp = np.clip((np.arange(half) - low) / (high - low), 0, 1)
            return plain / factor * ramp + plain * (1 - ramp), 0.1 * np.log(factor) + 1
        assert kind is None
        return plain, 1

    def rms(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[name]

    def rope(self, x):
        angle = (np.arange(len(x))[:, None] * self.frequencies[None])[:, None]
        c, s, y = np.cos(angle) * self.magnitude, np.sin(angle) * self.magnitude, np.empty_like(x)
        half = self.dim // 2
        first, second = (slice(0, None, 2), slice(1, None, 2)) if self.family == "llama" else (slice(0, half), slice(half, None))
        y[..., first] = x[..., first] * c - x[..., second] * s
        y[..., second] = x[..., first] * s + x[..., second] * c
        return y

    def project(self, h, prefix, part, heads):
        y = h @ self.w[f"{prefix}{part}.weight"].T + self.w.get(f"{prefix}{part}.bias", 0)
        y = y.reshape(len(h), heads, self.dim)
        return self.rms(y, f"{prefix}{part}_norm.weight") if f"{prefix}{part}_norm.weight" in self.w else y

    def forward(self, tokens):
        n, x = len(tokens), self.w["token_embd.weight"][tokens]
        mask = np.where(np.tri(n, dtype=bool), 0, -np.inf)
        for i in range(self.layers):
            p, g = f"blk.{i}.", self.heads // self.kv_heads
            h = self.rms(x, p + "attn_norm.weight")
            q, k = self.rope(self.project(h, p, "attn_q", self.heads)), self.rope(self.project(h, p, "attn_k", self.kv_heads))
            v = self.project(h, p, "attn_v", self.kv_heads)
            s = np.einsum("ihd,jhd->hij", q, np.repeat(k, g, 1)) / np.sqrt(self.dim) + mask
            s = np.exp(s - s.max(-1, keepdims=True))
            s /= s.sum(-1, keepdims=True)
            x = x + np.einsum("hij,jhd->ihd", s, np.repeat(v, g, 1)).reshape(n, -1) @ self.w[p + "attn_output.weight"].T
            h = self.rms(x, p + "ffn_norm.weight")
            u = h @ self.w[p + "ffn_gate.weight"].T
            x = x + (u / (1 + np.exp(-u)) * (h @ self.w[p + "ffn_up.weight"].T)) @ self.w[p + "ffn_down.weight"].T
        return self.rms(x, "output_norm.weight") @ self.w.get("output.weight", self.w["token_embd.weight"]).T


def llama_cpp_logits(path, tokens):
    llama = llama_cpp.Llama(str(path), n_ctx=96, n_batch=96, logits_all=True, type_k=0, type_v=0, verbose=False)
    llama.eval(tokens)
    return np.array(llama.scores[len(tokens) - 1], dtype=np.float64)


def main():
    folder, rows = pathlib.Path(sys.argv[1]), []
    for name in ORDER:
        (path,) = folder.glob(f"{name}.*.gguf")
        oracle = Oracle(path)
        vocabulary = len(oracle.w["token_embd.weight"])
        tokens = [(7 * i * i + 3 * i + 1) % vocabulary for i in range(40)]
        logits = oracle.forward(tokens)[-1]
        other = llama_cpp_logits(path, tokens)
        error = np.linalg.norm(logits - other) / np.linalg.norm(logits)
        print(f"{name}: llama.cpp differs by {error:.5f}")
        assert error < (0.05 if "-q" in name else 0.005), name
        rows.append({"model": name, "revision": path.suffixes[-2][1:], "tokens": tokens, "logits": [round(float(x), 5) for x in logits]})
    text = "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n"
    (HERE / "small.json").write_text(text)
    print(len(rows), "entries,", len(text), "bytes")


if __name__ == "__main__":
    main()
