"""The cases: a checkpoint with one fault, the way it is loaded, and the memory it is loaded into."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.nvfp4.checkpoints import FORMATS, Format, expert_of, is_expert

DATA = Path(__file__).parent.parent / "data" / "nvfp4"
FORMS = json.loads((DATA / "config_forms.json").read_text())
SCALES = json.loads((DATA / "input_scales.json").read_text())
POISON = {"zero": 0.0, "nan": math.nan, "huge": 1e30}

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
NVFP4_GROUP = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
QUANTIZATION = {
    "modelopt": MODELOPT,
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": NVFP4_GROUP,
                "input_activations": {**NVFP4_GROUP, "dynamic": "local"},
            }
        },
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
    },
    "quark": {
        **json.loads((DATA / "public_configs" / "quark-nvfp4-fixture.json").read_text())["config"][
            "quantization_config"
        ],
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        "exclude": ["lm_head", "re:.*mlp.gate$"],
    },
}
# What the formats' configurations leave unquantised, by parts of checkpoint names.
HEADS = ("lm_head", "mlp.gate")
UNQUANTISED = {"modelopt": (), "compressed-tensors": HEADS, "quark": HEADS}


@dataclass(frozen=True)
class Scenario:
    """One load. `edit(form)` gives the checkpoint's fault, `options` the patch's options, `changes` the engine's.

    `reload`: the fault of a second set of weights, which is loaded into the same model after the first.
    """

    edit: Callable[[Format], Callable[[str, dict], None]]
    form: str = "modelopt"
    quantization: Mapping[str, Any] | None = None
    own_file: bool = False
    unquantised: tuple[str, ...] | None = None  # parts of names that `quantization` leaves alone; None: the form's
    poison: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    b12x: bool = False  # a GPU and packages for the two b12x backends, whose last step needs both and is left out
    reload: Callable[[Format], Callable[[str, dict], None]] | None = None


def complete(form: Format):
    return lambda name, own: None


def without_input_scales(form: Format):
    return lambda name, own: own.pop(form.input)


def without_experts_input_scales(form: Format):
    return lambda name, own: own.pop(form.input) if is_expert(name) else None


def dead_expert(form: Format):
    return lambda name, own: own.pop(form.input) if is_expert(name) and expert_of(name) == 2 else None


def zero_input_scales(form: Format):
    return lambda name, own: own.update({form.input: torch.zeros(())})


def experts_input_scales(factors: list[float | str]):
    """The experts' input scales, as factors; those of linear layers stay."""

    def edit(form: Format):
        def change(name: str, own: dict) -> None:
            if is_expert(name):
                factor = torch.tensor(float(factors[expert_of(name)]))
                own[form.input] = 1 / factor if form.reciprocal else factor

        return change

    return edit


def without(suffix: str, *parts: str):
    """Leave out one tensor (`blocks`, `globals`, `input`) of the projections whose names contain all of `parts`."""
    return lambda form: (
        lambda name, own: own.pop(getattr(form, suffix), None) if all(part in name for part in parts) else None
    )


def without_shards(*names: str, suffix: str = "globals"):
    """Leave one tensor out of the named shards of the attention's fused projection; k keeps its own."""
    return lambda form: lambda name, own: own.pop(getattr(form, suffix)) if name.endswith(names) else None


def scaled(suffix: str, factor: float, *parts: str):
    """Multiply one stored scale of the projections whose names contain all of `parts`."""

    def edit(form: Format):
        def change(name: str, own: dict) -> None:
            if all(part in name for part in parts):
                key = getattr(form, suffix)
                own[key] = own[key] / factor if form.reciprocal else own[key] * factor

        return change

    return edit


def remote_experts_unloaded(form: Format):
    """A loader that skips the experts of other ranks: the first of two ranks has experts 0 and 1."""
    return lambda name, own: own.pop(form.input) if is_expert(name) and expert_of(name) >= 2 else None


def without_head(form: Format):
    return lambda name, own: own.clear() if name == "lm_head" else None


EDITS = {
    "none": without_input_scales,
    "attention only": without_experts_input_scales,
    "all": complete,
    "all but expert 2": dead_expert,
    "all, every value 0.0": zero_input_scales,
}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "ignore": ["lm_head", "*self_attn*", "*mlp.gate"],
    "quantized_layers": {f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(2)},
}


def unknown_algorithm() -> dict[str, Any]:
    layers = {**MIXED["quantized_layers"], "model.layers.1.self_attn.o_proj": {"quant_algo": "W8A8_SQ_PER_CHANNEL"}}
    return {**MIXED, "ignore": ["lm_head", "*mlp.gate"], "quantized_layers": layers}


