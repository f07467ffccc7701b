"""Every case, from a checkpoint's files to kernels ready to run, by the installed vLLM: stock, and with the overlay."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from overlay.checkpoint import tiny, tiny_quant
from overlay.checkpoint.tiny_config import TinyModel
from tests.conftest import run_python
from tests.nvfp4.checks import TINY
from tests.nvfp4.scenarios import FORMS, POISON, SCALES

FORMATS = ("modelopt", "compressed-tensors", "quark")
ALPHA, GLOBAL_SCALE = 0.02 * 0.01, 100.0


@pytest.fixture(scope="module")
def tiny_checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for case, fault in TINY:
        tiny.write_quantised(TinyModel(heads=8), *tiny_quant.choose("modelopt", case, fault), folder / case)
    return folder


@pytest.fixture(scope="module")
def stock(fake_driver, tiny_checkpoints) -> dict[str, Any]:
    return run(fake_driver((12, 1), devices=2), tiny_checkpoints)


@pytest.fixture(scope="module")
def wrapped(fake_driver, tiny_checkpoints) -> dict[str, Any]:
    return run(fake_driver((12, 1), overlay=True, devices=2), tiny_checkpoints)


def run(env: dict[str, str], tiny_checkpoints: Path) -> dict[str, Any]:
    return run_python("tests.nvfp4.runner", env | {"TINY_CHECKPOINTS": str(tiny_checkpoints)}, timeout=900)


def experts(outcome: dict) -> list[dict]:
    """The outcome's layers of experts; fails with the error of a load that was refused."""
    assert "experts" in outcome, outcome.get("error")
    return list(outcome["experts"].values())


def linears(outcome: dict, part: str = "self_attn") -> list[dict]:
    return [layer for name, layer in outcome["linears"].items() if part in name]


def is_right(layer: dict, alpha: float = ALPHA, global_scale: float = GLOBAL_SCALE) -> bool:
    """Does a layer of experts quantise with the given numbers throughout?"""
    alphas, scales = layer["g1_alphas"] + layer["g2_alphas"], layer["a1_gscale"] + layer["a2_gscale"]
    return alphas == pytest.approx([alpha] * len(alphas)) and scales == pytest.approx([global_scale] * len(scales))


def is_sane(layer: dict) -> bool:
    """Can a layer of experts compute at all: every number it multiplies by is one?"""
    numbers = [n for key in ("g1_alphas", "g2_alphas", "a1_gscale", "a2_gscale") for n in layer[key] or ()]
    return all(math.isfinite(n) and 1e-20 < n < 1e20 for n in numbers)


def is_weight_only(layer: dict) -> bool:
    """Is a layer of experts set up as vLLM sets up W4A16: Marlin, no activation scales, the weights' own alphas?"""
    alphas = layer["g1_alphas"] + layer["g2_alphas"]
    return (
        (layer["backend"], layer["experts"], layer["w4a16"]) == ("MARLIN", "MarlinExperts", True)
        and layer["a1_gscale"] is None
        and layer["a2_gscale"] is None
        and alphas == pytest.approx([0.02] * len(alphas))
    )


def is_weight_only_linear(layer: dict) -> bool:
    return layer["kernel"] == "MarlinNvFp4LinearKernel" and not layer["quantises"] and not layer["leftovers"]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("case", FORMS, ids=lambda case: case["id"])
