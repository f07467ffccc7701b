"""The audit of whole folders: a sound checkpoint gives nothing, each fault its own finding and no other."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from overlay.checkpoint.audit import audit
from overlay.checkpoint.findings import counted, numbers
from overlay.checkpoint.tiny_config import CheckpointError
from tests.checkpoint import small
from tests.checkpoint.auditing import EXPERT, SOUND, examine, findings, served, weight_only

ROOT = Path(__file__).resolve().parents[2]
FORMS = json.loads((ROOT / "tests" / "data" / "nvfp4" / "config_forms.json").read_text())
INPUT_SCALES = json.loads((ROOT / "tests" / "data" / "nvfp4" / "input_scales.json").read_text())


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


def without_up_scales(scale: str) -> small.Tensors:
    return {
        name: tensor
        for name, tensor in small.model().items()
        if not re.search(rf"(experts\.\d+|shared_experts)\.up_proj\.{scale}$", name)
    }


def test_a_global_weight_scale_under_one_name_alone(tmp_path):
    """vLLM fills every slot of a parameter from a fused scale: one filled slot means that the others are missing."""
    result = examine(tmp_path, SOUND, without_up_scales("weight_scale_2"))
    assert {(finding.severity, finding.check, finding.what) for finding in result.findings} == {
        (
            "warning",
            "weight_scale_of_gate_alone",
            "routed experts, layers 1-2: no expert has a global weight scale for up_proj",
        ),
        ("error", "weight_scale_unusable", "shared experts, layers 1-2: global weight scale missing for up_proj"),
    }
    (cure,) = (finding.cure for finding in result.findings if finding.severity == "error" and finding.stands)
    assert "vLLM refuses the layer by name" in cure


def test_experts_of_which_some_lack_ups_scale_are_refused(tmp_path):
    """One expert's is a loss; and so is gate's, whoever has up's: vLLM reads gate's."""
    one = {name: tensor for name, tensor in small.model().items() if not name.endswith("1.up_proj.weight_scale_2")}
    (finding,) = (f for f in examine(tmp_path / "one", SOUND, one).findings if "routed" in f.what)
    assert (finding.severity, finding.check) == ("error", "weight_scale_unusable")
    gates = {name: t for name, t in small.model().items() if not re.search(r"\d\.gate_proj\.weight_scale_2$", name)}
    (finding,) = (f for f in examine(tmp_path / "gates", SOUND, gates).findings if "routed" in f.what)
    assert (finding.severity, finding.check) == ("error", "weight_scale_unusable")


def test_an_activation_scale_under_one_name_alone(tmp_path):
    """Both parts read the same input: the other's value serves, and its absence is told."""
    result = examine(tmp_path, SOUND, without_up_scales("input_scale"))
    assert {finding.check for finding in result.findings} == {"activation_scales_incomplete"}
    assert {(finding.severity, finding.what) for finding in result.findings} == {
        ("error", "routed experts, layers 1-2: activation scale missing for up_proj of experts 0-3"),
        ("error", "shared experts, layers 1-2: activation scale missing for up_proj"),
    }
    (linear,) = [finding for finding in result.findings if finding.what.startswith("shared")]
    assert "expert" not in linear.consequence + linear.cure
    repaired = "W4A4 (2), W4A4 repaired (2)"  # gate_up_proj, not down_proj
    assert served(result) == {"routed experts": "W4A4 repaired", "shared experts": repaired, "dense MLP": "W4A4"}


@pytest.mark.parametrize("stacked", [True, False])
def test_one_scale_of_a_projection_that_is_stored_fused(tmp_path, stacked):
    """gate_up_proj is one projection of the checkpoint, and one scale is all that belongs to it."""
    tensors = small.plain("lm_head")
    for part in ("gate_up_proj", "down_proj"):
        if stacked:
            name = f"model.layers.0.mlp.experts.{part}"
            tensors |= {
                f"{name}.weight": small.tensor("U8", small.EXPERTS, 32, 16),
                f"{name}.weight_scale": small.tensor("F8_E4M3", small.EXPERTS, 32, 2),
                f"{name}.weight_scale_2": small.scalar(0.02, small.EXPERTS),
                f"{name}.input_scale": small.scalar(small.SCALE, small.EXPERTS),
            }
        else:
            tensors |= small.nvfp4(f"model.layers.0.mlp.{part}")
    settings = {**small.config(small.modelopt()), "num_hidden_layers": 1}
    result = examine(tmp_path, settings, tensors)
    assert findings(result) == {}
    assert list(served(result).values()) == ["W4A4"]


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
