"""The audit of whole folders: a sound checkpoint gives nothing, each fault its own finding and no other."""

import ast
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from overlay.checkpoint import audit_scales
from overlay.checkpoint.audit import Audit, audit
from overlay.checkpoint.audit_headers import HeaderError
from overlay.checkpoint.findings import counted, numbers
from overlay.checkpoint.tiny_config import CheckpointError
from tests.checkpoint import small

ROOT = Path(__file__).resolve().parents[2]
FORMS = json.loads((ROOT / "tests" / "data" / "nvfp4" / "config_forms.json").read_text())
INPUT_SCALES = json.loads((ROOT / "tests" / "data" / "nvfp4" / "input_scales.json").read_text())
EXPERT = "model.layers.1.mlp.experts.2"
SOUND = small.config(small.modelopt())


def weight_only(name: str) -> small.Tensors:
    return small.nvfp4(name, input_scale=None)


def findings(result: Audit) -> dict[str, list[str]]:
    """Check -> what was found."""
    found: dict[str, list[str]] = {}
    for finding in result.findings:
        found.setdefault(finding.check, []).append(finding.what)
    return found


def served(result: Audit) -> dict[str, str]:
    return {row.kind: row.summary for row in result.activations}


def examine(tmp_path, settings=SOUND, tensors=None, **more) -> Audit:
    return audit(small.write(tmp_path / "model", settings, small.model() if tensors is None else tensors, **more))


# --- sound checkpoints ------------------------------------------------------------------------------------------------


def test_a_sound_w4a4_checkpoint(tmp_path):
    result = examine(tmp_path)
    assert findings(result) == {}
    assert not result.failed
    assert served(result) == {"routed experts": "W4A4", "shared experts": "W4A4", "dense MLP": "W4A4"}
    assert result.statement.label == "NVFP4 W4A4"


def test_totals(tmp_path):
    square = small.HIDDEN * small.WIDTH
    expected = {
        "routed experts": 2 * small.EXPERTS * 3 * square,
        "shared experts": 2 * 3 * square,
        "dense MLP": 3 * square,
        "attention": 5 * square,
        "linear attention": 2 * 7 * square,
        "router": 2 * small.EXPERTS * small.HIDDEN,
        "embeddings": square,
        "output head": square,
        "norms and the rest": 4 * small.HIDDEN,
    }
    result = examine(tmp_path)
    assert {row.kind: row.parameters for row in result.totals} == expected
    files = list((tmp_path / "model").glob("*.safetensors"))
    headers = sum(8 + struct.unpack("<Q", file.read_bytes()[:8])[0] for file in files)
    assert result.bytes == sum(file.stat().st_size for file in files) - headers
    formats = {row.kind: dict(row.formats) for row in result.totals}
    assert formats["routed experts"] == {"nvfp4": expected["routed experts"]}
    assert formats["attention"] == {"BF16": expected["attention"]}


def test_an_unquantised_checkpoint(tmp_path):
    result = examine(tmp_path, small.config(), small.model(small.plain, small.plain, small.plain))
    assert findings(result) == {}
    assert result.statement.label == "unquantised"
    assert result.activations == ()


