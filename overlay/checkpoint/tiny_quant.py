"""Which quantised checkpoints there are to write: the forms of the configuration, and the faults of the scales.

A case is a shape that published checkpoints have: where the configuration is (config.json or hf_quant_config.json),
what it says of activations, and which activation scales are there. The routed experts are always NVFP4; a case with
`linears` also has the dense feed-forward blocks and shared experts in NVFP4. Nothing else of this model family can be:
vLLM builds every attention projection without a quantisation config, whatever the checkpoint says of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlay.checkpoint.tiny_config import CheckpointError, TinyModel

MODELOPT = "modelopt"
COMPRESSED_TENSORS = "compressed-tensors"
METHODS = (MODELOPT, COMPRESSED_TENSORS)

FAULTY_EXPERT = 2
# What each fault does to the activation scales of the routed experts, in every layer.
FAULTS = {
    "one_zero": f"expert {FAULTY_EXPERT} has scale 0",
    "one_huge": f"expert {FAULTY_EXPERT} has scale 1e30",
    "one_nan": f"expert {FAULTY_EXPERT} has scale NaN",
    "one_denormal": f"expert {FAULTY_EXPERT} has scale 1e-42",
    "one_missing": f"expert {FAULTY_EXPERT} has none",
    "all_zero": "every expert has scale 0",
    "missing": "no expert has one, whatever the configuration says",
    # Faults of other scales.
    "mismatched_w13": "gate and up have global weight scales a factor 8 apart (the weights stay the same)",
    "fused_gate_up": "gate and up have one entry, under gate_proj, for each per-tensor scale",
    "weight_scale_missing": f"expert {FAULTY_EXPERT} has no global weight scale",
    "linear_missing": "the quantised linears have no activation scale; the experts do",
}
NEEDS_NO_ACTIVATION_SCALES = ("mismatched_w13", "fused_gate_up", "weight_scale_missing")


@dataclass(frozen=True)
class Case:
    """One form of a quantised checkpoint."""

    method: str
    form: str  # of the configuration: a key of _FORMS
    about: str
    experts_have_scales: bool = True
    linears: bool = False
    fault: str | None = None  # one that belongs to the case


CASES = {
    MODELOPT: {
        "flat_null": Case(MODELOPT, "null", "input_activations: null; weight-only", False),
        "flat_no_groups": Case(MODELOPT, "no_groups", "no config_groups; weight-only", False),
        "nested_no_groups": Case(MODELOPT, "nested", "hf_quant_config.json; weight-only", False),
        "nested_groups_inside": Case(
            MODELOPT, "nested_groups", "hf_quant_config.json with config_groups inside; weight-only", False
        ),
        "empty_groups": Case(MODELOPT, "empty_groups", "config_groups: {}; weight-only", False),
        "empty_activation_table": Case(MODELOPT, "empty_table", "input_activations: {}; weight-only", False),
        "groups_list": Case(MODELOPT, "groups_list", "config_groups is a list; weight-only", False),
        "mixed_groups_experts_null": Case(
            MODELOPT, "two_groups", "two groups: experts weight-only, linears W4A4", False, linears=True
        ),
        "explicit_w4a16": Case(MODELOPT, "w4a16", "quant_algo W4A16_NVFP4; weight-only and says so", False),
        "genuine_w4a4": Case(MODELOPT, "w4a4", "experts W4A4 with every scale"),
        "genuine_w4a4_linears": Case(MODELOPT, "w4a4", "experts and linears W4A4 with every scale", linears=True),
        "nested_genuine_w4a4": Case(MODELOPT, "nested", "hf_quant_config.json; experts W4A4 with every scale"),
        "genuine_w4a4_one_dead_expert": Case(MODELOPT, "w4a4", "W4A4, one expert without scales", fault="one_missing"),
        "w4a4_all_zero_shipped": Case(MODELOPT, "w4a4", "W4A4, every shipped scale is 0", fault="all_zero"),
        "mixed_precision_experts_null": Case(
            MODELOPT, "mixed:NVFP4", "MIXED_PRECISION, experts NVFP4 by layer; weight-only", False
        ),
        "mixed_precision_w4a16": Case(
            MODELOPT, "mixed:W4A16_NVFP4", "MIXED_PRECISION, experts W4A16_NVFP4 by layer", False
        ),
        "mixed_precision_genuine": Case(MODELOPT, "mixed:NVFP4", "MIXED_PRECISION, experts W4A4 with every scale"),
        "mixed_precision_unknown": Case(
            MODELOPT, "mixed_unknown", "MIXED_PRECISION that names an algorithm nobody knows for one linear"
        ),
    },
    COMPRESSED_TENSORS: {
        "weight_only": Case(COMPRESSED_TENSORS, "ct_w4a16", "experts weight-only", False),
        "w4a4": Case(COMPRESSED_TENSORS, "ct_w4a4", "experts W4A4 with every scale"),
        "w4a4_linears": Case(
            COMPRESSED_TENSORS, "ct_w4a4_linears", "experts and linears W4A4 with every scale", linears=True
        ),
    },
}


def choose(method: str, case: str, fault: str | None) -> tuple[Case, str | None]:
    """The case and the fault to write. Raises CheckpointError for unknown names and for faults a case cannot have."""
    if case not in CASES[method]:
        raise CheckpointError(f"unknown case {case!r} for {method}; there are: {', '.join(CASES[method])}")
    chosen = CASES[method][case]
    if fault is None:
        return chosen, chosen.fault
    if fault not in FAULTS:
        raise CheckpointError(f"unknown fault {fault!r}; there are: {', '.join(FAULTS)}")
    if chosen.fault is not None:
        raise CheckpointError(f"case {case!r} is a fault itself ({chosen.fault}); leave --fault out")
    if fault == "linear_missing" and not chosen.linears:
        able = [name for name, other in CASES[method].items() if other.linears]
        raise CheckpointError(f"case {case!r} quantises no linears; {fault!r} needs one of: {', '.join(able)}")
    if not chosen.experts_have_scales and fault not in (*NEEDS_NO_ACTIVATION_SCALES, "linear_missing"):
        able = [name for name, other in CASES[method].items() if other.experts_have_scales and not other.fault]
        raise CheckpointError(
            f"case {case!r} ships no activation scales that {fault!r} could spoil; use one of: {', '.join(able)}"
        )
    return chosen, fault


def quantization_config(case: Case, model: TinyModel) -> tuple[str, dict]:
    """The file the configuration belongs to, and the configuration.

    "config.json" means its quantization_config; "hf_quant_config.json" is a file of its own.
    """
    if case.method == COMPRESSED_TENSORS:
        return "config.json", compressed_tensors_config(case)
    ignore = unquantised_modules(model, case.linears)
    if case.form.startswith("nested"):
        inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ignore}
        if case.form == "nested_groups":
            inner["config_groups"] = {"group_0": group(None)}
        return "hf_quant_config.json", {"producer": PRODUCER, "quantization": inner}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore, "producer": PRODUCER}
    if case.form.startswith("mixed"):
        config["quant_algo"] = "MIXED_PRECISION"
        config["quantized_layers"] = quantised_layers(case, model)
    elif case.form == "w4a16":
        config["quant_algo"] = "W4A16_NVFP4"
    elif case.form != "no_groups":
        config["config_groups"] = _GROUPS[case.form]()
    return "config.json", config


PRODUCER = {"name": "modelopt", "version": "0.45.0"}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16}


def group(activations: dict | None, targets: list[str] | None = None) -> dict:
    return {"weights": FP4, "input_activations": activations, "targets": targets or ["Linear"]}


_GROUPS = {
    "null": lambda: {"group_0": group(None)},
    "empty_groups": dict,
    "empty_table": lambda: {"group_0": group({})},
    "groups_list": lambda: [group(None)],
    "two_groups": lambda: {
        "group_0": group(FP4, ["*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj", "*shared_experts*"]),
        "group_1": group(None, ["*mlp.experts*"]),
    },
    "w4a4": lambda: {"group_0": group(FP4)},
}


def layer_prefixes(model: TinyModel) -> list[tuple[int, str]]:
    """(layer, name in the configuration) of each decoder layer, the MTP layer among them.

    A nested checkpoint's MTP layer is listed twice: vLLM builds the draft model as a text model, and matches names
    that lack `language_model` there.
    """
    text = "model.language_model.layers" if model.nested else "model.layers"
    names = [(layer, f"{text}.{layer}") for layer in range(model.layers + model.mtp)]
    if model.nested and model.mtp:
        names.append((model.layers, f"model.layers.{model.layers}"))
    return names


def unquantised_modules(model: TinyModel, linears: bool) -> list[str]:
    """Every linear that stays BF16, under the name of the vLLM module that holds it.

    vLLM matches these lists against its fused modules, so the six projections of a linear-attention layer appear as
    `in_proj_qkvbfg_a`; a list of the checkpoint's own tensor names would not match.
    """
    linear_attention = ["in_proj_qkvbfg_a", "f_b_proj", "g_b_proj", "q_conv1d", "k_conv1d", "v_conv1d", "o_proj"]
    sparse_attention = [
        "fused_qkv_a_proj",
        "q_b_proj",
        "kv_b_proj",
        "o_proj",
        "indexer.wq_b",
        "indexer.wk_weights_proj",
    ]
    names = ["lm_head"] + ["model.visual*"] * model.nested
    for layer, prefix in layer_prefixes(model):
        attention = sparse_attention if model.is_sparse_attention(layer) else linear_attention
        names += [f"{prefix}.self_attn.{module}" for module in attention]
        if layer == model.layers:
            names.append(f"{prefix}.eh_proj")
        if model.is_expert_layer(layer):
            names.append(f"{prefix}.mlp.gate")
        if not linears:
            block = "mlp.shared_experts" if model.is_expert_layer(layer) else "mlp"
            names += [f"{prefix}.{block}.{module}" for module in ("gate_up_proj", "down_proj")]
    return names


def quantised_layers(case: Case, model: TinyModel) -> dict[str, dict]:
    """The per-layer map of a MIXED_PRECISION configuration."""
    algorithm = "NVFP4" if case.form == "mixed_unknown" else case.form.removeprefix("mixed:")
    layers = {
        f"{prefix}.mlp.experts": {"quant_algo": algorithm, "group_size": 16}
        for layer, prefix in layer_prefixes(model)
        if model.is_expert_layer(layer)
    }
    if case.form == "mixed_unknown":
        prefix = layer_prefixes(model)[0][1]
        layers |= {
            f"{prefix}.mlp.{module}": {"quant_algo": "W8A8_SQ_PER_CHANNEL"}
            for module in ("gate_proj", "up_proj", "down_proj")
        }
    return layers


def compressed_tensors_config(case: Case) -> dict:
    """nvfp4-pack-quantized; targets and exclusions as regular expressions, as llm-compressor writes them."""
    weights = {**FP4, "strategy": "tensor_group", "symmetric": True, "dynamic": False}
    targets = [r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"]
    ignore = ["lm_head", r"re:.*\.self_attn\..*", r"re:.*\.mlp\.gate$", r"re:.*visual.*", r"re:.*\.eh_proj$"]
    if case.linears:
        targets.append(r"re:.*\.mlp\.(shared_experts\.)?(gate|up|gate_up|down)_proj$")
    else:
        ignore.append(r"re:.*\.mlp\.(shared_experts\.)?(gate|up|gate_up|down)_proj$")
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": targets,
                "weights": weights,
                "input_activations": None if case.form == "ct_w4a16" else {**weights, "dynamic": "local"},
                "output_activations": None,
                "format": "nvfp4-pack-quantized",
            }
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
