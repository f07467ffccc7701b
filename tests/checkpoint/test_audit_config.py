"""Quantisation configurations: the public ones, every spelling of weight-only, and two files that disagree."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlay.checkpoint import audit_claims
from overlay.checkpoint.audit import audit
from overlay.checkpoint.audit_config import SIDE_FILE, in_effect, load_json, read, state
from overlay.checkpoint.tiny_config import CheckpointError
from tests.checkpoint import small

DATA = Path(__file__).resolve().parents[1] / "data" / "nvfp4"


def public(name: str):
    """A public checkpoint's configuration, and the findings on it alone."""
    case = json.loads((DATA / "public_configs" / f"{name}.json").read_text())
    config = read(case["config"], SIDE_FILE if case["file"].startswith("hf_quant_config") else "config.json")
    main, side = (None, config) if config.nested else (config, None)
    return config, {finding.check: finding for finding in audit_claims.findings(main, side)}


# What a correct engine does with each: the label, whether activation scales belong to it, the KV cache it asks for, and
# the findings on the configuration by itself.
PUBLIC = {
    "mo-flat-glm52": ("NVFP4 W4A4", "all", "fp8", set()),
    "mo-nested-glm5": ("NVFP4 W4A4", "all", "fp8", set()),
    "mo-flat-minimax-m27": ("NVFP4 W4A4", "all", "fp8", set()),
    "mo-stub-nemotron3-super": ("undetermined", "unknown", "fp8", {"quant_method", "side_file_fields"}),
    "mix-flat-qwen36-35b": ("mixed: FP8 + NVFP4 W4A16", "none", None, {"groups_against_layers"}),
    "mix-nested-qwen36-35b": ("mixed: FP8 + NVFP4 W4A16", "none", "fp8", set()),
    "neg-int4-kimi-k25": ("INT4 weight-only", "none", None, set()),
    "ct-w4a4-devstral2-autoround": ("NVFP4 W4A4", "all", None, set()),
    "ct-mix-w4a16-qwen38-35b-distill": ("mixed: FP8 + NVFP4 W4A16", "none", None, {"quant_method"}),
    "mo-weightonly-glm53flash-libertai": ("NVFP4 W4A16", "none", None, {"label_nvfp4_is_weight_only"}),
    "mo-nested-minimax-m21-gadflyii": ("NVFP4 W4A4", "all", None, {"quant_method", "side_file_fields"}),
    "mix-nested-step35-flash-w8a8sq": (
        "mixed: NVFP4 W4A4 + W8A8_SQ_PER_CHANNEL", "all", None, {"unknown_algorithm"},
    ),
    "quark-nvfp4-fixture": ("NVFP4 W4A4", "all", None, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_configuration(name):
    config, found = public(name)
    label, scales, kv_cache, checks = PUBLIC[name]
    assert state(config).label == label
    assert state(config).activation_scales == scales
    assert config.kv_cache == kv_cache
    assert set(found) == checks


def test_every_public_configuration_is_in_the_table():
    assert {file.stem for file in (DATA / "public_configs").glob("*.json")} == set(PUBLIC)


def test_an_algorithm_that_vllm_lacks_is_refused_with_its_layers():
    finding = public("mix-nested-step35-flash-w8a8sq")[1]["unknown_algorithm"]
    assert finding.severity == "error"
    assert "model.layers.0.mlp.up_proj, model.layers.0.mlp.down_proj" in finding.what
    assert "W8A8_SQ_PER_CHANNEL" in finding.what


def test_a_stub_is_told_apart_from_a_short_configuration():
    # Both lack an exclusion list; one also lacks everything that would say how the checkpoint was made.
    assert state(public("mo-stub-nemotron3-super")[0]).label == "undetermined"
    assert state(public("mo-nested-minimax-m21-gadflyii")[0]).label == "NVFP4 W4A4"


def test_two_files_that_disagree():
    main, side = public("mix-flat-qwen36-35b")[0], public("mix-nested-qwen36-35b")[0]
    found = {finding.check: finding for finding in audit_claims.findings(main, side)}
    assert set(found) == {"groups_against_layers", "kv_cache_contradiction"}
    assert "config.json says nothing, hf_quant_config.json says fp8" in found["kv_cache_contradiction"].what
    assert in_effect(main, side) is main


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        ({"quant_algo": "FP8"}, "config_contradiction", "NVFP4, hf_quant_config.json says FP8"),
        ({"group_size": 32}, "config_contradiction", "group_size"),
        ({"exclude_modules": ["lm_head", "x"]}, "config_contradiction", "exclusion list"),
        ({"kv_cache_quant_algo": "FP8"}, "kv_cache_contradiction", "fp8"),
        ({}, None, None),
    ],
)
def test_each_contradiction(change, check, said):
    main = read({"quantization_config": {**small.modelopt(), "group_size": 16}})
    body = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    side = read({"producer": {"name": "modelopt"}, "quantization": {**body, **change}}, SIDE_FILE)
    found = audit_claims.findings(main, side)
    assert [finding.check for finding in found] == ([check] if check else [])
    assert said is None or said in found[0].what


