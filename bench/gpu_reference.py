#!/usr/bin/env python3
"""Reference results for bench/gpu.py: small random models, and their logits in double precision with numpy alone.

    python3 bench/gpu_reference.py    needs torch and transformers, and no GPU: compares the references with transformers' models

The second form prints a table. Its columns: the error of transformers in single precision; the same after `model.to(bfloat16).float()`, by which
RoPE's frequencies (the buffer `inv_freq`) are rounded to bfloat16, while every weight is the same.
"""

import dataclasses
import json
import pathlib
import struct

import numpy


@dataclasses.dataclass(frozen=True)
class Config:
    """A model's shape, with the names that its config.json has in transformers."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    torch_dtype: str = "bfloat16"
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6

    def json(self):
        names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        return {**dataclasses.asdict(self), "architectures": [names[self.model_type]], "hidden_act": "silu"}

    def tensors(self):
        """Returns the shape of each tensor, by its name in safetensors."""
        width, queries, keys = self.hidden_size, self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes = {"model.embed_tokens.weight": (self.vocab_size, width)}
        for layer in range(self.num_hidden_layers):
            part = f"model.layers.{layer}."
            shapes[part + "input_layernorm.weight"] = shapes[part + "post_attention_layernorm.weight"] = (width,)
            for name, rows in (("q", queries), ("k", keys), ("v", keys)):
                shapes[f"{part}self_attn.{name}_proj.weight"] = (rows, width)
                if self.model_type == "qwen2":
                    shapes[f"{part}self_attn.{name}_proj.bias"] = (rows,)
            shapes[part + "self_attn.o_proj.weight"] = (width, queries)
            if self.model_type == "qwen3":
                shapes[part + "self_attn.q_norm.weight"] = shapes[part + "self_attn.k_norm.weight"] = (self.head_dim,)
            for name in ("gate", "up"):
                shapes[f"{part}mlp.{name}_proj.weight"] = (self.intermediate_size, width)
            shapes[part + "mlp.down_proj.weight"] = (width, self.intermediate_size)
        shapes["model.norm.weight"] = (width,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, width)
        return shapes


def rounded(numbers, kind):
    """Rounds numbers to the 16-bit type; returns its bits and the rounded numbers."""
    if kind == "float16":
        halves = numbers.astype(numpy.float16)
        return halves.view(numpy.uint16), halves.astype(numpy.float64)
    bits = numbers.astype(numpy.float32).view(numpy.uint32)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
    return bits, (bits.astype(numpy.uint32) << 16).view(numpy.float32).astype(numpy.float64)


def header(config):
    """Returns the start of a safetensors file, and the number of bytes that follow it."""
    kind, place, entries = {"bfloat16": "BF16", "float16": "F16"}[config.torch_dtype], 0, {}
    for name, shape in config.tensors().items():
        bytes_of = 2 * int(numpy.prod(shape))
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [place, place + bytes_of]}
        place += bytes_of
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, place


def write_model(folder, config, seed=7):
    """Writes a model with random weights. Returns the weights in double precision."""
    random, weights = numpy.random.default_rng(seed), {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.json()))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header(config)[0])
        for name, shape in config.tensors().items():
            # Norms and biases that are ones and zeros would hide errors in their use.
            scale = 0.2 if len(shape) == 1 else shape[1] ** -0.5
            bits, weights[name] = rounded(random.standard_normal(shape) * scale + ("norm" in name), config.torch_dtype)
            file.write(bits.tobytes())
    return weights


def write_large_model(folder, config, with_weights):
    """Writes a model's files. Without weights the file has its length and takes no space; with weights it repeats a few random numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.json()))
    start, bytes_left = header(config)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(start)
        if not with_weights:
            file.truncate(len(start) + bytes_left)
            return
        pattern = rounded(numpy.random.default_rng(7).standard_normal(1 << 24) * 0.02, config.torch_dtype)[0].tobytes()
        while bytes_left > 0:
            bytes_left -= file.write(pattern[:bytes_left])


def forward(config, weights, tokens):
    """Returns the logits of all tokens in double precision, by the formulas of the models' papers."""
    width, dim, layers = config.hidden_size, config.head_dim, config.num_hidden_layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def norm(x, name):
        return x / numpy.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weights[name]

    angles = numpy.arange(len(tokens))[:, None] * config.rope_theta ** (-numpy.arange(0, dim, 2) / dim)
    cos, sin = numpy.cos(angles)[:, None], numpy.sin(angles)[:, None]

    def rotated(x):
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return numpy.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def project(x, name, count):
        y = x @ weights[name + "_proj.weight"].T + weights.get(name + "_proj.bias", 0)
        y = y.reshape(len(x), count, dim)
        return norm(y, name + "_norm.weight") if name + "_norm.weight" in weights else y

    x = weights["model.embed_tokens.weight"][tokens]
    hidden = numpy.triu(numpy.full((len(tokens), len(tokens)), -numpy.inf), 1)
    for layer in range(layers):
        part = f"model.layers.{layer}."
        h, attention = norm(x, part + "input_layernorm.weight"), part + "self_attn."
        q, k, v = rotated(project(h, attention + "q", heads)), rotated(project(h, attention + "k", kv_heads)), project(h, attention + "v", kv_heads)
        k, v = (numpy.repeat(y, heads // kv_heads, 1) for y in (k, v))
        scores = numpy.einsum("ihd,jhd->hij", q, k) / dim**0.5 + hidden
        scores = numpy.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + numpy.einsum("hij,jhd->ihd", scores, v).reshape(len(x), -1) @ weights[attention + "o_proj.weight"].T
        h = norm(x, part + "post_attention_layernorm.weight")
        gate = h @ weights[part + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + numpy.exp(-gate)) * (h @ weights[part + "mlp.up_proj.weight"].T)) @ weights[part + "mlp.down_proj.weight"].T
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    assert x.shape[1] == width
    return norm(x, "model.norm.weight") @ head.T


def small_models():
    """Returns small models, by name."""
    common = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, vocab_size=512)
    return {
        "llama": Config("llama", **common, num_attention_heads=8, num_key_value_heads=2, head_dim=32),
        "llama, 9 heads, tied": Config(
            "llama", **{**common, "hidden_size": 576}, num_attention_heads=9, num_key_value_heads=3, head_dim=64, torch_dtype="float16", tie_word_embeddings=True
        ),
        "qwen2": Config("qwen2", **common, num_attention_heads=14, num_key_value_heads=2, head_dim=64),
        "qwen3": Config("qwen3", **common, num_attention_heads=8, num_key_value_heads=2, head_dim=128),
    }


def error_of(found, expected):
    return float(numpy.linalg.norm(found - expected) / numpy.linalg.norm(expected))


def compare_with_transformers():
    import tempfile

    import torch
    import transformers

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, on the CPU\n")
    print("| Model | Weights | transformers, single precision | the same after `.to(bfloat16).float()` |\n|---|---|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, config) in enumerate(small_models().items()):
            path = pathlib.Path(folder) / str(number)
            weights = write_model(path, config)
            tokens = numpy.random.default_rng(1).integers(0, config.vocab_size, 700)
            expected, errors = forward(config, weights, tokens), []
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for cast in (False, True):
                if cast:
                    model = model.to(getattr(torch, config.torch_dtype)).float()
                with torch.no_grad():
                    errors.append(error_of(model(torch.tensor(tokens)[None]).logits[0].double().numpy(), expected))
            print(f"| {name} | {config.torch_dtype} | {errors[0]:.1e} | {errors[1]:.1e} |", flush=True)


if __name__ == "__main__":
    compare_with_transformers()