# vLLM's ModelOpt algorithms for linear layers beside NVFP4.
OTHER_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")


def other_linears(algorithm: str) -> dict[str, Any]:
    """NVFP4 experts beside attention in another of ModelOpt's algorithms, as public mixed checkpoints have them."""
    attention = {
        f"model.layers.{i}.self_attn.{name}_proj": {"quant_algo": algorithm} for i in range(2) for name in "qkvo"
    }
    layers = {**MIXED["quantized_layers"], **attention}
    return {**MIXED, "kv_cache_quant_algo": "FP8", "ignore": ["lm_head", "*mlp.gate"], "quantized_layers": layers}


def stored_otherwise(algorithm: str):
    """The attention's tensors as the algorithm stores them, with scales of 1/128, and KV-cache scales beside them."""

    def edit(form: Format):
        def change(name: str, own: dict) -> None:
            if "self_attn" not in name:
                return
            rows, columns = own[form.weight].shape[0], own[form.weight].shape[1] * 2
            codes = own[form.weight].repeat(1, 2) & 0x3F  # any e4m3 but NaN
            own.clear()
            own["weight"] = codes.view(torch.float8_e4m3fn)
            if algorithm == "MXFP8":
                own["weight_scale"] = torch.full((rows, columns // 32), 120, dtype=torch.uint8)
            else:
                shape = {"FP8": (), "FP8_PB_WO": (-(-rows // 128), 1, columns // 128, 1)}.get(algorithm, (rows,))
                own["weight_scale"] = torch.full(shape, 1 / 128)
            if algorithm == "FP8":
                own["input_scale"] = torch.tensor(1 / 128)
            if name.endswith(("k_proj", "v_proj")):
                own[f"{name[-6]}_scale"] = torch.tensor(0.5)

        return change

    return edit


def scenarios() -> dict[str, Scenario]:
    """Every load by name; `form/poison` for those that are repeated for each kind of unwritten memory."""
    found: dict[str, Scenario] = {}
    for case in FORMS:
        for poison, value in POISON.items():
            found[f"{case['id']}/{poison}"] = Scenario(
                EDITS[case["input_scales"]],
                quantization=case["quantization"],
                own_file=case["file"] == "hf_quant_config.json",
                poison=value,
            )
        if case["input_scales"] in ("none", "attention only"):  # the same words in the other of the two files
            found[f"crossed/{case['id']}"] = Scenario(
                EDITS[case["input_scales"]],
                quantization=case["quantization"],
                own_file=case["file"] != "hf_quant_config.json",
                poison=math.nan,
            )
        if case["input_scales"] != "all":
            # what such a configuration says, over a checkpoint that ships every scale
            found[f"shipped/{case['id']}"] = Scenario(
                complete, quantization=case["quantization"], own_file=case["file"] == "hf_quant_config.json"
            )
    for case in SCALES:
        for backend in ("flashinfer_cutlass", "cutlass"):
            found[f"{case['id']}/{backend}"] = Scenario(
                experts_input_scales(case["input_scale"]), changes={"moe_backend": backend}
            )
        found[f"{case['id']}/auto"] = Scenario(experts_input_scales(case["input_scale"]))
    for form in FORMATS:
        for poison, value in POISON.items():
            found[f"{form}/complete/{poison}"] = Scenario(complete, form, poison=value)
            found[f"{form}/none/{poison}"] = Scenario(without_input_scales, form, poison=value)
            found[f"{form}/dead/{poison}"] = Scenario(dead_expert, form, poison=value)
        found[f"{form}/garbage"] = Scenario(experts_input_scales([0.01, 0.03, "nan", 1e30]), form)
        found[f"{form}/expert global"] = Scenario(without("globals", "experts.1.down"), form, poison=1e30)
        found[f"{form}/linear global"] = Scenario(without("globals", "layers.1.self_attn.o_proj"), form, poison=1e30)
        found[f"{form}/expert blocks"] = Scenario(without("blocks", "experts.3.up"), form, poison=1e30)
        found[f"{form}/linear blocks"] = Scenario(without("blocks", "layers.0.self_attn.k_proj"), form, poison=1e30)
        found[f"{form}/shards global"] = Scenario(without_shards("q_proj", "v_proj"), form, poison=1e30)
        found[f"{form}/shards input"] = Scenario(without_shards("q_proj", "v_proj", suffix="input"), form, poison=1e30)
        found[f"{form}/gate global alone"] = Scenario(without("globals", "experts.", "up_proj"), form, poison=1e30)
        found[f"{form}/up global alone"] = Scenario(without("globals", "experts.", "gate_proj"), form, poison=1e30)
        found[f"{form}/mismatch"] = Scenario(scaled("globals", 4.0, "experts.1.up"), form)
        found[f"{form}/slight mismatch"] = Scenario(scaled("globals", 1.05, "experts.1.up"), form)
        found[f"{form}/linear mismatch"] = Scenario(scaled("globals", 4.0, "self_attn.k_proj"), form)
        found[f"{form}/one shard"] = Scenario(without("input", "layers.0.self_attn.v_proj"), form, poison=1e30)
        found[f"{form}/gate alone"] = Scenario(without("input", "experts.", "up_proj"), form, poison=1e30)
        found[f"{form}/down alone missing"] = Scenario(without("input", "experts.", "down_proj"), form, poison=1e30)
        found[f"{form}/refuse"] = Scenario(without_experts_input_scales, form, options={"all_missing": "refuse"})
        found[f"{form}/number"] = Scenario(without_experts_input_scales, form, options={"all_missing": 0.002})
        found[f"{form}/no repair"] = Scenario(dead_expert, form, options={"some_bad": "refuse"})
        found[f"{form}/dummy"] = Scenario(complete, form, changes={"load_format": "dummy"})
    for backend in ("flashinfer_cutlass", "cutlass", "emulation", "marlin"):
        found[f"flag/{backend}"] = Scenario(without_experts_input_scales, changes={"moe_backend": backend})
    for form in FORMATS:
        for backend in ("b12x", "flashinfer_b12x"):
            changes = {"moe_backend": backend}
            found[f"{backend}/{form}"] = Scenario(without_experts_input_scales, form, changes=changes, b12x=True)
        dummy, after = {"load_format": "dummy"}, f"{form}/dummy, reload"
        found[f"{after} complete"] = Scenario(complete, form, changes=dummy, reload=complete, poison=1e30)
        if form != "quark":  # no reload of Quark's is complete
            lost = {
                "none": without_experts_input_scales,
                "without a global scale": without("globals", "experts.1.down"),
                "linear": without("input", "layers.1.self_attn.o"),
            }
            for name, edit in lost.items():
                found[f"{after} {name}"] = Scenario(complete, form, changes=dummy, reload=edit, poison=1e30)
        found[f"{form}/reload complete"] = Scenario(complete, form, reload=complete, poison=1e30)
        found[f"{form}/reload dead"] = Scenario(complete, form, reload=dead_expert, poison=1e30)
        found[f"{form}/reload none"] = Scenario(complete, form, reload=without_experts_input_scales, poison=1e30)
        found[f"{form}/reload linear"] = Scenario(complete, form, reload=without("input", "layers.1.self_attn.o"))
        found[f"{form}/reload routed"] = Scenario(without_input_scales, form, reload=without_input_scales, poison=1e30)
    for backend in ("auto", "cutlass"):
        changes = {"ranks": 2, "moe_backend": backend}
        found[f"ranks/remote unloaded/{backend}"] = Scenario(remote_experts_unloaded, changes=changes, poison=1e30)
        found[f"ranks/remote garbage/{backend}"] = Scenario(
            experts_input_scales([0.01, 0.01, 0.01, 1e30]), changes=changes
        )
        found[f"ranks/local dead/{backend}"] = Scenario(without("input", "experts.1."), changes=changes, poison=1e30)
    found["ranks/none"] = Scenario(without_input_scales, changes={"ranks": 2}, poison=1e30)
    found["ranks/complete"] = Scenario(complete, changes={"ranks": 2}, poison=1e30)
    unrecognised = json.loads((DATA / "public_configs" / "mo-nested-minimax-m21-gadflyii.json").read_text())["config"]
    found["public/unrecognised"] = Scenario(
        complete, quantization=unrecognised, own_file=True, unquantised=(*HEADS, "self_attn")
    )
    found["draft head"] = Scenario(without_head, changes={"runner": "draft"}, poison=1e30)
    found["missing head"] = Scenario(without_head, poison=1e30)
    found["mixed/unknown"] = Scenario(complete, quantization=unknown_algorithm(), unquantised=HEADS)
    attention = (*HEADS, "self_attn")
    found["mixed/none"] = Scenario(without_input_scales, quantization=MIXED, unquantised=attention)
    found["mixed/complete"] = Scenario(complete, quantization=MIXED, unquantised=attention)
    found["linears/FP8 alone"] = Scenario(
        stored_otherwise("FP8"),
        quantization={**MODELOPT, "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head", "*mlp*"]},
        unquantised=(*HEADS, ".experts."),
        poison=1e30,
    )
    for algorithm in OTHER_ALGORITHMS:
        found[f"linears/{algorithm}"] = Scenario(
            stored_otherwise(algorithm), quantization=other_linears(algorithm), unquantised=HEADS, poison=1e30
        )
    return found
