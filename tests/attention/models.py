"""Model configurations for selection and build tests, and the vLLM configuration that a child process makes of them.

Runs inside the child processes of these tests, with whatever vLLM is first on their path.
"""

import json
from pathlib import Path

from overlay.checkpoint import tiny_config

# What the published GLM-5.3-Flash has where the tiny one is small.
FULL_SIZE = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "q_lora_rank": 1536,
    "vocab_size": 154880,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "max_position_embeddings": 1048576,
}
FULL_LAYERS = 45

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}

DEEPSEEK_SPARSE = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "vocab_size": 320,
    "max_position_embeddings": 16384,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def full_size(nested: bool = False, **changes: object) -> dict:
    """config.json of the full-size model, flat or nested in its conditional-generation form."""
    config = tiny_config.model_config(tiny_config.TinyModel(heads=64, layers=FULL_LAYERS, nested=nested, mtp=True))
    text = config["text_config"] if nested else config
    text.update(FULL_SIZE, **changes)
    if nested:
        config["vision_config"]["out_hidden_size"] = text["hidden_size"]
    return config


def write(config: dict, folder: Path) -> str:
    """A folder that vLLM takes for a model: its configuration, no weights, no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if "text_config" in config:
        (folder / "processor_config.json").write_text(json.dumps(tiny_config.processor_config()))
    return str(folder)
