"""Exclusion lists, fused and renamed module names, formats and files: each fault its own finding and no other."""

import ast
from pathlib import Path

import pytest

from overlay.checkpoint import audit_scales
from overlay.checkpoint.audit import audit
from overlay.checkpoint.audit_headers import HeaderError
from tests.checkpoint import small
from tests.checkpoint.auditing import EXPERT, SOUND, examine, findings


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
