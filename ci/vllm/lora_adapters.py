"""Writes random LoRAs of rank 8 for the default model, in PEFT's format: alpha, beta and gamma.

    python lora_adapters.py MODEL FOLDER      MODEL: the folder of the default model in vLLM's format
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, ALPHA = 8, 16
# Large enough that greedy answers differ from those of the base model, and small enough that they are still words.
SCALE = 0.06

model, folder = Path(sys.argv[1]), Path(sys.argv[2])
config = json.loads((model / "config.json").read_text())
hidden, heads = config["hidden_size"], config["num_attention_heads"]
head = config.get("head_dim") or hidden // heads
outputs = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head, "o_proj": hidden}
for seed, name in enumerate(("alpha", "beta", "gamma")):
    torch.manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{prefix}.lora_A.weight"] = SCALE * torch.randn(RANK, heads * head if module == "o_proj" else hidden)
            weights[f"{prefix}.lora_B.weight"] = SCALE * torch.randn(size, RANK)
    (folder / name).mkdir(parents=True)
    save_file(weights, folder / name / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none"}
    adapter |= {"base_model_name_or_path": str(model), "target_modules": list(outputs), "inference_mode": True}
    (folder / name / "adapter_config.json").write_text(json.dumps(adapter))
