"""Reloads, flags, ranks, draft models, mixed precision, requantisation: where a scale is missing and it is no fault, or
where what is done about one is not the layer's alone to decide.
"""

import pytest

from tests import installed
from tests.nvfp4.outcomes import FORMATS, experts, is_right, is_sane, is_weight_only, is_weight_only_linear, linears
from tests.nvfp4.scenarios import OTHER_ALGORITHMS


@pytest.mark.parametrize("form", FORMATS)
class TestReload:
    """Other weights for a model that is being served."""

    def test_complete(self, stock, wrapped, form):
        after = wrapped[f"{form}/reload complete"]
        if form == "quark" and not installed.QUARK_RELOADS:
            assert "quant method must be one of" in stock[f"{form}/reload complete"]["error"]
            assert "error" in after
        elif form == "quark":
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

    def test_a_linear_layer_cannot_change_its_kind(self, stock, wrapped, form):
        said = wrapped[f"{form}/reload linear"]["error"]
        if form == "quark":  # it does not get that far: see test_complete
            assert "w2_weight_scale_2" in said
            return
        assert "linear model.layers.1.self_attn.o_proj: no usable value after a reload in input_" in said
        assert "was built for FlashInferCutlassNvFp4LinearKernel" in said
        assert "error" not in stock[f"{form}/reload linear"]

    def test_a_routed_layer_stays_routed(self, wrapped, form):
        outcome = wrapped[f"{form}/reload routed"]
        assert all(is_weight_only(layer) for layer in experts(outcome))
        assert all(is_weight_only_linear(layer) for layer in linears(outcome))

    def test_after_dummy_weights(self, stock, wrapped, form):
        """As weights are synchronised into an engine that was started without any."""
        first = f"{form}/dummy, reload"
        if form == "quark":  # see test_complete
            assert "error" in wrapped[f"{first} complete"]
            return
        assert wrapped[f"{first} complete"]["digests"] == stock[f"{first} complete"]["digests"]
        assert wrapped[f"{first} complete"]["log"] == []
        assert "no usable value after a reload in w13_input_" in wrapped[f"{first} none"]["error"]
        assert "no usable value in w2_weight_" in wrapped[f"{first} without a global scale"]["error"]
        said = wrapped[f"{first} linear"]["error"]
        assert "linear model.layers.1.self_attn.o_proj: no usable value after a reload in input_" in said
        assert not any("error" in stock[f"{first} {name}"] for name in ("none", "without a global scale", "linear"))


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


@pytest.mark.skipif(not installed.since(0, 30), reason="--moe-backend b12x came with vLLM 0.30")
@pytest.mark.parametrize("form", FORMATS)
def test_b12x(stock, wrapped, form):
    """b12x computes W4A16 where a layer's method says that it may; Quark's has no way to say so."""
    before, after = stock[f"b12x/{form}"], wrapped[f"b12x/{form}"]
    assert not any(layer["w4a16"] for layer in experts(before))
    if form == "quark":
        assert "no usable value in w13_input_scale_2 and w2_input_scale_2. --moe-backend b12x" in after["error"]
        return
    for layer in experts(after):
        assert (layer["backend"], layer["w4a16"], layer["a1_gscale"]) == ("B12X", True, None)
        assert layer["g1_alphas"] == pytest.approx([0.02] * 4)
    assert [line for line in after["log"] if "routed to W4A16 (B12X instead of B12X)" in line]


@pytest.mark.parametrize("form", FORMATS)
def test_flashinfers_b12x_reads_no_input_scale(stock, wrapped, form):
    """It quantises activations by each block's own scale: nothing is missing, and nothing is W4A16."""
    before, after = stock[f"flashinfer_b12x/{form}"], wrapped[f"flashinfer_b12x/{form}"]
    for layer, unwrapped in zip(experts(after), experts(before), strict=True):
        assert (layer["backend"], layer["w4a16"]) == ("FLASHINFER_B12X", False)
        assert layer["g1_alphas"] == unwrapped["g1_alphas"]
    (line,) = [line for line in after["log"] if "experts model" in line]
    assert line.startswith("INFO")
    assert "not read: FLASHINFER_B12X quantises activations with scales of its own" in line


