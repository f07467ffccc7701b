"""Families beside glm5_next: checkpoints in the shape of public ones give no error where the original is sound."""

import pytest

from overlay.checkpoint.audit import audit
from tests.checkpoint import public, small
from tests.checkpoint.auditing import findings, served
from tests.checkpoint.public import EXPERTS, GATED, MODELS, QKVO, each, ends, experts, fp8_blocks, mxfp8
from tests.checkpoint.small import nvfp4, plain, tensor

# The faults of the originals. All others have none.
FAULTS = {
    "mix-nested-step35-flash-w8a8sq": {"unknown_algorithm", "excluded_but_quantised"},
    "mo-stub-nemotron3-super": {"quant_method", "side_file_fields"},
    "mo-nested-minimax-m21-gadflyii": {"quant_method", "side_file_fields"},
}


def examine(tmp_path, model: public.Model):
    settings, tensors, files = model
    return audit(small.write(tmp_path / "model", settings, tensors, **files))


def errors(result) -> set[str]:
    return {finding.check for finding in result.findings if finding.severity == "error"}


def test_every_public_configuration_has_a_checkpoint():
    assert {file.stem for file in public.CONFIGS.glob("*.json")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_like_the_public_one(tmp_path, name):
    result = examine(tmp_path, MODELS[name]())
    assert errors(result) == FAULTS.get(name, set()), result.findings
    allowed = {"idle_exclusions", "groups_against_layers", "activation_scales_unused", "label_nvfp4_is_weight_only"}
    assert set(findings(result)) <= allowed | FAULTS.get(name, set()), result.findings


SOUND = {
    "nemotron": public.nemotron_whole,
    "step35": lambda: public.step35(nvfp4, "NVFP4"),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_checkpoint_of_a_family_with_names_of_its_own(tmp_path, name):
    result = examine(tmp_path, SOUND[name]())
    assert findings(result) == {}
    assert set(served(result).values()) == {"W4A4"}


def test_the_names_of_these_families(tmp_path):
    kinds = {row.kind: dict(row.formats) for row in examine(tmp_path, public.nemotron_whole()).totals}
    assert set(kinds["Mamba mixer"]) == {"nvfp4", "BF16"}
    assert set(kinds["attention"]) == set(kinds["embeddings"]) == set(kinds["router"]) == {"BF16"}
    assert set(kinds["dense MLP"]) == set(kinds["shared experts"]) == set(kinds["routed experts"]) == {"nvfp4"}
    kinds = {row.kind: dict(row.formats) for row in examine(tmp_path, public.step35(nvfp4, "NVFP4")).totals}
    assert set(kinds["shared experts"]) == set(kinds["routed experts"]) == {"nvfp4"}


@pytest.mark.parametrize(
    "tensors",
    [
        plain("lm_head"),
        plain("model.layers.0.mixer.in_proj"),
        plain("model.layers.0.self_attn.indexer.wq_b"),
        plain("model.layers.0.some_adapter"),
    ],
    ids=str,
)
def test_what_only_some_families_quantise_is_no_error_when_it_is_not_listed(tmp_path, tensors):
    settings = {"architectures": ["OtherForCausalLM"], "num_hidden_layers": 1}
    tensors = tensors | each(nvfp4, "model.layers.0.mlp.", GATED)
    result = examine(tmp_path, ({**settings, "quantization_config": small.modelopt(ignore=())}, tensors, {}))
    (finding,) = result.findings
    assert (finding.check, finding.severity) == ("unquantised_but_not_excluded", "warning")
    assert finding.consequence.startswith("this architecture may do otherwise")


def test_a_quantised_embedding_of_another_family_is_no_error(tmp_path):
    """vLLM's compressed-tensors has a method for it; glm5_next builds none."""
    for architecture, severity in (("OtherForCausalLM", "warning"), ("Glm5NextForCausalLM", "error")):
        settings = {"architectures": [architecture], "quantization_config": small.modelopt()}
        result = examine(tmp_path, (settings, plain("lm_head") | nvfp4("model.embed_tokens"), {}))
        (finding,) = result.findings
        assert (finding.check, finding.severity) == ("stored_quantised_built_plain", severity)


def test_bare_parameters_are_no_linear_layers(tmp_path):
    """DeepSeek's hyper-connections and the like: two dimensions, and no name that an exclusion list could have."""
    settings = {"architectures": ["OtherForCausalLM"], "num_hidden_layers": 1}
    tensors = plain("lm_head") | each(nvfp4, "model.layers.0.mlp.", GATED)
    tensors["model.layers.0.hc_attn_fn"] = tensor("F32", 4, 32)
    result = examine(tmp_path, ({**settings, "quantization_config": small.modelopt()}, tensors, {}))
    assert findings(result) == {}


def test_an_fp8_key_projection_of_the_indexer(tmp_path):
    """DeepSeek-V3.2 stores `wk` in FP8 beside a 16-bit `weights_proj`; vLLM converts it for their fused module."""
    settings = {"architectures": ["DeepseekV32ForCausalLM"], "num_hidden_layers": 1}
    indexer = "model.layers.0.self_attn.indexer."
    tensors = ends() | each(nvfp4, "model.layers.0.mlp.", GATED) | plain(f"{indexer}weights_proj")
    tensors |= fp8_blocks(f"{indexer}wk")
    result = examine(tmp_path, ({**settings, "quantization_config": small.modelopt()}, tensors, {}))
    assert findings(result) == {}


def test_mxfp8_is_told_from_fp8_by_its_scales(tmp_path):
    def of(kind):
        quantization = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}
        return findings(examine(tmp_path, public.dense(kind, quantization, "LlamaForCausalLM")))

    assert of(mxfp8) == {}
    assert set(of(public.fp8)) == {"format_mismatch"}


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "gptq", "awq"])
def test_other_methods_are_not_judged_by_the_rules_of_these(tmp_path, method):
    tensors = ends() | each(fp8_blocks, "model.layers.0.self_attn.", QKVO)
    tensors |= plain("model.layers.0.mlp.gate", EXPERTS) | experts(fp8_blocks, "model.layers.0.mlp.")
    tensors["model.layers.0.mlp.experts.gate_up_proj_scales"] = tensor("U8", EXPERTS, 32, 2)
    settings = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 1}
    result = examine(tmp_path, ({**settings, "quantization_config": {"quant_method": method}}, tensors, {}))
    assert list(findings(result)) == ["method_not_judged"]
    assert not result.failed