def test_a_compressed_tensors_checkpoint(tmp_path):
    group = {**small.GROUP, "input_activations": small.ACTIVATIONS}
    settings = small.config({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": []})
    kinds = small.compressed, small.compressed, small.compressed
    assert findings(examine(tmp_path, settings, small.model(*kinds))) == {}


def test_a_nested_checkpoint_with_vision_and_draft_layer(tmp_path):
    tensors = small.model(prefix="model.language_model.") | small.plain("model.visual.blocks.0.attn.qkv")
    tensors |= small.decoder_layer("model.language_model.layers.3.", 3, small.nvfp4, small.nvfp4, small.nvfp4)
    settings = small.nested(small.modelopt(), num_nextn_predict_layers=1)
    result = examine(tmp_path, settings, tensors, processor_config={})
    assert findings(result) == {}
    assert [row.kind for row in result.totals][-3:] == ["vision", "MTP layer", "norms and the rest"]
    assert served(result)["MTP layer, routed experts"] == "W4A4"


def test_the_tiny_checkpoints_of_this_project(tmp_path):
    """Written by others for engines to load: what is sound there is sound here, in BF16 and quantised."""
    from overlay.checkpoint.tiny import write, write_quantised
    from overlay.checkpoint.tiny_config import TinyModel
    from overlay.checkpoint.tiny_quant import choose

    model = TinyModel(heads=8, nested=True, mtp=True)
    size = write(model, tmp_path / "plain")
    result = audit(tmp_path / "plain")
    assert findings(result) == {}
    assert 0.98 * size < result.bytes < size
    write_quantised(model, *choose("modelopt", "genuine_w4a4_linears", None), tmp_path / "sound")
    result = audit(tmp_path / "sound")
    assert findings(result) == {}
    assert set(served(result).values()) == {"W4A4"}


# --- activation scales ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=[form["id"] for form in FORMS])
def test_every_spelling_of_the_configuration(tmp_path, form):
    """What is stored decides how experts are served; the finding says when stock vLLM would do something else."""
    scales = form["input_scales"]
    expert_scale = {"all": small.SCALE, "all but expert 2": small.SCALE, "all, every value 0.0": 0.0}.get(scales)

    def experts(name):
        missing = scales == "all but expert 2" and ".experts.2." in name
        return small.nvfp4(name, input_scale=None if missing else expert_scale)

    tensors = small.model(experts, small.plain, small.plain)
    quantization = json.loads(json.dumps(form["quantization"]))
    body = quantization.get("quantization", quantization)
    body["ignore" if "ignore" in body else "exclude_modules"] = ["lm_head", "*shared_experts*", "model.layers.0.mlp*"]
    if form["file"] == "config.json":
        result = examine(tmp_path, small.config(quantization), tensors)
    else:
        result = examine(tmp_path, small.config(), tensors, **{Path(form["file"]).stem: quantization})
    found = findings(result)
    promoted = form["id"] == "flat_null"
    if expert_scale == small.SCALE:
        wanted = "W4A4" if scales == "all" else "W4A4 repaired"
        assert served(result) == {"routed experts": wanted}
        assert ("activation_scales_incomplete" in found) is (wanted == "W4A4 repaired")
    else:
        assert served(result) == {"routed experts": "W4A16"}
        assert ("activation_scales_missing" in found) is not promoted
        assert result.failed is not promoted


@pytest.mark.parametrize("case", INPUT_SCALES, ids=[case["id"] for case in INPUT_SCALES])
def test_every_bad_value(tmp_path, case):
    values = [float(value) for value in case["input_scale"]]
    tensors = small.model()
    for expert, value in enumerate(values):
        for part in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"model.layers.2.mlp.experts.{expert}.{part}.input_scale"] = small.scalar(value)
    result = examine(tmp_path, SOUND, tensors)
    found = findings(result)
    if case["id"] == "all_valid":
        assert found == {}
    elif case["id"] == "all_zero":
        assert set(found) == {"activation_scales_missing"}
        assert "layer 2: activation scales unusable (0) for all of down_proj, gate_proj, up_proj" in str(found)
        assert served(result)["routed experts"] == "W4A16 (1), W4A4 (1)"
    else:
        assert set(found) == {"activation_scales_incomplete"}
        (what,) = found["activation_scales_incomplete"]
        assert what.startswith("routed experts, layer 2: activation scale unusable (")
        assert what.endswith(") for down_proj, gate_proj, up_proj of expert 2")


def test_one_dead_parameter_routes_the_layer(tmp_path):
    tensors = {k: v for k, v in small.model().items() if not (".layers.1.mlp.experts." in k and "down_proj.input" in k)}
    result = examine(tmp_path, SOUND, tensors)
    assert findings(result) == {
        "activation_scales_missing": [
            "routed experts, layer 1: activation scales missing for all of down_proj, and vLLM takes the configuration "
            "for W4A4"
        ]
    }
    assert served(result)["routed experts"] == "W4A16 (1), W4A4 (1)"


def test_a_linear_without_activation_scales(tmp_path):
    result = examine(tmp_path, SOUND, small.model(shared=weight_only))
    assert [what.partition(":")[0] for what in findings(result)["activation_scales_missing"]] == [
        "shared experts, layers 1-2",
        "shared experts, layers 1-2",
    ]


def test_reciprocals_are_judged_as_reciprocals(tmp_path):
    group = {**small.GROUP, "input_activations": small.ACTIVATIONS}
    settings = small.config({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": []})
    tensors = small.model(small.compressed, small.compressed, small.compressed)
    tensors[f"{EXPERT}.up_proj.input_global_scale"] = small.scalar(1e-6, 1)  # a factor of 1e6
    tensors[f"{EXPERT}.down_proj.input_global_scale"] = small.scalar(1e6, 1)  # a factor of 1e-6: fine
    found = findings(examine(tmp_path, settings, tensors))
    assert list(found) == ["activation_scales_incomplete"]
    assert "unusable (1e-06) for up_proj of expert 2" in found["activation_scales_incomplete"][0]


def test_scales_that_a_weight_only_configuration_does_not_want(tmp_path):
    result = examine(tmp_path, small.config(small.modelopt(None, quant_algo="W4A16_NVFP4")))
    assert set(findings(result)) == {"activation_scales_unused"}
    assert not result.failed


def test_stacked_experts_are_judged_one_by_one(tmp_path):
    stack = {}
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.0.moe.{part}"
        rows = [small.SCALE] * 3 + [float("nan")]
        stack |= {
            f"{name}.weight": small.tensor("U8", 4, 32, 16),
            f"{name}.weight_scale": small.tensor("F8_E4M3", 4, 32, 2),
            f"{name}.weight_scale_2": small.scalar(0.02, 4),
            f"{name}.input_scale": small.tensor("F32", 4, value=struct.pack("<4f", *rows)),
        }
    settings = {"architectures": ["Step3p5ForCausalLM"], "num_hidden_layers": 1, "n_routed_experts": 4}
    result = examine(tmp_path, {**settings, "quantization_config": small.modelopt()}, stack)
    assert served(result) == {"routed experts": "W4A4 repaired"}
    assert all("of expert 3" in what for what in findings(result)["activation_scales_incomplete"])


# --- the weights' own scales ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        (
            {f"{EXPERT}.up_proj.weight_scale_2": small.scalar(0.2)},
            "weight_scales_differ",
            "factor of up to 10.00 (expert 2)",
        ),
        ({f"{EXPERT}.up_proj.weight_scale_2": small.scalar(0.0215)}, None, None),  # below 1.1: left alone
        ({f"{EXPERT}.down_proj.weight_scale_2": small.scalar(0.2)}, None, None),  # its own parameter
        (
            {"model.layers.2.mlp.shared_experts.up_proj.weight_scale_2": small.scalar(0.04)},
            "weight_scales_differ",
            "factor of up to 2.00 (gate_up_proj)",
        ),
        (
            {f"{EXPERT}.up_proj.weight_scale_2": small.scalar(float("inf"))},
            "weight_scale_unusable",
            "unusable (inf) for up_proj of expert 2",
        ),
        ({f"{EXPERT}.up_proj.weight_scale_2": small.scalar(-1.0)}, "weight_scale_unusable", "unusable (-1)"),
        ({f"{EXPERT}.up_proj.weight_scale_2": None}, "weight_scale_unusable", "missing for up_proj of expert 2"),
        ({f"{EXPERT}.up_proj.weight_scale": None}, "block_scales", "up_proj has no block scales"),
        (
            {f"{EXPERT}.up_proj.weight_scale": small.tensor("F8_E4M3", 32, 1)},
            "block_scales",
            "have the shape [32, 1]; [32, 2] goes with the weight",
        ),
    ],
)  # fmt: skip
def test_weight_scales(tmp_path, change, check, said):
    tensors = {name: tensor for name, tensor in (small.model() | change).items() if tensor is not None}
    found = findings(examine(tmp_path, SOUND, tensors))
    assert list(found) == ([check] if check else [])
    assert said is None or said in found[check][0]


