"""The quantised forms: configurations as published, the tensors of each case, the fault of each fault."""

import json
import math
from pathlib import Path

import pytest
import torch

from overlay.checkpoint.tiny_config import TinyModel
from overlay.checkpoint.tiny_nvfp4 import Packed, dequantise
from overlay.checkpoint.tiny_packed import feed_forward_blocks, quantised_weights, serialise, spoil, twin_weights
from overlay.checkpoint.tiny_quant import CASES, FAULTS, FAULTY_EXPERT, choose, quantization_config
from overlay.checkpoint.tiny_weights import weights

PUBLISHED = {
    form["id"]: form for form in json.loads((Path(__file__).parent.parent / "data/nvfp4/config_forms.json").read_text())
}
MODEL = TinyModel(heads=8)
GENUINE = CASES["modelopt"]["genuine_w4a4_linears"]


def without_names(config):
    """`config` less what depends on the model: module names and the tool that wrote it."""
    if isinstance(config, list):
        return [without_names(item) for item in config]
    if not isinstance(config, dict):
        return config
    dropped = ("ignore", "exclude_modules", "targets", "producer")
    return {key: without_names(value) for key, value in config.items() if key not in dropped}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configuration_has_the_published_form(name):
    file, config = quantization_config(CASES["modelopt"][name], MODEL)
    assert file == PUBLISHED[name]["file"]
    assert without_names(config) == without_names(PUBLISHED[name]["quantization"])


@pytest.mark.parametrize("nested", [False, True])
def test_exclusions_are_spelled_as_the_fused_modules_and_spare_the_experts(nested):
    model = TinyModel(heads=8, nested=nested, mtp=True)
    _, config = quantization_config(CASES["modelopt"]["genuine_w4a4"], model)
    prefix = "model.language_model.layers" if nested else "model.layers"
    assert {
        "lm_head",
        f"{prefix}.0.self_attn.in_proj_qkvbfg_a",
        f"{prefix}.3.self_attn.fused_qkv_a_proj",
        f"{prefix}.3.self_attn.indexer.wk_weights_proj",
        f"{prefix}.1.mlp.shared_experts.gate_up_proj",
        "model.layers.4.mlp.shared_experts.gate_up_proj",
    } <= set(config["ignore"])
    assert not [name for name in config["ignore"] if ".experts" in name.replace("shared_experts", "")]


@pytest.fixture(scope="module")
def genuine():
    return dict(quantised_weights(MODEL, GENUINE, None))


def test_only_the_feed_forward_blocks_are_quantised(genuine):
    plain = dict(weights(MODEL))
    packed = {name.removesuffix(".weight") for name, tensor in genuine.items() if tensor.dtype == torch.uint8}
    assert len(packed) == 3 * (1 + 3 + 3 * MODEL.experts)
    assert all(".mlp." in name for name in packed)
    for name, tensor in plain.items():
        if name.removesuffix(".weight") not in packed:
            assert torch.equal(genuine[name], tensor), name


def test_the_twin_holds_the_dequantised_weights(genuine):
    twin = dict(twin_weights(MODEL, GENUINE))
    assert list(twin) == list(dict(weights(MODEL)))
    for name, tensor in twin.items():
        stem = name.removesuffix("weight")
        if stem + "weight_scale" in genuine:
            scale = genuine[stem + "weight_scale_2"].item()
            packed = Packed(genuine[stem + "weight"], genuine[stem + "weight_scale"], scale)
            assert torch.equal(dequantise(packed), tensor), name
            assert math.log2(scale).is_integer()
        else:
            assert torch.equal(genuine[name], tensor), name


