"""Small NVFP4 checkpoints on disk, in the formats vLLM loads, with the scale faults that the cases name.

A two-layer Qwen3-MoE: its loader is the plain one, and all of its linear layers can be quantised. Weights are random
FP4 codes with random block scales, which are as good as any: what counts is where each scale ends up.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 128, 4, 2, 4, 2, 64, 256
INPUT_SCALE, WEIGHT_SCALE = 0.01, 0.02  # of the case file: alpha 2e-4, activation global scale 100

GEOMETRY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Format:
    """How a checkpoint format names and stores the four tensors of a projection."""

    weight: str
    blocks: str
    globals: str
    input: str
    reciprocal: bool = False

    def stored(self, scale: float) -> torch.Tensor:
        return torch.tensor(1.0 / scale if self.reciprocal else scale, dtype=torch.float32)


FORMATS = {
    "modelopt": Format("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": Format(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", reciprocal=True
    ),
    "quark": Format("weight", "weight_scale", "weight_scale_2", "input_scale_2"),
}

# (projection name, input scale) -> the tensors it is stored with, by suffix; None leaves a tensor out.
Edit = Callable[[str, dict[str, torch.Tensor]], None]


def projections() -> dict[str, tuple[int, int]]:
    """Every projection's checkpoint name with its (rows, columns)."""
    shapes = {"lm_head": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        attention, experts = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp.experts"
        shapes[f"model.layers.{layer}.mlp.gate"] = (EXPERTS, HIDDEN)
        shapes[f"{attention}.q_proj"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[f"{attention}.k_proj"] = shapes[f"{attention}.v_proj"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[f"{attention}.o_proj"] = (HIDDEN, HEADS * HEAD_DIM)
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj"):
                shapes[f"{experts}.{expert}.{name}"] = (INTERMEDIATE, HIDDEN)
            shapes[f"{experts}.{expert}.down_proj"] = (HIDDEN, INTERMEDIATE)
    return shapes


def is_expert(name: str) -> bool:
    return ".experts." in name


def expert_of(name: str) -> int:
    return int(name.split(".experts.")[1].split(".")[0])


def tensors(form: Format, edit: Edit, unquantised: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint; `edit(projection, tensors)` may change or remove those of a projection."""
    random = torch.Generator().manual_seed(7)
    found: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in projections().items():
        if any(part in name for part in unquantised):
            found[f"{name}.weight"] = torch.randn(rows, columns, generator=random).bfloat16() / 16
            continue
        blocks = torch.randint(8, 120, (rows, columns // 16), generator=random, dtype=torch.uint8)
        own = {
            form.weight: torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8),
            form.blocks: blocks.view(torch.float8_e4m3fn),
            form.globals: form.stored(WEIGHT_SCALE),
            form.input: form.stored(INPUT_SCALE),
        }
        edit(name, own)
        found |= {f"{name}.{suffix}": tensor for suffix, tensor in own.items()}
    norms = [
        "model.norm",
        *(f"model.layers.{i}.{n}_layernorm" for i in range(LAYERS) for n in ("input", "post_attention")),
    ]
    found |= {f"{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    heads = [f"model.layers.{i}.self_attn.{n}_norm" for i in range(LAYERS) for n in "qk"]
    found |= {f"{name}.weight": torch.ones(HEAD_DIM, dtype=torch.bfloat16) for name in heads}
    found["model.embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=random).bfloat16()
    return found


def write(folder: Path, quantization: Mapping, own_file: bool, weights: Mapping[str, torch.Tensor]) -> Path:
    """A checkpoint folder whose quantization is in config.json, or (`own_file`) in hf_quant_config.json."""
    folder.mkdir(parents=True)
    config = dict(GEOMETRY) if own_file else {**GEOMETRY, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    if own_file:
        (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