def test_one_scale_for_a_fused_projection(tmp_path):
    """Stored under gate's name alone: right for the weights of experts by chance, wrong for everything else."""
    tensors = {
        name: tensor
        for name, tensor in small.model().items()
        if not re.search(r"(experts\.\d+|shared_experts)\.up_proj\.(weight_scale_2|input_scale)", name)
    }
    result = examine(tmp_path, SOUND, tensors)
    assert {finding.check for finding in result.findings} == {"scale_shared"}
    assert {(finding.severity, finding.what) for finding in result.findings} == {
        ("error", "routed experts, layers 1-2: one activation scale for a fused projection, stored under gate_proj"),
        ("info", "routed experts, layers 1-2: one global weight scale for a fused projection, stored under gate_proj"),
        ("error", "shared experts, layers 1-2: one activation scale for a fused projection, stored under gate_proj"),
        ("error", "shared experts, layers 1-2: one global weight scale for a fused projection, stored under gate_proj"),
    }
    assert served(result) == {"routed experts": "W4A4", "shared experts": "W4A4", "dense MLP": "W4A4"}


# --- names ------------------------------------------------------------------------------------------------------------


def test_an_entry_that_vllm_finds_inside_another_name(tmp_path):
    result = examine(tmp_path, small.config(small.modelopt(ignore=("lm_head", "mlp.gate"))))
    found = findings(result)
    assert list(found) == ["excluded_but_quantised"]
    assert "'mlp.gate' is meant for another module" in found["excluded_but_quantised"][0]
    assert "mlp.gate_up_proj" in found["excluded_but_quantised"][0]