@pytest.mark.parametrize("backend", ["auto", "cutlass"])
class TestExpertParallel:
    """The first of two ranks, with experts 0 and 1; FlashInfer's scale spans both ranks, CUTLASS's one."""

    @pytest.fixture(autouse=True)
    def spans_ranks(self, stock, backend):
        if backend == "cutlass" and not installed.CUTLASS_SPANS_RANKS:
            assert "does not support parallel config" in stock["ranks/local dead/cutlass"]["error"]
            pytest.skip("CUTLASS experts are for one rank alone before vLLM 0.32")

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
    if installed.LOOKS_FOR_BLOCK_SCALES:
        assert "was never loaded (still NaN)" in stock["draft head"]["error"]
    else:
        assert "error" not in stock["draft head"]
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


def test_experts_without_an_entry_of_their_own(stock, wrapped):
    """vLLM resolves the shared expert's algorithm for the routed ones, and leaves them unquantised: they are."""
    before, after = stock["mixed/shared expert alone"], wrapped["mixed/shared expert alone"]
    assert after["shared"] == before["shared"] == "NoneType"
    for name in ("own", "beside"):
        assert before[name] == "NoneType"
        assert after[name].startswith("AlgorithmError: layer model.layers.0.mlp.experts:")
        assert "FP8_PER_CHANNEL_PER_TOKEN" in after[name]


@pytest.mark.skipif(not installed.HAS_REQUANTISATION, reason="NVFP4 experts are requantised online from vLLM 0.33 on")
def test_online_requantisation_reads_no_unloaded_scale(stock, wrapped):
    assert wrapped["requantise"] == stock["requantise"] and "largest" in stock["requantise"]
    assert stock["requantise without a scale"]["largest"] > 1e30
    assert "no usable value in w2_weight_scale_2, experts 1" in wrapped["requantise without a scale"]["error"]


@pytest.mark.skipif(not installed.HAS_WEIGHT_CACHE, reason="weights are cached in a kernel's format from vLLM 0.30 on")
def test_preprocessed_weights_are_not_looked_at(stock, wrapped):
    assert wrapped["preprocessed"]["error"] == stock["preprocessed"]["error"]
    assert "pre-processed weights require FLASHINFER_TRTLLM" in wrapped["preprocessed"]["error"]


def test_a_derived_method_is_looked_after(stock, wrapped):
    """It converts weights itself, so its layers are repaired or refused, and never re-routed or reconciled."""
    assert wrapped["derived/complete"] == stock["derived/complete"]
    assert wrapped["derived/mismatch"] == stock["derived/mismatch"]
    assert wrapped["derived/dead"]["scales"] == stock["derived/complete"]["scales"]
    assert stock["derived/dead"]["scales"] != stock["derived/complete"]["scales"]
    assert [line for line in wrapped["derived/dead"]["log"] if "experts 2; repaired" in line]
    said = wrapped["derived/none"]["error"]
    assert "experts model.layers.0.mlp.experts: no usable value in w13_input_scale and w2_input_scale" in said
    assert "OwnModelOptMethod computes with quantised activations alone" in said


def test_a_net_below_everything_else(stock, wrapped):
    assert not any(is_sane(layer) for layer in experts(stock["net"]))
    said = "numbers that are not finite after the conversion in g1_alphas and g2_alphas and a1_gscale and a2_gscale"
    assert f"experts model.layers.0.mlp.experts: {said}" in wrapped["net"]["error"]


def test_marlins_line_about_the_gpu(stock, wrapped):
    assert "Your GPU does not have native support for FP4" in stock["marlin"]["said"][0]
    (line,) = wrapped["marlin"]["said"]
    assert "This GPU has FP4 tensor cores" in line


@pytest.mark.parametrize("algorithm", [*OTHER_ALGORITHMS, "FP8 alone"])
def test_other_algorithms_are_not_touched(stock, wrapped, algorithm):
    """FP8 and MXFP8 beside NVFP4 experts: since 0.30 the method that serves them is the one that serves NVFP4."""
    before, after = stock[f"linears/{algorithm}"], wrapped[f"linears/{algorithm}"]
    if not installed.since(0, 30) and "error" in before:  # whose mixed precision does not know the algorithm
        assert f"the checkpoint quantises it with {algorithm}, which" in after["error"]
        return
    assert algorithm == "FP8 alone" or all(is_right(layer) for layer in experts(after))
    assert after["digests"] == before["digests"]
    assert after["log"] == []
    assert any(name.endswith("_k_scale") for name in after["digests"])