def test_layers_under_another_name_are_not_missing(tmp_path):
    settings = {"architectures": ["FalconForCausalLM"], "num_hidden_layers": 2}
    tensors = plain("lm_head") | {f"transformer.h.{n}.ln.weight": tensor("BF16", 32) for n in range(2)}
    assert findings(examine(tmp_path, (settings, tensors, {}))) == {}


def test_tensors_below_mtp_need_no_announcement(tmp_path):
    """vLLM's Qwen and Nemotron models leave them out, whatever config.json counts."""
    settings, tensors = public.nemotron()
    quantization = public.nemotron_whole()[0]["quantization_config"]
    quantization["ignore"].append("mtp*")
    tensors |= each(plain, "mtp.layers.0.mixer.", QKVO)
    assert findings(examine(tmp_path, ({**settings, "quantization_config": quantization}, tensors, {}))) == {}


def nvfp4_linears(*groups):
    """A compressed-tensors configuration of these (targets, bits) in this order."""
    found = {}
    for number, (targets, bits) in enumerate(groups):
        activations = {"num_bits": bits, "type": "float", **({"group_size": 16} if bits == 4 else {})}
        found[f"group_{number}"] = {"weights": activations, "input_activations": activations, "targets": targets}
    return {"quant_method": "compressed-tensors", "config_groups": found, "ignore": ["lm_head"]}


@pytest.mark.parametrize("names_first", [True, False])
def test_compressed_tensors_targets_by_name_go_before_the_class(tmp_path, names_first):
    groups = (["re:.*self_attn.*"], 8), (["Linear"], 4)
    settings, tensors, files = public.dense(public.compressed, nvfp4_linears(*groups[:: 1 if names_first else -1]), "X")
    tensors = {name: stored for name, stored in tensors.items() if "self_attn" not in name}
    tensors |= each(public.fp8_channels, "model.layers.0.self_attn.", QKVO)
    assert findings(examine(tmp_path, (settings, tensors, files))) == {}


QUARK = public.load("quark-nvfp4-fixture")["quantization_config"]
QUARK_FP8 = {"weight": {"dtype": "fp8_e4m3"}, "input_tensors": {"dtype": "fp8_e4m3"}}


@pytest.mark.parametrize(
    ("pattern", "entry", "kind"),
    [
        ("*self_attn*", QUARK_FP8, public.fp8),
        ("*self_attn*", {"weight": None}, plain),
        ("*self_attn.q_proj", QUARK_FP8, None),
    ],
)
def test_quark_by_layer(tmp_path, pattern, entry, kind):
    settings, tensors, files = public.dense(public.quark, {**QUARK, "layer_quant_config": {pattern: entry}}, "X")
    tensors |= each(kind, "model.layers.0.self_attn.", QKVO) if kind else {}
    tensors = {n: t for n, t in tensors.items() if kind is None or "self_attn" not in n or n.split(".")[-1] in KEPT}
    found = findings(examine(tmp_path, (settings, tensors, files)))
    assert list(found) == ([] if kind else ["fused_siblings"])


KEPT = ("weight", "weight_scale", "input_scale")


def test_quark_excludes_all_experts_by_one_of_them(tmp_path):
    """As vLLM: they are one module, all or nothing."""
    listed = ["model.layers.0.mlp.gate", "model.layers.0.mlp.experts.1.up_proj"]
    settings = {"architectures": ["X"], "num_hidden_layers": 1, "quantization_config": {**QUARK, "exclude": listed}}
    tensors = plain("lm_head") | plain("model.layers.0.mlp.gate", EXPERTS)
    assert findings(examine(tmp_path, (settings, tensors | experts(plain, "model.layers.0.mlp."), {}))) == {}
    found = findings(examine(tmp_path, (settings, tensors | experts(public.quark, "model.layers.0.mlp."), {})))
    assert list(found) == ["excluded_but_quantised"]


def test_formats_that_bytes_do_not_tell(tmp_path):
    """Quark's MXFP4; ModelOpt's IQ2, whose bytes are like any; eight-bit integers packed as four-bit ones are."""

    def of(kind, quantization):
        return findings(examine(tmp_path, public.dense(kind, quantization, "LlamaForCausalLM")))

    def mxfp4(name):
        return {f"{name}.weight": tensor("U8", 32, 16), f"{name}.weight_scale": tensor("U8", 32, 1)}

    stage = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
    assert of(mxfp4, {**QUARK, "global_quant_config": {"weight": stage, "input_tensors": stage}}) == {}
    assert set(of(mxfp4, QUARK)) == {"format_mismatch"}
    layers = {f"model.layers.0.{part}": {"quant_algo": "IQ2_XS"} for part in public.LINEARS}
    modelopt = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert of(lambda name: {f"{name}.weight": tensor("U8", 32, 8)}, modelopt) == {}
    weights = {"num_bits": 8, "type": "int", "group_size": 32}
    group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    packed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    assert of(public.int4, packed) == {}
