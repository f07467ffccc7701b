"""The tensors of a quantised tiny checkpoint, and of the BF16 twin that holds the same weights.

Both start from the seeded BF16 weights. A quantised feed-forward block gets packed weights and their scales, under the
names and in the sense of its format: ModelOpt stores `weight_scale_2` and `input_scale` as factors, compressed-tensors
stores `weight_global_scale` and `input_global_scale` as divisors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from overlay.checkpoint.tiny_config import TinyModel
from overlay.checkpoint.tiny_nvfp4 import E2M1_MAX, E4M3_MAX, Packed, dequantise, global_scale, quantise
from overlay.checkpoint.tiny_quant import COMPRESSED_TENSORS, FAULTY_EXPERT, Case
from overlay.checkpoint.tiny_weights import Draw, NamedTensors, reserved_channels, weights

MISMATCH = 8.0
CALIBRATION_TOKENS = 128
_BAD_VALUES = {"one_zero": 0.0, "one_huge": 1e30, "one_nan": float("nan"), "one_denormal": 1e-42, "all_zero": 0.0}
_FEED_FORWARD = re.compile(
    r"(?P<block>.*\.layers\.(?P<layer>\d+)\.mlp\.((?P<shared>shared_experts)\.|experts\.(?P<expert>\d+)\.)?)"
    r"(?P<part>gate|up|down)_proj\.weight"
)


def quantised_weights(model: TinyModel, case: Case, fault: str | None) -> NamedTensors:
    """Every tensor of the checkpoint of `case` with `fault`."""
    for match, block in feed_forward_blocks(model, case):
        if match is None:
            yield from block.items()
            continue
        expert = match["expert"] and int(match["expert"])
        tensors = serialise(model, case, match, block, mismatched=fault == "mismatched_w13" and expert is not None)
        yield from spoil(tensors, fault, expert)


def twin_weights(model: TinyModel, case: Case) -> NamedTensors:
    """The same checkpoint in BF16: each quantised weight is what its packed form stands for."""
    for match, block in feed_forward_blocks(model, case):
        if match is None:
            yield from block.items()
        else:
            for part, packed in pack(block, mismatched=False).items():
                yield f"{match['block']}{part}_proj.weight", dequantise(packed)


def feed_forward_blocks(model: TinyModel, case: Case) -> Iterator[tuple[re.Match | None, dict[str, torch.Tensor]]]:
    """All tensors of the BF16 checkpoint in order, the gate, up and down of a block to be quantised together.

    Yields (match of one of the block's names, {"gate", "up", "down"}) or (None, {name: tensor}).
    """
    block: dict[str, torch.Tensor] = {}
    for name, tensor in weights(model):
        match = _FEED_FORWARD.fullmatch(name)
        if match is None or (match["expert"] is None and not case.linears):
            yield None, {name: tensor}
            continue
        block[match["part"]] = tensor
        if len(block) == 3:
            yield match, block
            block = {}


def pack(block: dict[str, torch.Tensor], mismatched: bool) -> dict[str, Packed]:
    """Quantise one block. Gate and up are one matrix in the engine, so they share a global scale, unless mismatched."""
    first = global_scale(max(block["gate"].abs().max().item(), block["up"].abs().max().item()))
    scales = {
        "gate": first,
        "up": first * MISMATCH if mismatched else first,
        "down": global_scale(block["down"].abs().max().item()),
    }
    return {part: quantise(tensor, scales[part]) for part, tensor in block.items()}


def activation_scales(model: TinyModel, block: dict[str, torch.Tensor], key: str) -> dict[str, float]:
    """Static activation scales as a calibration gives them: the largest activation over 6 * 448.

    The calibration tokens look like what reaches a feed-forward block: normalised, with the reserved channels at +-1.
    """
    draw = Draw(model.seed)
    tokens = draw.normal("calibration." + key, CALIBRATION_TOKENS, model.hidden)
    tokens[:, : reserved_channels(model)].sign_()
    hidden = torch.nn.functional.silu(tokens @ block["gate"].float().T) * (tokens @ block["up"].float().T)
    largest = {"gate": tokens.abs().max(), "down": hidden.abs().max()}
    scales = {part: value.item() / (E2M1_MAX * E4M3_MAX) for part, value in largest.items()}
    return scales | {"up": scales["gate"]}


def serialise(
    model: TinyModel, case: Case, match: re.Match, block: dict[str, torch.Tensor], mismatched: bool
) -> dict[str, torch.Tensor]:
    """The stored tensors of one quantised block, by full name."""
    divisors = case.method == COMPRESSED_TENSORS
    names = ("weight_packed", "weight_global_scale", "input_global_scale") if divisors else _MODELOPT_NAMES
    key = f"{match['layer']}.{match['shared'] or match['expert'] or 'dense'}"
    inputs = activation_scales(model, block, key) if has_activation_scales(case, match) else {}

    def stored(value: float) -> torch.Tensor:
        # llm-compressor stores scalars with one element, ModelOpt without dimensions.
        return torch.tensor([1.0 / value]) if divisors else torch.tensor(value)

    tensors = {}
    for part, packed in pack(block, mismatched).items():
        prefix = f"{match['block']}{part}_proj."
        tensors[prefix + names[0]] = packed.codes
        tensors[prefix + "weight_scale"] = packed.block_scales
        tensors[prefix + names[1]] = stored(packed.global_scale)
        if inputs:
            tensors[prefix + names[2]] = stored(inputs[part])
    return tensors


_MODELOPT_NAMES = ("weight", "weight_scale_2", "input_scale")
_ACTIVATION_SCALES = (".input_scale", ".input_global_scale")
_GLOBAL_SCALES = (".weight_scale_2", ".weight_global_scale")


def has_activation_scales(case: Case, match: re.Match) -> bool:
    """Whether the block of `match` is W4A4 in `case`. Quantised linears are, beside whatever the experts are."""
    return case.experts_have_scales if match["expert"] is not None else case.linears


def spoil(tensors: dict[str, torch.Tensor], fault: str | None, expert: int | None) -> NamedTensors:
    """The block's tensors with `fault` in them. `expert` is None for a linear."""
    for name, tensor in tensors.items():
        activation, whole = name.endswith(_ACTIVATION_SCALES), name.endswith(_GLOBAL_SCALES)
        if expert is None:
            dropped = fault == "linear_missing" and activation
        else:
            faulty = expert == FAULTY_EXPERT
            dropped = (
                (fault == "missing" and activation)
                or (fault == "one_missing" and activation and faulty)
                or (fault == "weight_scale_missing" and whole and faulty)
                or (fault == "fused_gate_up" and (activation or whole) and ".up_proj." in name)
            )
            if activation and fault in _BAD_VALUES and (faulty or fault.startswith("all_")):
                tensor = torch.full_like(tensor, _BAD_VALUES[fault])
        if not dropped:
            yield name, tensor