def test_configuration_forms(stock, wrapped, case, poison):
    name = f"{case['id']}/{poison}"
    shipped = case["input_scales"]
    if shipped == "all":
        assert all(is_right(layer) for layer in experts(wrapped[name]))
        assert wrapped[name]["digests"] == stock[name]["digests"]
        assert wrapped[name]["log"] == []
    elif shipped == "all but expert 2":
        assert all(is_right(layer) for layer in experts(wrapped[name]))
        assert any("experts 2; repaired" in line for line in wrapped[name]["log"])
        if poison == "zero":  # FlashInfer's maximum over the experts hides a zero
            assert wrapped[name]["digests"] == stock[name]["digests"]
        else:
            assert not any(is_sane(layer) for layer in experts(stock[name]))
    else:
        assert all(is_weight_only(layer) for layer in experts(wrapped[name]))
        if case["id"] == "flat_null":  # the one form that this vLLM recognises itself
            assert wrapped[name]["digests"] == stock[name]["digests"]
        else:
            assert not any(is_sane(layer) for layer in experts(stock[name]))
    if shipped == "none" or shipped.endswith("0.0"):
        assert all(is_weight_only_linear(layer) for layer in linears(wrapped[name]))
    else:
        assert all(layer["alpha"] == pytest.approx([ALPHA]) for layer in linears(wrapped[name]))


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "cutlass"])
@pytest.mark.parametrize("case", SCALES, ids=lambda case: case["id"])
def test_input_scales(stock, wrapped, case, backend):
    before, after = stock[f"{case['id']}/{backend}"], wrapped[f"{case['id']}/{backend}"]
    if len(case["bad"]) == 4:
        assert not any(is_sane(layer) for layer in experts(before))
        assert f"--moe-backend {backend}" in after["error"]
        assert all(is_weight_only(layer) for layer in experts(wrapped[f"{case['id']}/auto"]))
        return
    assert all(is_right(layer) for layer in experts(after))
    if not case["bad"]:
        assert after["digests"] == before["digests"]
        assert after["log"] == []
        return
    (line,) = after["log"]
    assert "w13_input_scale and w2_input_scale, experts 2; repaired by the maximum" in line
    hidden_by_the_maximum = backend == "flashinfer_cutlass" and case["id"] in ("one_zero", "one_denormal")
    assert all(is_right(layer) for layer in experts(before)) == hidden_by_the_maximum
    if backend == "cutlass":  # per expert: the others keep their own
        assert all(layer["g1_alphas"][:2] == pytest.approx([ALPHA] * 2) for layer in experts(before))


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("form", FORMATS)
class TestFormats:
    """The same three checkpoints in each format."""

    def test_complete(self, stock, wrapped, form, poison):
        before, after = stock[f"{form}/complete/{poison}"], wrapped[f"{form}/complete/{poison}"]
        assert all(is_right(layer) for layer in experts(after))
        if form == "quark":  # vLLM leaves the input scale out of the alphas of Quark's experts
            assert all(is_right(layer, alpha=0.02) for layer in experts(before))
            assert [line for line in after["log"] if "leaves out of the alphas" in line]
            assert linears(after) == linears(before)
        else:
            assert after["digests"] == before["digests"]
            assert after["log"] == []

    def test_without_input_scales(self, stock, wrapped, form, poison):
        before, after = stock[f"{form}/none/{poison}"], wrapped[f"{form}/none/{poison}"]
        assert all(is_weight_only(layer) for layer in experts(after))
        assert all(is_weight_only_linear(layer) for layer in linears(after))
        # what compressed-tensors makes of 1e30, a reciprocal, is small but a number: that is what silent garbage is
        silent = form == "compressed-tensors" and poison == "huge"
        assert not any(is_right(layer) for layer in experts(before))
        assert silent or not any(is_sane(layer) for layer in experts(before))
        (line,) = [line for line in after["log"] if "experts model" in line]
        assert "model.layers.*.mlp.experts, layers 0-1" in line
        assert "routed to W4A16 (MARLIN instead of FLASHINFER_CUTLASS)" in line

    def test_dead_expert(self, stock, wrapped, form, poison):
        after = wrapped[f"{form}/dead/{poison}"]
        assert all(is_right(layer) for layer in experts(after))
        assert [
            line for line in after["log"] if "experts 2; repaired by the maximum of the layer's valid scales" in line
        ]


