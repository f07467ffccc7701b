"""What the audit says of vLLM, against the installed one: names, labels, processor files; and this family's fusions."""

import json
from pathlib import Path

import pytest

from overlay.checkpoint import audit_modules as kinds
from overlay.checkpoint import audit_names
from overlay.checkpoint.audit_config import ALGORITHMS, QuantConfig
from overlay.checkpoint.audit_modules import Module, modules, shape
from overlay.checkpoint.audit_names import Conflict, Family, Runtime
from tests.checkpoint import audit_in_vllm, small
from tests.conftest import run_python

FORMS = Path(__file__).resolve().parents[1] / "data" / "nvfp4" / "config_forms.json"


@pytest.fixture(scope="module")
def vllm(fake_driver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processors")
    return run_python("tests.checkpoint.audit_in_vllm", fake_driver((12, 1)), str(FORMS), str(folder), timeout=600)


def family(form: str):
    return audit_names.family(small.nested() if form == "nested" else small.config())


def answer(ask) -> str:
    try:
        return str(ask())
    except Conflict:
        return "conflict"


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_modelopt_exclusions_are_vllms(vllm, form):
    model, ours = family(form), {}
    for number, listed in enumerate(audit_in_vllm.LISTS):
        entries = audit_names.exclusions(QuantConfig("config.json", small.modelopt(ignore=listed), False), model)
        for name in audit_in_vllm.NAMES:
            asked = answer(lambda n=name, e=entries: audit_names.excluded_by(n, e, model.packed) is not None)
            ours[f"{number} {name}"] = asked
    assert ours == vllm[f"modelopt {form}"]
    assert set(ours.values()) >= {"True", "False"}
    assert ("conflict" in ours.values()) is (form == "nested")


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_compressed_tensors_exclusions_are_vllms(vllm, form):
    model = family(form)
    ours = {
        f"{number} {name}": answer(lambda n=name, e=listed: audit_names.ignored(n, e, model.packed))
        for number, listed in enumerate(audit_in_vllm.PATTERNS)
        for name in audit_in_vllm.NAMES
    }
    assert ours == vllm[f"compressed {form}"]


def test_mixed_precision_is_resolved_as_in_vllm(vllm):
    layers = {name: {"quant_algo": algorithm} for name, algorithm in audit_in_vllm.MAP.items()}
    document = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = QuantConfig("config.json", document, False)
    theirs = {
        name: algorithm if algorithm == "conflict" else str(ALGORITHMS.get(algorithm))
        for name, algorithm in vllm["mixed"].items()
    }
    ours = {
        name: answer(lambda n=name: audit_names.built(config, module(n), family("nested"), ()))
        for name in audit_in_vllm.MAPPED
    }
    assert ours == theirs


def module(name: str) -> Runtime:
    kind = {"experts": kinds.ROUTED, "lm_head": kinds.HEAD}.get(name.rpartition(".")[2], kinds.DENSE)
    return Runtime(name, kind, False, (Module(name, kind, False, 0, None, {}),))


def linear_or_experts(name: str) -> Runtime:
    """A module of any kind but the head, which none of these rules is about."""
    found = module(name)
    return found if found.kind == kinds.ROUTED else Runtime(name, kinds.DENSE, False, found.members)


def test_quark_is_read_as_in_vllm(vllm):
    def built(name, **settings):
        everywhere = {"weight": {"dtype": "int4"}}
        config = QuantConfig("a", {"quant_method": "quark", "global_quant_config": everywhere, **settings}, False)
        model = Family(True, False, family("nested").packed, frozenset())
        return audit_names.built(config, linear_or_experts(name), model, settings.get("exclude", ()))

    lists = enumerate(audit_in_vllm.QUARK_LISTS)
    names = audit_in_vllm.NAMES
    ours = {f"{i} {n}": answer(lambda n=n, e=e: built(n, exclude=e) is None) for i, e in lists for n in names}
    assert ours == vllm["quark"]["excluded"]
    assert set(ours.values()) == {"True", "False"}
    ours = {}
    for number, patterns in enumerate(audit_in_vllm.QUARK_BY_LAYER):
        by_layer = {pattern: {"weight": {"dtype": dtype}} for pattern, dtype in patterns.items()}
        for name in names:
            asked = answer(lambda n=name, b=by_layer: built(n, layer_quant_config=b).weights)
            ours[f"{number} {name}"] = asked.replace("fp8", "fp8_e4m3")
    assert ours == vllm["quark"]["formats"]
    assert set(ours.values()) == {"int4", "int8", "fp8_e4m3", "conflict"}


def test_compressed_tensors_targets_are_vllms(vllm):
    ours = {}
    model = Family(True, False, family("nested").packed, frozenset())
    for number, lists in enumerate(audit_in_vllm.TARGETS):
        groups = {
            str(i): {"targets": targets, "weights": {"num_bits": i, "type": "int"}} for i, targets in enumerate(lists)
        }
        config = QuantConfig("a", {"quant_method": "compressed-tensors", "config_groups": groups}, False)
        for name in audit_in_vllm.NAMES:
            linear = Runtime(name, kinds.DENSE, False, module(name).members)
            scheme = audit_names.built(config, linear, model, ())
            ours[f"{number} {name}"] = scheme.weights.removeprefix("int") if scheme else "None"
    assert ours == vllm["targets"]
    assert set(ours.values()) == {"0", "1", "None"}


def test_a_part_fills_its_own_slot_and_a_fused_scale_all(vllm):
    """So a lone filled slot of a linear layer means that the other parts' scales are missing."""
    slots = vllm["slots"]
    assert len(slots) == 8
    for key, filled in slots.items():
        assert len(filled) == (3 if key.startswith("QKV") else 2)
        assert filled == ([True] * len(filled) if key.endswith("whole") else [True] + [False] * (len(filled) - 1)), key


def test_promotion_to_w4a16_is_vllms(vllm):
    forms = json.loads(FORMS.read_text())
    ours = {}
    for form in forms:
        config = QuantConfig("config.json", form["quantization"], "quantization" in form["quantization"])
        ours[form["id"]] = "W4A16_NVFP4" if config.promoted else "NVFP4"
    assert ours == vllm["labels"]
    assert set(ours.values()) == {"NVFP4", "W4A16_NVFP4"}


def test_processor_files(vllm):
    """The error and the warning of the audit, as they are."""
    found = vllm["processors"]
    assert found["processor_config"] == [777, 888]
    assert "image processor" in found["none"]
    assert found["preprocessor_config"] == [777, 777]  # shared
    assert 777 not in found["preprocessor_config, nested"]  # defaults


def runtime(tensors: small.Tensors, settings: dict) -> dict[str, Runtime]:
    headers = [_tensor(name, *described) for name, described in tensors.items()]
    found = audit_names.runtime_modules(modules(headers, shape(settings)), audit_names.family(settings))
    return {module.name: module for module in found}


def _tensor(name, dtype, extent, data):
    from overlay.checkpoint.audit_headers import Tensor

    return Tensor(name, dtype, tuple(extent), Path("a.safetensors"), 0, len(data))


def test_fusions_of_the_flat_model():
    found = runtime(small.model(), small.config())
    parts = {name: [m.name.rpartition(".")[2] for m in module.members] for name, module in found.items()}
    linear = ["b_proj", "f_a_proj", "g_a_proj", "k_proj", "q_proj", "v_proj"]
    assert parts["model.layers.0.self_attn.in_proj_qkvbfg_a"] == linear
    assert parts["model.layers.2.self_attn.fused_qkv_a_proj"] == ["kv_a_proj_with_mqa", "q_a_proj"]
    assert parts["model.layers.0.mlp.gate_up_proj"] == ["gate_proj", "up_proj"]
    assert len(found["model.layers.1.mlp.experts"].members) == 3 * small.EXPERTS
    assert found["model.layers.0.self_attn.in_proj_qkvbfg_a"].kind == kinds.LINEAR_ATTENTION
    assert found["model.layers.2.self_attn.o_proj"].kind == kinds.ATTENTION


def test_names_of_the_nested_model():
    found = runtime(small.model(prefix="model.language_model."), small.nested())
    assert "language_model.model.layers.0.mlp.gate_up_proj" in found
    assert "language_model.lm_head" in found


def test_the_draft_layer_keeps_the_text_models_names():
    layer = small.decoder_layer(
        f"model.language_model.layers.{small.LAYERS}.", 3, small.plain, small.plain, small.plain
    )
    found = runtime(layer, small.nested(num_nextn_predict_layers=1))
    assert "model.layers.3.mlp.experts" in found
    assert all(module.mtp for module in found.values())


def test_grouped_query_attention_is_fused_as_qkv():
    parts = [small.plain(f"model.layers.0.self_attn.{part}_proj") for part in "qkvo"]
    tensors = {name: tensor for part in parts for name, tensor in part.items()}
    settings = {"architectures": ["MiniMaxM2ForCausalLM"], "num_hidden_layers": 1}
    assert set(runtime(tensors, settings)) == {"model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"}
