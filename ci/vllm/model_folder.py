"""Converts a Llama model in one GGUF file to a folder that vLLM loads: weights as float32, configuration and tokenizer.

    python model_folder.py MODEL.gguf FOLDER
"""

import json
import sys
from pathlib import Path

import numpy
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

LAYER_TENSORS = {
    "attn_k": "self_attn.k_proj",
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.up_proj",
}
MODEL_TENSORS = {"output": "lm_head", "output_norm": "model.norm", "token_embd": "model.embed_tokens"}
# vLLM's names of special tokens, and their names in GGUF.
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
# The numbers of two types of tokens in GGUF, control and user-defined tokens. Tokenizers match these tokens in the text as a whole.
SPECIAL = (3, 4)


def halves_apart(weight, heads):
    """GGUF has the two halves of each head's rotary pairs interleaved; vLLM expects them one after the other."""
    return weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def weights(reader, heads, kv_heads):
    tensors = {}
    for tensor in reader.tensors:
        weight = numpy.array(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, kind = name.split(".")
            if kind in ("attn_q", "attn_k"):
                weight = halves_apart(weight, heads if kind == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{LAYER_TENSORS[kind]}"
        else:
            name = MODEL_TENSORS[name]
        tensors[f"{name}.weight"] = torch.from_numpy(numpy.ascontiguousarray(weight))
    return tensors


def tokenizer(tokens, types, merges):
    special = [
        {"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for id, (token, kind) in enumerate(zip(tokens, types))
        if kind in SPECIAL
    ]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, {**byte_level, "add_prefix_space": False}]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def main(file, folder):
    reader = GGUFReader(file)

    def value(key):
        return reader.fields[key].contents()

    kind = (value("general.architecture"), value("tokenizer.ggml.model"), value("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        sys.exit(f"model_folder.py: {file} is not a Llama model with SmolLM's tokenizer: {kind}")
    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    tokens = value("tokenizer.ggml.tokens")
    ids = {f"{role}_token_id": value(f"tokenizer.ggml.{key}_token_id") for role, key in ROLES.items()}
    names = {role.removesuffix("_id"): tokens[id] for role, id in ids.items()}
    tensors = weights(reader, heads, kv_heads)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("llama.embedding_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": value("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "intermediate_size": value("llama.feed_forward_length"),
        "vocab_size": len(tokens),
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": value("llama.rope.freq_base"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "float32",
        **{key: ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    files = {
        "config.json": config,
        "generation_config.json": {key: ids[key] for key in ("bos_token_id", "eos_token_id")},
        "tokenizer.json": tokenizer(tokens, value("tokenizer.ggml.token_type"), value("tokenizer.ggml.merges")),
        "tokenizer_config.json": {
            **names,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": value("llama.context_length"),
            "chat_template": value("tokenizer.chat_template"),
        },
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"wrote the model for vLLM to {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