@pytest.mark.parametrize("form", FORMATS)
class TestScales:
    """Single scales that are missing, wrong or at odds, in each format."""

    def test_repair_takes_the_largest_factor(self, wrapped, form):
        """Of 0.01, 0.03, NaN and 1e30: 0.03, which as a reciprocal is the smallest."""
        outcome = wrapped[f"{form}/garbage"]
        assert all(is_right(layer, alpha=0.02 * 0.03, global_scale=1 / 0.03) for layer in experts(outcome))
        assert [line for line in outcome["log"] if "experts 2-3; repaired" in line]

    @pytest.mark.parametrize(
        ("what", "said"),
        [
            ("expert global", "experts model.layers.0.mlp.experts: no usable value in w2_"),
            ("linear global", "linear model.layers.1.self_attn.o_proj: no usable value in weight_"),
            ("expert blocks", "values that were never loaded in w13_weight_scale, experts 3."),
        ],
    )
    def test_missing_weight_scale_is_refused(self, stock, wrapped, form, what, said):
        assert said in wrapped[f"{form}/{what}"]["error"]
        assert "error" not in stock[f"{form}/{what}"]

    def test_missing_block_scales_of_a_linear_layer_are_refused(self, stock, wrapped, form):
        said = "linear model.layers.0.self_attn.qkv_proj: values that were never loaded in weight_scale."
        assert said in wrapped[f"{form}/linear blocks"]["error"]
        # vLLM itself looks for these in ModelOpt's linear layers, since 0.30
        assert ("error" in stock[f"{form}/linear blocks"]) == (form == "modelopt")

    def test_gate_and_up_are_reconciled(self, stock, wrapped, form):
        """up's scale of expert 1 is four times gate's; vLLM computes both with gate's."""
        outcome = wrapped[f"{form}/mismatch"]
        for layer in experts(outcome):
            assert layer["g1_alphas"] == pytest.approx([ALPHA, 4 * ALPHA, ALPHA, ALPHA])
        assert [
            line for line in outcome["log"] if "gate and up differ by more than 1.1" in line and "experts 1;" in line
        ]
        before = 0.02 if form == "quark" else ALPHA
        assert all(layer["g1_alphas"] == pytest.approx([before] * 4) for layer in experts(stock[f"{form}/mismatch"]))

    def test_a_slight_mismatch_is_left_alone(self, stock, wrapped, form):
        before, after = (outcomes[f"{form}/slight mismatch"]["digests"] for outcomes in (stock, wrapped))
        alphas = (
            {"w13_weight_scale_2", "w2_weight_scale_2"} if form == "quark" else set()
        )  # Quark's get their input scale
        assert {name.rpartition(".")[2] for name in before if before[name] != after[name]} == alphas

    def test_shards_of_a_linear_layer_are_reconciled(self, stock, wrapped, form):
        for layer in linears(wrapped[f"{form}/linear mismatch"], "qkv_proj"):
            assert layer["weight_global_scale"] == pytest.approx([0.08])
        assert [line for line in wrapped[f"{form}/linear mismatch"]["log"] if "shards differ by more than 1.1" in line]

    def test_one_shard_without_input_scale(self, stock, wrapped, form):
        good = "model.layers.0.self_attn.qkv_proj"
        assert wrapped[f"{form}/one shard"]["linears"][good]["alpha"] == pytest.approx([ALPHA])
        assert stock[f"{form}/one shard"]["linears"][good]["alpha"] != pytest.approx([ALPHA])
        assert [line for line in wrapped[f"{form}/one shard"]["log"] if "shards 2; repaired" in line]

    def test_one_value_for_gate_and_up(self, wrapped, form):
        outcome = wrapped[f"{form}/gate alone"]
        assert all(is_right(layer) for layer in experts(outcome))
        assert not [line for line in outcome["log"] if "no usable value" in line]

    def test_policies(self, wrapped, form):
        assert 'all_missing = "route"' in wrapped[f"{form}/refuse"]["error"]
        assert 'some_bad = "repair"' in wrapped[f"{form}/no repair"]["error"]
        assert "experts 2" in wrapped[f"{form}/no repair"]["error"]
        number = wrapped[f"{form}/number"]
        assert all(is_right(layer, alpha=0.02 * 0.002, global_scale=500) for layer in experts(number))
        assert [line for line in number["log"] if "set to 0.002 as all_missing says" in line]

    def test_dummy_weights_are_nobodys(self, stock, wrapped, form):
        after = wrapped[f"{form}/dummy"]
        assert not [line for line in after["log"] if "usable" in line or "differ" in line]
        if form != "quark":
            assert after["digests"] == stock[f"{form}/dummy"]["digests"]


