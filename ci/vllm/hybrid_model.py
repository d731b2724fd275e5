"""Writes a small random Gemma 3 with the default model's tokenizer: five layers with a sliding window of 64 tokens, one with full attention.

    python hybrid_model.py MODEL FOLDER      MODEL: the folder of the default model in vLLM's format
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
config = Gemma3TextConfig(
    vocab_size=49152,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    sliding_window=64,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)
torch.manual_seed(0)
Gemma3ForCausalLM(config).float().save_pretrained(folder)
for file in source.glob("tokenizer*"):
    shutil.copy(file, folder)
for file in source.glob("*.jinja"):
    shutil.copy(file, folder)
