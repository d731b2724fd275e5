"""Writes a small random Qwen2-VL with the default model's tokenizer and tokens for images.

    python vision_model.py MODEL FOLDER      MODEL: the folder of the default model in vLLM's format

Heads have 64 values: vLLM on a CPU has no attention for smaller ones, and its engine would end.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 100352,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}

source, folder = sys.argv[1], Path(sys.argv[2])
tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS)
text = {
    "vocab_size": 49280,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]},
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
}
vision = {"depth": 1, "embed_dim": 128, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2}
vision |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
tokens = {"image_token_id": image, "video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end}
config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
torch.manual_seed(0)
Qwen2VLForConditionalGeneration(config).float().save_pretrained(folder)
tokenizer.chat_template = TEMPLATE
tokenizer.save_pretrained(folder)
(folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