@pytest.mark.parametrize("form", FORMATS)
class TestReload:
    """Other weights for a model that is being served."""

    def test_complete(self, stock, wrapped, form):
        after = wrapped[f"{form}/reload complete"]
        if form == "quark":
            # Quark's input scales are copied twice, vLLM's counting takes the layer for complete before its last tensor
            # arrives, and stock goes on with what was in memory.
            assert "no usable value in w2_weight_scale_2, experts 3" in after["error"]
            assert not all(is_sane(layer) for layer in experts(stock[f"{form}/reload complete"]))
        else:
            assert after["digests"] == stock[f"{form}/reload complete"]["digests"]
            assert after["log"] == []

    def test_dead_expert(self, wrapped, form):
        after = wrapped[f"{form}/reload dead"]
        if form == "quark":
            assert "error" in after
        else:
            assert all(is_right(layer) for layer in experts(after))
            assert [line for line in after["log"] if "experts 2; repaired" in line]

    def test_a_layer_cannot_change_its_kind(self, stock, wrapped, form):
        assert "no usable value after a reload" in wrapped[f"{form}/reload none"]["error"]
        assert not any(is_right(layer) for layer in experts(stock[f"{form}/reload none"]))

    def test_a_routed_layer_stays_routed(self, wrapped, form):
        outcome = wrapped[f"{form}/reload routed"]
        assert all(is_weight_only(layer) for layer in experts(outcome))
        assert all(is_weight_only_linear(layer) for layer in linears(outcome))


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "cutlass", "emulation"])
def test_a_flag_that_needs_scales_is_refused(stock, wrapped, backend):
    said = wrapped[f"flag/{backend}"]["error"]
    assert said.startswith(
        "ScaleError: ModelOpt experts model.layers.0.mlp.experts: no usable value in w13_input_scale"
    )
    assert f"--moe-backend {backend} quantises activations" in said
    assert not any(is_sane(layer) for layer in experts(stock[f"flag/{backend}"]))


def test_a_flag_for_16_bit_activations_is_left_alone(stock, wrapped):
    assert wrapped["flag/marlin"]["digests"] == stock["flag/marlin"]["digests"]
    assert wrapped["flag/marlin"]["log"] == []


@pytest.mark.parametrize("backend", ["auto", "cutlass"])
class TestExpertParallel:
    """The first of two ranks, with experts 0 and 1; FlashInfer's scale spans both ranks, CUTLASS's one."""

    def test_experts_of_other_ranks_are_not_missing(self, stock, wrapped, backend):
        name = f"ranks/remote unloaded/{backend}"
        assert all(is_right(layer) for layer in experts(wrapped[name]))
        assert wrapped[name]["log"] == []
        assert any(is_sane(layer) for layer in experts(stock[name])) == (backend == "cutlass")

    def test_garbage_of_other_ranks_does_not_reach_the_shared_scale(self, wrapped, backend):
        name = f"ranks/remote garbage/{backend}"
        assert all(is_right(layer) for layer in experts(wrapped[name]))
        assert bool(wrapped[name]["log"]) == (backend == "auto")

    def test_a_dead_local_expert(self, wrapped, backend):
        name = f"ranks/local dead/{backend}"
        assert all(is_right(layer) for layer in experts(wrapped[name]))
        assert [line for line in wrapped[name]["log"] if "experts 1; repaired" in line]


def test_expert_parallel_weight_only(wrapped):
    assert all(is_weight_only(layer) for layer in experts(wrapped["ranks/none"]))


def test_expert_parallel_complete(stock, wrapped):
    assert wrapped["ranks/complete"]["digests"] == stock["ranks/complete"]["digests"]


def test_a_draft_head_is_not_a_missing_scale(stock, wrapped):
    """vLLM replaces it by the target's head after loading (vllm-project/vllm#57532)."""
    assert "was never loaded (still NaN)" in stock["draft head"]["error"]
    assert all(is_right(layer) for layer in experts(wrapped["draft head"]))
    assert [line for line in wrapped["draft head"]["log"] if "lm_head: nothing was loaded" in line]
    assert "ScaleError: ModelOpt linear lm_head: nothing was loaded" in wrapped["missing head"]["error"]


def test_a_layer_without_a_name(stock, wrapped):
    assert stock["nameless"]["kernel"] != "MarlinNvFp4LinearKernel"
    assert wrapped["nameless"]["kernel"] == "MarlinNvFp4LinearKernel"
    assert [line for line in wrapped["nameless"]["log"] if "a ReplicatedLinear without a name" in line]


def test_mixed_precision(stock, wrapped):
    assert wrapped["mixed/complete"]["digests"] == stock["mixed/complete"]["digests"]
    assert all(is_weight_only(layer) for layer in experts(wrapped["mixed/none"]))
    assert not any(is_sane(layer) for layer in experts(stock["mixed/none"]))


def test_an_unknown_algorithm_names_the_layer(wrapped):
    said = wrapped["mixed/unknown"]["error"]
    assert said.startswith("AlgorithmError: layer model.layers.1.self_attn.o_proj:")
    assert "W8A8_SQ_PER_CHANNEL" in said


def test_online_requantisation_reads_no_unloaded_scale(stock, wrapped):
    assert wrapped["requantise"] == stock["requantise"]
    assert stock["requantise without a scale"]["largest"] > 1e30
    assert "no usable value in w2_weight_scale_2, experts 1" in wrapped["requantise without a scale"]["error"]


def test_preprocessed_weights_are_not_looked_at(stock, wrapped):
    assert wrapped["preprocessed"]["error"] == stock["preprocessed"]["error"]
    assert "pre-processed weights require FLASHINFER_TRTLLM" in wrapped["preprocessed"]["error"]


def test_marlins_line_about_the_gpu(stock, wrapped):
    assert "Your GPU does not have native support for FP4" in stock["marlin"]["said"][0]
    (line,) = wrapped["marlin"]["said"]
    assert "This GPU has FP4 tensor cores" in line


W4A4, W4A16 = ("ModelOptNvFp4FusedMoE", False), ("ModelOptNvFp4FusedMoE", True)
UNQUANTISED = ("UnquantizedLinearMethod", False)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("mo-flat-glm52/experts model.layers.3.mlp.experts", W4A4),
        ("mo-flat-glm52/experts model.layers.10.mlp.experts", W4A4),
        ("mo-flat-glm52/linear model.layers.10.self_attn.q_a_proj", UNQUANTISED),
        ("mo-flat-glm52/linear model.layers.0.mlp.down_proj", UNQUANTISED),
        ("mo-nested-glm5/experts model.layers.3.mlp.experts", W4A4),
        ("mo-nested-glm5/experts model.layers.78.mlp.experts", ("NoneType", False)),
        ("mo-flat-minimax-m27/experts model.layers.0.block_sparse_moe.experts", W4A4),
        ("mo-flat-minimax-m27/linear model.layers.0.block_sparse_moe.gate", UNQUANTISED),
        ("mix-flat-qwen36-35b/experts language_model.model.layers.0.mlp.experts", W4A16),
        ("mix-flat-qwen36-35b/linear language_model.model.layers.7.mlp.gate", UNQUANTISED),
        ("mix-nested-qwen36-35b/experts language_model.model.layers.39.mlp.experts", W4A16),
        ("mo-weightonly-glm53flash-libertai/experts model.layers.0.mlp.experts", W4A16),
        ("mo-weightonly-glm53flash-libertai/linear model.layers.0.self_attn.o_proj", ("ModelOptLinearMethod", True)),
        ("ct-w4a4-devstral2-autoround/linear model.layers.0.self_attn.o_proj", ("CompressedTensorsW4A4Fp4", False)),
        (
            "ct-mix-w4a16-qwen38-35b-distill/experts model.layers.0.mlp.experts",
            ("CompressedTensorsW4A4Nvfp4MoEMethod", True),
        ),
        (
            "ct-mix-w4a16-qwen38-35b-distill/linear model.layers.0.mlp.shared_expert.down_proj",
            ("CompressedTensorsW4A4Fp4", True),
        ),
        ("ct-mix-w4a16-qwen38-35b-distill/linear model.layers.0.self_attn.o_proj", ("CompressedTensorsW8A8Fp8", False)),
        ("ct-mix-w4a16-qwen38-35b-distill/linear mtp.layers.0.self_attn.o_proj", UNQUANTISED),
        ("neg-int4-kimi-k25/experts model.layers.1.mlp.experts", ("CompressedTensorsWNA16MoEMethod", False)),
        ("neg-int4-kimi-k25/linear model.layers.1.self_attn.o_proj", UNQUANTISED),
        ("mix-nested-step35-flash-w8a8sq/experts model.layers.3.moe.experts", W4A4),
        ("mix-nested-step35-flash-w8a8sq/linear model.layers.9.mlp.down_proj", UNQUANTISED),
        ("mix-nested-step35-flash-w8a8sq/linear ", UNQUANTISED),
        ("quark-nvfp4-fixture/experts model.layers.0.mlp.experts", ("QuarkNvfp4MoEMethod", False)),
        ("quark-nvfp4-fixture/linear model.layers.0.mlp.down_proj", ("QuarkNVFP4", False)),
    ],
)
def test_public_configurations(wrapped, stock, layer, expected):
    outcome = wrapped[f"public/{layer}"]
    assert (outcome["method"], outcome["w4a16"]) == expected
    assert {**outcome, "log": []} == stock[f"public/{layer}"]  # all of these are read rightly by this vLLM