def test_activation_scales_are_those_of_a_calibration(genuine):
    scales = {name: tensor.item() for name, tensor in genuine.items() if name.endswith("input_scale")}
    assert len(scales) == 3 * (1 + 3 + 3 * MODEL.experts)
    values = sorted(scales.values())
    assert 1.4e-3 < values[len(values) // 2] < 1.8e-3
    assert values[0] > 5.58e-4
    assert values[-1] < 3.72e-2
    for name, value in scales.items():
        if ".gate_proj." in name:
            assert scales[name.replace("gate_proj", "up_proj")] == value
    assert len({value for name, value in scales.items() if ".experts." in name}) > MODEL.experts


@pytest.fixture(scope="module")
def block():
    """One routed expert's BF16 weights, and the match of one of their names."""
    blocks = feed_forward_blocks(MODEL, CASES["modelopt"]["genuine_w4a4"])
    return next((match, block) for match, block in blocks if match and match["expert"] == str(FAULTY_EXPERT))


ENDINGS = {
    "modelopt": {"weight", "weight_scale", "weight_scale_2", "input_scale"},
    "compressed-tensors": {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"},
}


@pytest.mark.parametrize(("method", "name"), [(method, name) for method in CASES for name in CASES[method]])
def test_experts_have_activation_scales_where_the_case_says_so(method, name, block):
    case = CASES[method][name]
    tensors = serialise(MODEL, case, *block, mismatched=False)
    endings = {key.rsplit(".", 1)[1] for key in tensors}
    missing = set() if case.experts_have_scales else {"input_scale", "input_global_scale"}
    assert endings == ENDINGS[method] - missing
    assert len(tensors) == 3 * len(endings)


def test_compressed_tensors_stores_divisors(block):
    ours = serialise(MODEL, CASES["modelopt"]["genuine_w4a4"], *block, mismatched=False)
    theirs = serialise(MODEL, CASES["compressed-tensors"]["w4a4"], *block, mismatched=False)
    for stem in {name.rsplit(".", 1)[0] for name in ours}:
        assert torch.equal(ours[stem + ".weight"], theirs[stem + ".weight_packed"])
        for factor, divisor in (("weight_scale_2", "weight_global_scale"), ("input_scale", "input_global_scale")):
            assert theirs[f"{stem}.{divisor}"].shape == (1,)
            assert theirs[f"{stem}.{divisor}"].item() == pytest.approx(1 / ours[f"{stem}.{factor}"].item(), rel=1e-6)


VALUES = {"one_zero": 0.0, "one_huge": 1e30, "one_nan": math.nan, "one_denormal": 1e-42, "all_zero": 0.0}


@pytest.mark.parametrize("method", ENDINGS)
@pytest.mark.parametrize("fault", [*VALUES, "one_missing", "missing", "fused_gate_up", "weight_scale_missing"])
def test_a_fault_changes_what_it_says_and_nothing_else(method, fault, block):
    case = CASES[method]["genuine_w4a4" if method == "modelopt" else "w4a4"]
    good = serialise(MODEL, case, *block, mismatched=False)
    activation = {name for name in good if "input" in name.rsplit(".", 1)[1]}
    whole = {name for name in good if name.endswith(("weight_scale_2", "weight_global_scale"))}
    for expert in (FAULTY_EXPERT, FAULTY_EXPERT + 1):
        bad = dict(spoil(good, fault, expert))
        hit = expert == FAULTY_EXPERT or fault in ("all_zero", "missing", "fused_gate_up")
        changed = {name for name in bad if bad[name] is not good[name]}
        dropped = good.keys() - bad.keys()
        if not hit:
            assert (changed, dropped) == (set(), set())
        elif fault in VALUES:
            assert (changed, dropped) == (activation, set())
            wanted = torch.tensor(VALUES[fault])
            for name in changed:
                assert torch.equal(bad[name].reshape(()).view(torch.int32), wanted.view(torch.int32))
        else:
            expected = {
                "one_missing": activation,
                "missing": activation,
                "weight_scale_missing": whole,
                "fused_gate_up": {name for name in activation | whole if ".up_proj." in name},
            }[fault]
            assert (changed, dropped) == (set(), expected)
    assert dict(spoil(good, fault, None)) == good, "a linear is not touched"


def test_linear_missing_spares_the_experts(block):
    tensors = serialise(MODEL, GENUINE, *block, mismatched=False)
    assert dict(spoil(tensors, "linear_missing", FAULTY_EXPERT)) == tensors
    assert {name.rsplit(".", 1)[1] for name in dict(spoil(tensors, "linear_missing", None))} == {
        "weight",
        "weight_scale",
        "weight_scale_2",
    }


def test_mismatched_global_scales_stand_for_the_same_weights(block):
    case = CASES["modelopt"]["genuine_w4a4"]
    good, bad = (serialise(MODEL, case, *block, mismatched=flag) for flag in (False, True))
    stems = {part: next(name for name in good if f".{part}_proj." in name).rsplit(".", 1)[0] for part in ("gate", "up")}
    ratio = bad[stems["up"] + ".weight_scale_2"] / bad[stems["gate"] + ".weight_scale_2"]
    assert ratio.item() == 8

    def value(tensors, stem):
        scale = tensors[stem + ".weight_scale_2"].item()
        return dequantise(Packed(tensors[stem + ".weight"], tensors[stem + ".weight_scale"], scale))

    assert torch.equal(value(good, stems["up"]), value(bad, stems["up"]))


def test_every_fault_can_be_written():
    for fault in FAULTS:
        assert choose("modelopt", "genuine_w4a4_linears", fault) == (GENUINE, fault)
    assert choose("modelopt", "genuine_w4a4_one_dead_expert", None)[1] == "one_missing"