@pytest.mark.parametrize("entry", ["model.layers.1.mlp.gate", "*.mlp.gate", "model.layers.1.mlp.gate*"])
def test_the_router_on_the_list_is_no_fault(tmp_path, entry):
    assert findings(examine(tmp_path, small.config(small.modelopt(ignore=("lm_head", entry))))) == {}


def test_a_glob_for_layer_1_is_not_for_layer_10(tmp_path):
    tensors = small.plain("lm_head")
    for layer in range(11):
        kind = small.plain if layer == 1 else small.nvfp4
        for part in ("gate_proj", "up_proj", "down_proj"):
            tensors |= kind(f"model.layers.{layer}.mlp.{part}")
    settings = small.config(small.modelopt(ignore=("lm_head", "model.layers.1.*")), num_hidden_layers=11)
    assert findings(examine(tmp_path, settings, tensors)) == {}
    short = small.config(small.modelopt(ignore=("lm_head", "model.layers.1*")), num_hidden_layers=11)
    found = findings(audit(small.write(tmp_path / "short", short, tensors)))
    assert [what.partition(":")[0] for what in found["excluded_but_quantised"]] == [
        "dense MLP (down_proj), layer 10",
        "dense MLP (gate_up_proj), layer 10",
    ]


def test_a_list_of_unfused_names_misses_the_fused_module(tmp_path):
    listed = ("lm_head", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")
    tensors = small.model(dense=small.plain)
    found = findings(examine(tmp_path, small.config(small.modelopt(ignore=listed)), tensors))
    assert list(found) == ["unquantised_but_not_excluded"]
    assert "covers gate_proj, up_proj, but not vLLM's name: model.layers.*.mlp.gate_up_proj" in str(found)
    # The vision-language class tells vLLM what gate_up_proj is made of, so there the same list is right.
    nested = tuple(entry.replace("model.", "model.language_model.") for entry in listed)
    tensors = small.model(dense=small.plain, prefix="model.language_model.") | small.plain("model.visual.x.y")
    folder = small.write(tmp_path / "nested", small.nested(small.modelopt(ignore=nested)), tensors, processor_config={})
    assert findings(audit(folder)) == {}


def test_one_of_two_fused_parts_on_the_list(tmp_path):
    listed = ("lm_head", "model.language_model.layers.0.mlp.gate_proj")
    tensors = small.model(prefix="model.language_model.") | small.plain("model.visual.x.y")
    result = examine(tmp_path, small.nested(small.modelopt(ignore=listed)), tensors, processor_config={})
    found = findings(result)
    assert list(found) == ["fused_siblings"]
    assert "dense MLP (gate_up_proj), layer 0: the exclusion list names 1 of the 2 parts" in found["fused_siblings"][0]


def test_one_of_three_fused_parts_stored_unquantised(tmp_path):
    tensors = small.plain("lm_head")
    for part, kind in zip("qkvo", (small.plain, small.nvfp4, small.nvfp4, small.nvfp4), strict=True):
        tensors |= kind(f"model.layers.0.self_attn.{part}_proj")
    settings = {"architectures": ["MiniMaxM2ForCausalLM"], "num_hidden_layers": 1}
    listed = small.modelopt(ignore=("lm_head", "*.q_proj"))
    found = findings(examine(tmp_path, {**settings, "quantization_config": listed}, tensors))
    assert list(found) == ["fused_siblings"]
    assert "k_proj is nvfp4, q_proj is plain, v_proj is nvfp4" in found["fused_siblings"][0]


def test_attention_that_this_architecture_never_builds_quantised(tmp_path):
    linear = [f"model.layers.0.self_attn.{part}_proj" for part in ("q", "k", "v", "b", "f_a", "g_a")]
    tensors = small.model()
    for name in linear:
        del tensors[f"{name}.weight"]
        tensors |= small.nvfp4(name)
    found = findings(examine(tmp_path, SOUND, tensors))
    assert list(found) == ["stored_quantised_built_plain"]
    assert "linear attention (in_proj_qkvbfg_a), layer 0: stored as NVFP4" in found["stored_quantised_built_plain"][0]


def test_one_of_six_fused_parts_quantised(tmp_path):
    tensors = small.model() | small.nvfp4("model.layers.0.self_attn.f_a_proj")
    found = findings(examine(tmp_path, SOUND, tensors))
    assert list(found) == ["fused_siblings"]
    assert "f_a_proj is nvfp4, g_a_proj is plain" in found["fused_siblings"][0]


def test_an_expert_in_another_format(tmp_path):
    tensors = small.model() | small.plain(f"{EXPERT}.up_proj")
    del tensors[f"{EXPERT}.up_proj.weight_scale"], tensors[f"{EXPERT}.up_proj.weight_scale_2"]
    found = findings(examine(tmp_path, SOUND, tensors))
    assert "routed experts, layer 1: expert 2 stored as plain, the others as nvfp4" in found["fused_siblings"][0]


def test_an_output_head_that_nothing_excludes(tmp_path):
    found = findings(examine(tmp_path, small.config(small.modelopt(ignore=()))))
    assert list(found) == ["unquantised_but_not_excluded"]
    assert "output head (lm_head): stored unquantised, and nothing on the exclusion list covers it" in str(found)


def test_a_format_that_the_configuration_does_not_say(tmp_path):
    def fp8(name):
        return {f"{name}.weight": small.tensor("F8_E4M3", 32, 32), f"{name}.weight_scale": small.scalar(0.1)}

    found = findings(examine(tmp_path, SOUND, small.model(shared=fp8)))
    assert list(found) == ["format_mismatch"]
    assert "stored as FP8, config.json says NVFP4" in found["format_mismatch"][0]


def test_packed_weights_without_any_configuration(tmp_path):
    found = findings(examine(tmp_path, small.config()))
    assert set(found) == {"no_quantisation_config"}


def test_anchored_patterns_miss_the_renamed_modules(tmp_path):
    group = {
        **small.GROUP,
        "targets": ["re:^model\\.language_model\\.layers\\.\\d+\\.mlp\\..*"],
        "input_activations": None,
    }
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": []}

    def matrix(name):
        return small.compressed(name, None)

    tensors = small.model(matrix, matrix, matrix, "model.language_model.") | small.plain("model.visual.x.y")
    result = examine(tmp_path, small.nested(settings), tensors, processor_config={})
    assert set(findings(result)) == {"excluded_but_quantised"}
    assert all("no group targets it" in what for what in findings(result)["excluded_but_quantised"])


def test_a_compressed_tensors_list(tmp_path):
    """Patterns there are regular expressions; a list that names a quantised module, and one that misses a plain one."""
    group = {**small.GROUP, "input_activations": small.ACTIVATIONS}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    tensors = small.model(small.compressed, small.plain, small.compressed)
    listed = {**settings, "ignore": ["re:.*shared_experts.*", "re:.*layers.0.mlp.*"]}
    found = audit(small.write(tmp_path / "listed", small.config(listed), tensors)).findings
    assert {finding.check for finding in found} == {"excluded_but_quantised"}
    assert all("the exclusion list names it" in finding.what for finding in found)
    assert all("take 're:.*layers.0.mlp.*' off the list" in finding.cure for finding in found)
    found = audit(small.write(tmp_path / "missed", small.config({**settings, "ignore": []}), tensors)).findings
    assert {finding.check for finding in found} == {"unquantised_but_not_excluded"}
    cures = " ".join(finding.cure for finding in found)
    assert r"re:model\\.layers\\.\\d+\\.mlp\\.shared_experts\\.down_proj$" in cures


def test_entries_that_fit_nothing(tmp_path):
    result = examine(tmp_path, small.config(small.modelopt(ignore=("lm_head", "model.layers.7.*", "re:mtp.*"))))
    assert list(findings(result)) == ["idle_exclusions"]
    assert "2 entries" in findings(result)["idle_exclusions"][0]
    assert not result.failed


# --- draft layer, vision, extent --------------------------------------------------------------------------------------


def draft(kind: small.Matrix) -> small.Tensors:
    layer = small.decoder_layer("model.language_model.layers.3.", 3, kind, kind, kind)
    return small.model(prefix="model.language_model.") | layer | small.plain("model.visual.x.y")


def test_a_draft_layer_stored_unquantised_is_excluded_under_its_own_name(tmp_path):
    def of(name, entry):
        settings = small.nested(small.modelopt(ignore=("lm_head", entry)), num_nextn_predict_layers=1)
        return findings(audit(small.write(tmp_path / name, settings, draft(small.plain), processor_config={})))

    assert of("short", "model.layers.3*") == {}
    # vLLM renames the entry for the main model and builds the draft layer under the text model's name.
    missed = of("long", "model.language_model.layers.3*")
    assert set(missed) == {"unquantised_but_not_excluded"}
    assert all(what.startswith("MTP layer") for what in missed["unquantised_but_not_excluded"])
    assert set(of("none", "lm_head*")) == {"unquantised_but_not_excluded"}


def test_a_draft_layer_that_is_announced_and_missing(tmp_path):
    result = examine(tmp_path, small.config(small.modelopt(), num_nextn_predict_layers=1))
    assert list(findings(result)) == ["mtp_missing"]
    assert not result.failed


def test_a_draft_layer_that_is_not_announced(tmp_path):
    layer = small.decoder_layer("model.layers.3.", 3, small.nvfp4, small.nvfp4, small.nvfp4)
    assert list(findings(examine(tmp_path, SOUND, small.model() | layer))) == ["mtp_not_announced"]


def test_vision_without_its_processor(tmp_path):
    tensors = small.model(prefix="model.language_model.") | small.plain("model.visual.x.y")
    result = examine(tmp_path, small.nested(small.modelopt()), tensors)
    assert findings(result) == {"processor_config": ["processor_config.json is missing"]}
    assert result.failed
    result = examine(tmp_path / "other", small.nested(small.modelopt()), tensors, preprocessor_config={})
    assert "preprocessor_config.json stands in its place" in findings(result)["processor_config"][0]
    assert not result.failed


def test_vision_without_tensors(tmp_path):
    tensors = small.model(prefix="model.language_model.")
    result = examine(tmp_path, small.nested(small.modelopt()), tensors, processor_config={})
    assert list(findings(result)) == ["vision_missing"]


def test_missing_layers_and_experts(tmp_path):
    gone = ("model.layers.1.", "model.layers.2.mlp.experts.3.up_proj")
    tensors = {name: tensor for name, tensor in small.model().items() if not name.startswith(gone)}
    found = findings(examine(tmp_path, SOUND, tensors))
    assert found == {
        "missing_layers": ["layer 1 of 3 not in the checkpoint"],
        "missing_experts": ["layer 2: up_proj of expert 3 not in the checkpoint"],
    }


def test_what_an_absent_or_damaged_file_would_hold_is_not_guessed(tmp_path):
    folder = small.write(tmp_path / "model", SOUND, small.model())
    (first, second) = sorted(folder.glob("*.safetensors"))
    whole = second.read_bytes()
    for damaged in (b"", whole[:40], b"\xff" * 64, None):
        second.unlink() if damaged is None else second.write_bytes(damaged)
        result = audit(folder)
        check = "absent_file" if damaged is None else "unreadable_shard"
        assert [finding.check for finding in result.findings] == [check, "not_judged"]
        assert result.failed and 0 < result.bytes < first.stat().st_size and not result.activations
    second.symlink_to(tmp_path / "blobs" / "gone")  # a Hugging Face cache whose blob was removed
    assert [finding.check for finding in audit(folder).findings] == ["unreadable_shard", "not_judged"]


def test_a_file_that_changes_while_it_is_read_is_said_so(tmp_path, monkeypatch):
    def shrunk(tensors):
        raise HeaderError("model-00001-of-00002.safetensors changed while it was read")

    monkeypatch.setattr(audit_scales, "read_bytes", shrunk)
    result = examine(tmp_path)
    assert findings(result) == {"unreadable_scales": ["model-00001-of-00002.safetensors changed while it was read"]}
    assert result.failed


@pytest.mark.parametrize("count", [10**9, -3, "3", None, True])
def test_a_number_that_is_none_fills_no_memory(tmp_path, count):
    settings = {**SOUND, "num_hidden_layers": count, "n_routed_experts": count}
    assert findings(examine(tmp_path, settings)) == {}


def checks_of_the_audit() -> set[str]:
    """The names of all findings, read from the sources."""
    makers = {"error": 0, "warning": 0, "info": 0, "Finding": 0, "_fault": 1}
    names = set()
    for file in Path(audit_scales.__file__).parent.glob("audit*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and (place := makers.get(getattr(node.func, "id", ""))) is not None:
                names |= {a.value for a in node.args[place : place + 1] if isinstance(a, ast.Constant)}
    return names


def test_every_finding_is_tried():
    tests = "\n".join(file.read_text() for file in Path(__file__).parent.glob("test_audit*.py"))
    names = checks_of_the_audit()
    assert len(names) > 35
    assert {name for name in names if f'"{name}"' not in tests} == set()


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: object) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "overlay", "audit", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_command_prints_tables_and_fails_on_errors(tmp_path):
    sound = small.write(tmp_path / "sound", SOUND, small.model())
    done = command(sound)
    assert done.returncode == 0, done.stderr
    assert "nothing found" in done.stdout
    assert "routed experts" in done.stdout
    broken = small.write(tmp_path / "broken", SOUND, small.model(weight_only))
    done = command(broken, "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert {finding["check"] for finding in report["findings"]} == {"activation_scales_missing"}
    assert "nvfp4_moe_scales" in report["findings"][0]["cure"]


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        audit(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        audit(tmp_path / "model.safetensors")
    done = command(tmp_path)
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_configuration_stands_for_its_folder(tmp_path, monkeypatch):
    folder = small.write(tmp_path / "a model", SOUND, small.model())
    assert audit(folder / "config.json") == audit(folder)
    monkeypatch.chdir(folder)
    assert audit("config.json").totals == audit(folder).totals


def test_numbers_and_counts():
    assert numbers([3, 4, 5, 9]) == "3-5, 9"
    assert numbers(range(0, 40, 2), shown=3) == "0, 2, 4 and 17 more"
    assert counted("layer", {1}) == "layer 1"
    assert counted("layer", {1, 2}) == "layers 1-2"