@pytest.mark.parametrize("layer", ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_up_proj"])
def test_a_public_checkpoint_with_an_unknown_algorithm(stock, wrapped, layer):
    name = f"public/mix-nested-step35-flash-w8a8sq/linear {layer}"
    assert (
        f"AlgorithmError: layer {layer}: the checkpoint quantises it with W8A8_SQ_PER_CHANNEL" in wrapped[name]["error"]
    )
    assert stock[name]["method"] == "UnquantizedLinearMethod"


@pytest.mark.parametrize("name", ["mo-stub-nemotron3-super", "mo-nested-minimax-m21-gadflyii"])
def test_a_file_that_does_not_say_enough(wrapped, name):
    """Not taken for W4A4 on the word of such a file: vLLM does not recognise it, and refuses to be told."""
    assert "does not match the quantization method specified" in wrapped[f"public/{name}/asked for"]["error"]
    assert "has no parameter 'w2_input_scale'" in wrapped["public/unrecognised"]["error"]


def test_tiny_checkpoint_with_one_value_for_gate_up(stock, wrapped):
    """GLM's own model class, from a checkpoint that `python -m overlay tiny` wrote."""
    before, after = stock["tiny/genuine_w4a4"], wrapped["tiny/genuine_w4a4"]
    assert len(experts(after)) == 3
    assert not any(is_sane(layer) for layer in experts(before))
    assert all(is_sane(layer) for layer in experts(after))
    assert len([line for line in after["log"] if "layers 1-3: one value for gate and up" in line]) == 2
    assert not [line for line in after["log"] if "no usable value" in line]


def test_tiny_checkpoint_with_an_unknown_algorithm(stock, wrapped):
    """The configuration excludes the layer as well; vLLM follows that and would load int8 bytes as bf16 numbers."""
    assert "error" not in stock["tiny/mixed_precision_unknown"]
    assert wrapped["tiny/mixed_precision_unknown"]["error"].startswith("AlgorithmError: layer model.layers.0.mlp.")


def test_the_probe_without_a_gpu(stock, wrapped):
    """Every case is right with the overlay; without it, those that it cures are wrong."""
    assert all(row["ok"] for row in wrapped["probe"]["rows"])
    assert {row["backend"] for row in wrapped["probe"]["rows"]} == {
        "FLASHINFER_CUTLASS",
        "VLLM_CUTLASS",
        "MARLIN",
        "EMULATION",
    }
    wrong = {row["checkpoint"] for row in stock["probe"]["rows"] if row["ok"] is False}
    assert {"gate and up apart", "weight-only"} <= wrong
    assert "complete" not in wrong


def test_the_probe_sees_a_planted_scale(wrapped):
    """It points the right way, which is why direction is not enough."""
    planted = [row for row in wrapped["probe planted"]["rows"] if row["quantity"] == "w2 weights"]
    assert {row["backend"] for row in planted} == {"VLLM_CUTLASS", "MARLIN"}
    for row in planted:
        assert row["ok"] is False
        assert row["cosine"] == pytest.approx(1.0)
        assert row["magnitude"] == pytest.approx(25.0)


def test_outcomes_are_of_both_kinds(stock, wrapped):
    """The overlay was in front of one process and not of the other, and both ran everything."""
    assert stock.keys() == wrapped.keys()
    assert not any(outcome["log"] for outcome in stock.values())
    assert sum(bool(outcome["log"]) for outcome in wrapped.values()) > 50
    assert json.dumps(stock) != json.dumps(wrapped)
