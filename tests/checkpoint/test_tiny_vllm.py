"""Tiny checkpoints through the installed vLLM: configuration classes, model classes and their weight loaders."""

import json

import pytest

from overlay.checkpoint import tiny
from overlay.checkpoint.tiny_config import TinyModel, model_config
from overlay.checkpoint.tiny_quant import CASES, quantization_config
from tests.conftest import run_python

FLAT = TinyModel(heads=8)
NESTED = TinyModel(heads=8, nested=True, mtp=True)
FORMS = [(method, name) for method in CASES for name in CASES[method]]

# name -> (model, method, case, fault); None for BF16.
LOADED = {
    "flat": (FLAT, None, None, None),
    "nested": (NESTED, None, None, None),
    "twin": (FLAT, None, None, None),
    "modelopt": (FLAT, "modelopt", "genuine_w4a4_linears", None),
    "modelopt_weight_only_nested": (NESTED, "modelopt", "nested_no_groups", None),
    "one_missing": (FLAT, "modelopt", "genuine_w4a4_one_dead_expert", "one_missing"),
    "fused_gate_up": (FLAT, "modelopt", "genuine_w4a4", "fused_gate_up"),
    "compressed": (FLAT, "compressed-tensors", "w4a4_linears", None),
}


@pytest.fixture(scope="module")
def answers(fake_driver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    load = {}
    for name, (model, method, case_name, fault) in LOADED.items():
        path = folder / name
        if method is not None:
            tiny.write_quantised(model, CASES[method][case_name], fault, path)
        elif name == "twin":
            tiny.write_twin(model, CASES["modelopt"]["genuine_w4a4_linears"], path)
        else:
            tiny.write(model, path)
        load[name] = {"path": str(path), "mtp": model.mtp}
    load["nested_text_only"] = {"path": load["nested"]["path"], "text_only": True}

    parse = {"flat": load["flat"]["path"], "nested": load["nested"]["path"]}
    for method, name in FORMS:
        for model in (FLAT, NESTED):
            path = folder / f"{method}-{name}-{model.nested}"
            path.mkdir()
            write_configuration(path, model, CASES[method][name])
            parse[form_key(method, name, model)] = str(path)
    asked = json.dumps({"load": load, "parse": parse})
    return run_python("tests.checkpoint.tiny_in_vllm", fake_driver((12, 1)), asked, timeout=900)


def write_configuration(path, model, case):
    """Only what ModelConfig reads; the tensors of these forms are tested elsewhere."""
    file, quantization = quantization_config(case, model)
    config = model_config(model)
    if file == "config.json":
        config["quantization_config"] = quantization
    else:
        (path / file).write_text(json.dumps(quantization))
    (path / "config.json").write_text(json.dumps(config))


def form_key(method, name, model):
    return f"{method}:{name}:{'nested' if model.nested else 'flat'}"


@pytest.mark.parametrize("name", ["flat", "nested"])
def test_vllm_sees_the_geometry_that_attention_backends_are_chosen_by(answers, name):
    seen = answers["parse"][name]
    assert seen["architecture"] == ("Glm5NextForCausalLM" if name == "flat" else "Glm5NextForConditionalGeneration")
    assert (seen["use_mla"], seen["head_size"], seen["is_hybrid"]) == (True, 512, True)
    assert (seen["index_topk"], seen["index_kpool"], seen["linear_heads"]) == (2048, 4, 8)
    assert seen["quantization"] is None


# What vLLM 0.33.0 itself makes of each form: where it does not say W4A16, it believes a weight-only checkpoint W4A4.
STOCK = {
    "flat_null": "W4A16_NVFP4",
    "explicit_w4a16": "W4A16_NVFP4",
    "mixed_precision_experts_null": None,
    "mixed_precision_w4a16": None,
    "mixed_precision_genuine": None,
    "mixed_precision_unknown": None,
}
CLASSES = {"modelopt_fp4": "ModelOptNvFp4Config", "modelopt_mixed": "ModelOptMixedPrecisionConfig"}


@pytest.mark.parametrize("model", [FLAT, NESTED], ids=["flat", "nested"])
@pytest.mark.parametrize(("method", "name"), FORMS)
def test_every_form_of_configuration_is_parsed(answers, method, name, model):
    seen = answers["parse"][form_key(method, name, model)]
    if method == "compressed-tensors":
        assert (seen["quantization"], seen["class"]) == ("compressed-tensors", "CompressedTensorsConfig")
        return
    assert seen["quantization"] == ("modelopt_mixed" if name.startswith("mixed_precision") else "modelopt_fp4")
    assert seen["class"] == CLASSES[seen["quantization"]]
    if not name.startswith("mixed_precision"):
        assert seen["algorithm"] == STOCK.get(name, "NVFP4")
    assert seen["excluded"] > 20


@pytest.mark.parametrize("name", ["flat", "nested", "nested_text_only", "twin", "modelopt", "compressed"])
def test_every_parameter_of_the_model_is_loaded_and_no_tensor_is_unknown(answers, name):
    for part, seen in answers["load"][name].items():
        assert seen["parameters"] > 20, part
        assert (seen["unknown"], seen["missing"], seen["holes"]) == ([], [], []), part


def test_the_draft_model_is_loaded_with_the_target(answers):
    assert set(answers["load"]["nested"]) == {"target", "draft"}
    assert answers["load"]["nested"]["target"]["has_tower"]
    assert not answers["load"]["nested_text_only"]["target"]["has_tower"]


def test_a_weight_only_checkpoint_leaves_exactly_the_activation_scales_unloaded(answers):
    for part, layers in (("target", [1, 2, 3]), ("draft", [4])):
        seen = answers["load"]["modelopt_weight_only_nested"][part]
        prefix = "language_model.model.layers.{}." if part == "target" else "model.layers.{}.mtp_block."
        expected = [
            prefix.format(layer) + f"mlp.experts.routed_experts.{scale}_input_scale"
            for layer in layers
            for scale in ("w13", "w2")
        ]
        assert seen["missing"] == seen["holes"] == expected
        assert seen["unknown"] == []


@pytest.mark.parametrize("name", ["one_missing", "fused_gate_up"])
def test_a_fault_of_some_experts_is_invisible_to_whole_parameter_tracking(answers, name):
    seen = answers["load"][name]["target"]
    assert seen["missing"] == []
    scales = {"one_missing": ["w13_input", "w2_input"], "fused_gate_up": ["w13_input", "w13_weight"]}[name]
    ends = [f"{scale}_scale" if "input" in scale else f"{scale}_scale_2" for scale in scales]
    expected = [f"model.layers.{layer}.mlp.experts.routed_experts.{end}" for layer in (1, 2, 3) for end in ends]
    assert seen["holes"] == expected


@pytest.mark.parametrize("name", ["modelopt", "one_missing", "compressed"])
def test_vllm_dequantises_the_loaded_experts_to_the_weights_of_the_twin(answers, name):
    twin = answers["load"]["twin"]["target"]["experts"]
    assert len(set(twin)) == 3
    assert answers["load"][name]["target"]["experts"] == twin
    assert answers["load"]["flat"]["target"]["experts"] != twin, "quantising changed nothing"