def test_a_mixed_configuration_without_a_map_uses_the_side_file():
    main = read({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}})
    side = public("mix-nested-qwen36-35b")[0]
    assert in_effect(main, side) is side
    assert [finding.check for finding in audit_claims.findings(main, None)] == ["mixed_without_layers"]


def test_the_side_file_may_not_say_w4a16():
    body = {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": []}
    side = read({"producer": {"name": "modelopt"}, "quantization": body}, SIDE_FILE)
    assert [finding.check for finding in audit_claims.findings(None, side)] == ["side_file_algorithm"]


def test_a_side_file_goes_before_the_text_models_configuration():
    """vLLM asks for the outer configuration, then for the file, and only then for the inner one."""
    main = read({"text_config": {"quantization_config": small.modelopt()}})
    side = public("mo-nested-glm5")[0]
    assert in_effect(main, side) is side
    assert in_effect(main, None) is main
    assert in_effect(read({"quantization_config": small.modelopt()}), side) is not side


def test_a_method_that_only_the_form_tells_is_not_seen_by_vllm():
    """And what cures it names the method that the form has."""
    for name, method in (("ct-w4a4-devstral2-autoround", "compressed-tensors"), ("mo-flat-minimax-m27", "modelopt")):
        document = dict(public(name)[0].document)
        del document["quant_method"]
        config = read({"quantization_config": document})
        assert config.method == method
        (finding,) = audit_claims.findings(config, None)
        assert (finding.check, finding.severity) == ("quant_method", "error")
        assert f'"quant_method": "{method}"' in finding.cure


def test_the_text_models_configuration_counts_where_the_outer_has_none():
    inner = small.modelopt(None)
    assert read({"text_config": {"quantization_config": inner}}).document == inner
    both = read({"text_config": {"quantization_config": inner}, "quantization_config": small.modelopt()})
    assert both.document == small.modelopt()


FORMS = json.loads((DATA / "config_forms.json").read_text())


@pytest.mark.parametrize("form", FORMS, ids=[form["id"] for form in FORMS])
def test_weight_only_by_statement(form):
    """Groups that quantise weights alone say so in any spelling; a label alone says W4A4, whatever is stored."""
    config = read(form["quantization"], form["file"])
    groups = form["quantization"].get("config_groups") or form["quantization"].get("quantization", {}).get(
        "config_groups"
    )
    activations = {bool(group["input_activations"]) for group in (groups or {}).values()}
    expected = {frozenset(): "all", frozenset({False}): "none", frozenset({True}): "all"}.get(
        frozenset(activations), "some"
    )
    assert state(config).activation_scales == expected
    assert config.weight_only is (activations == {False})


@pytest.mark.parametrize("content", ["{", "[]", "\xff", "[" * 100_000])
def test_a_file_that_is_no_json_object_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_json(tmp_path / "config.json")
    assert load_json(tmp_path / "other.json") is None


KEYS = (
    "quantization_config", "text_config", "compression_config", "quantization", "quant_method", "quant_algo",
    "producer", "name", "version", "config_groups", "group_0", "weights", "input_activations", "targets",
    "num_bits", "type", "group_size", "ignore", "exclude", "quantized_layers", "kv_cache_scheme",
    "kv_cache_quant_algo", "exclude_modules", "global_quant_config", "weight", "input_tensors", "dtype",
    "architectures", "num_hidden_layers", "layer_types",
)  # fmt: skip
WORDS = (
    "modelopt",
    "quark",
    "compressed-tensors",
    "NVFP4",
    "MIXED_PRECISION",
    "float",
    "fp4",
    "name",
    "re:(",
    "lm_head",
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-1, 16), st.floats(), st.sampled_from(WORDS))
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(main=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8), body=JSON)
@example({"quantization_config": {"producer": "my name", "ignore": {"a": 1}}}, None)
@example({}, {"quant_method": "quark", "global_quant_config": ["weight"]})
@example({}, {"quant_method": "quark", "global_quant_config": {"weight": [1, 2]}})
@example({}, {"quant_algo": 4, "quantized_layers": ["a"], "config_groups": 7})
def test_odd_documents_raise_nothing(checkpoint, main, body):
    """Whatever JSON a checkpoint comes with, the audit answers."""
    for document in (main, {"quantization_config": body}):
        (checkpoint / "config.json").write_text(json.dumps(document))
        (checkpoint / SIDE_FILE).write_text(json.dumps({"quantization": body}))
        result = audit(checkpoint)
        assert result.bytes > 0
        json.dumps(result.as_json())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tensors = small.plain("lm_head") | small.nvfp4("model.layers.0.mlp.experts.0.up_proj") | small.compressed("model.a")
    return small.write(tmp_path_factory.mktemp("odd"), {}, tensors)


@pytest.mark.parametrize("place", ["ignore", "targets"])
def test_a_pattern_that_is_no_regular_expression(place):
    group = {**small.GROUP, "targets": ["re:(" if place == "targets" else "Linear"], "input_activations": None}
    ignore = ["re:("] if place == "ignore" else ["lm_head"]
    config = read({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ignore})
    assert [finding.check for finding in audit_claims.findings(config, None)] == ["bad_pattern"]
