"""Checkpoints of a few kilobytes for the audit, written byte by byte: a fault is one edit away from a sound one."""

import copy
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HIDDEN, WIDTH, EXPERTS, LAYERS = 32, 32, 4, 3
GROUP = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
ACTIVATIONS = {"num_bits": 4, "type": "float", "group_size": 16}
SCALE = 0.01
ITEM = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1, "I8": 1, "I32": 4}

# name -> (dtype, shape, bytes)
Tensors = dict[str, tuple[str, list[int], bytes]]


def tensor(dtype: str, *shape: int, value: bytes | None = None) -> tuple[str, list[int], bytes]:
    """A tensor of ones-filled bytes, or of the bytes given."""
    count = ITEM[dtype]
    for size in shape:
        count *= size
    return dtype, list(shape), b"\x01" * count if value is None else value


def scalar(value: float, *shape: int) -> tuple[str, list[int], bytes]:
    """An F32 tensor that holds `value` in every element."""
    count = 1
    for size in shape:
        count *= size
    return tensor("F32", *shape, value=struct.pack("<f", value) * count)


def plain(name: str, rows: int = HIDDEN, columns: int = HIDDEN) -> Tensors:
    return {f"{name}.weight": tensor("BF16", rows, columns)}


def nvfp4(name: str, rows: int = HIDDEN, columns: int = HIDDEN, input_scale: float | None = SCALE) -> Tensors:
    """A ModelOpt NVFP4 matrix; `input_scale` None for weight-only."""
    found = {
        f"{name}.weight": tensor("U8", rows, columns // 2),
        f"{name}.weight_scale": tensor("F8_E4M3", rows, columns // 16),
        f"{name}.weight_scale_2": scalar(0.02),
    }
    if input_scale is not None:
        found[f"{name}.input_scale"] = scalar(input_scale)
    return found


def compressed(name: str, input_scale: float | None = 1 / SCALE) -> Tensors:
    """A compressed-tensors NVFP4 matrix, whose global scales are reciprocals."""
    found = {
        f"{name}.weight_packed": tensor("U8", HIDDEN, HIDDEN // 2),
        f"{name}.weight_scale": tensor("F8_E4M3", HIDDEN, HIDDEN // 16),
        f"{name}.weight_global_scale": scalar(50.0, 1),
    }
    if input_scale is not None:
        found[f"{name}.input_global_scale"] = scalar(input_scale, 1)
    return found


Matrix = Callable[[str], Tensors]


def model(experts: Matrix = nvfp4, shared: Matrix = nvfp4, dense: Matrix = nvfp4, prefix: str = "model.") -> Tensors:
    """Three layers (one dense, then experts; linear attention but for the last), head, embedding. Attention is BF16."""
    found: Tensors = {
        **plain(f"{prefix}embed_tokens"),
        **plain("lm_head"),
        f"{prefix}norm.weight": tensor("BF16", HIDDEN),
    }
    for layer in range(LAYERS):
        found |= decoder_layer(f"{prefix}layers.{layer}.", layer, experts, shared, dense)
    return found


def decoder_layer(name: str, layer: int, experts: Matrix, shared: Matrix, dense: Matrix) -> Tensors:
    found: Tensors = {f"{name}input_layernorm.weight": tensor("BF16", HIDDEN)}
    linear = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj", "o_proj")
    sparse = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    for part in sparse if layer >= LAYERS - 1 else linear:
        found |= plain(f"{name}self_attn.{part}")
    if layer == 0:
        for part in ("gate_proj", "up_proj", "down_proj"):
            found |= dense(f"{name}mlp.{part}")
        return found
    found |= plain(f"{name}mlp.gate", EXPERTS)
    for part in ("gate_proj", "up_proj", "down_proj"):
        found |= shared(f"{name}mlp.shared_experts.{part}")
        for expert in range(EXPERTS):
            found |= experts(f"{name}mlp.experts.{expert}.{part}")
    return found


def config(quantization: Mapping | None = None, **text: Any) -> dict[str, Any]:
    """config.json of the flat text model."""
    found = {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next_text",
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention"] * (LAYERS - 1) + ["deepseek_sparse_attention"],
        "n_routed_experts": EXPERTS,
        "num_nextn_predict_layers": 0,
        **text,
    }
    return found if quantization is None else {**found, "quantization_config": quantization}


def nested(quantization: Mapping | None = None, **text: Any) -> dict[str, Any]:
    """config.json of the vision-language model around it, whose text names start with model.language_model."""
    found = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": config(**text),
        "vision_config": {"depth": 1},
    }
    return found if quantization is None else {**found, "quantization_config": quantization}


def modelopt(activations: Mapping | None = ACTIVATIONS, ignore: tuple[str, ...] = ("lm_head",), **more: Any) -> dict:
    """A flat ModelOpt configuration with one group; `activations` None for weight-only."""
    group = {**copy.deepcopy(GROUP), "input_activations": activations}
    base = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": group}, "ignore": [*ignore]}
    return {**base, **more}


def write_file(file: Path, tensors: Tensors) -> None:
    """One safetensors file."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(data for *_, data in tensors.values()))


def write(folder: Path, settings: Mapping, tensors: Tensors, shards: int = 2, **files: Mapping) -> Path:
    """A checkpoint of `shards` files with an index; `files` are further JSON files by their stem."""
    folder.mkdir(exist_ok=True, parents=True)
    names = list(tensors)
    where = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        write_file(folder / file, part)
        where |= dict.fromkeys(part, file)
    for stem, content in {"config": settings, "model.safetensors.index": {"weight_map": where}, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder
