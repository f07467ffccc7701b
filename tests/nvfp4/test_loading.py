"""Every case, from a checkpoint's files to kernels ready to run, by the installed vLLM: stock, and with the overlay."""

import json

import pytest

from tests import installed
from tests.nvfp4.outcomes import (
    ALPHA,
    FORMATS,
    experts,
    is_right,
    is_sane,
    is_weight_only,
    is_weight_only_linear,
    linears,
)
from tests.nvfp4.scenarios import FORMS, POISON, SCALES

REFUSED_MISMATCH = "Different global scales for w1 and w3 is not supported"  # Quark's words before 0.30


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
        if case["id"] == "flat_null" and installed.READS_NULL_ACTIVATIONS:  # the one form that vLLM recognises itself
            assert wrapped[name]["digests"] == stock[name]["digests"]
        else:
            assert not any(is_sane(layer) for layer in experts(stock[name]))
    if shipped == "none" or shipped.endswith("0.0"):
        assert all(is_weight_only_linear(layer) for layer in linears(wrapped[name]))
    else:
        assert all(layer["alpha"] == pytest.approx([ALPHA]) for layer in linears(wrapped[name]))


@pytest.mark.parametrize("name", [case["id"] for case in FORMS if case["input_scales"] in ("none", "attention only")])
def test_configuration_forms_in_the_other_file(stock, wrapped, name):
    """What belongs in config.json from hf_quant_config.json, and the other way round."""
    assert all(is_weight_only(layer) for layer in experts(wrapped[f"crossed/{name}"]))
    is_known = name == "flat_null" and installed.READS_NULL_ACTIVATIONS
    assert all(is_sane(layer) for layer in experts(stock[f"crossed/{name}"])) == is_known


@pytest.mark.parametrize("case", [case for case in FORMS if case["input_scales"] != "all"], ids=lambda case: case["id"])
def test_every_scale_is_shipped(stock, wrapped, case):
    """The tensors count where a configuration says nothing of activations; one that says weight-only is obeyed."""
    before, after = stock[f"shipped/{case['id']}"], wrapped[f"shipped/{case['id']}"]
    says_weight_only = {
        # vLLM's own reading, in releases that have one
        "flat_null": [] if installed.READS_NULL_ACTIVATIONS else ["the configuration quantises weights alone"],
        "nested_groups_inside": ["the configuration quantises weights alone"],
        "empty_activation_table": ["the configuration quantises weights alone"],
        "mixed_groups_experts_null": [
            "experts model.layers.*.mlp.experts, layers 0-1: activations are not quantised in config_groups; "
            "W4A16 (MARLIN) from the start"
        ],
    }
    if case["id"] not in says_weight_only:
        assert after["digests"] == before["digests"]
        assert after["log"] == []
        return
    assert all(is_weight_only(layer) for layer in experts(after))
    expected = says_weight_only[case["id"]]
    assert len(after["log"]) == len(expected)
    assert all(words in line for words, line in zip(expected, after["log"], strict=True))


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
        is_refused = form == "modelopt" and installed.LOOKS_FOR_BLOCK_SCALES
        assert ("error" in stock[f"{form}/linear blocks"]) == is_refused

    def test_gate_and_up_are_reconciled(self, stock, wrapped, form):
        """up's scale of expert 1 is four times gate's; vLLM computes both with gate's."""
        outcome = wrapped[f"{form}/mismatch"]
        for layer in experts(outcome):
            assert layer["g1_alphas"] == pytest.approx([ALPHA, 4 * ALPHA, ALPHA, ALPHA])
        assert [
            line for line in outcome["log"] if "gate and up differ by more than 1.1" in line and "experts 1;" in line
        ]
        if form == "quark" and installed.QUARK_REFUSES_A_MISMATCH:
            assert REFUSED_MISMATCH in stock[f"{form}/mismatch"]["error"]
            return
        before = 0.02 if form == "quark" else ALPHA
        assert all(layer["g1_alphas"] == pytest.approx([before] * 4) for layer in experts(stock[f"{form}/mismatch"]))

    def test_a_slight_mismatch_is_left_alone(self, stock, wrapped, form):
        if form == "quark" and installed.QUARK_REFUSES_A_MISMATCH:
            assert REFUSED_MISMATCH in stock[f"{form}/slight mismatch"]["error"]
            assert wrapped[f"{form}/slight mismatch"] == stock[f"{form}/slight mismatch"]
            return
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

    def test_two_shards_without_input_scale(self, wrapped, form):
        outcome = wrapped[f"{form}/shards input"]
        assert all(layer["alpha"] == pytest.approx([ALPHA]) for layer in linears(outcome, "qkv_proj"))
        assert [line for line in outcome["log"] if "shards 0, 2; repaired" in line]

    def test_shards_without_global_scale_are_refused(self, stock, wrapped, form):
        """vLLM writes the one scale of a projection that is stored fused to all shards: here q's and v's were lost."""
        said = "linear model.layers.0.self_attn.qkv_proj: no usable value in weight_"
        assert said in wrapped[f"{form}/shards global"]["error"]
        assert ", shards 0, 2. A weight scale cannot be" in wrapped[f"{form}/shards global"]["error"]
        assert "error" not in stock[f"{form}/shards global"]

    def test_one_input_scale_for_gate_and_up(self, wrapped, form):
        outcome = wrapped[f"{form}/gate alone"]
        assert all(is_right(layer) for layer in experts(outcome))
        told = [line for line in outcome["log"] if "no usable value for gate or up in w13_input_" in line]
        assert bool(told) == (form != "quark")  # of whose experts vLLM writes any input scale to both halves

    def test_one_global_scale_for_gate_and_up(self, stock, wrapped, form):
        """Gate's is what vLLM computes both with, and what a fused gate_up has; of up's alone it would know nothing."""
        outcome = wrapped[f"{form}/gate global alone"]
        assert all(is_right(layer) for layer in experts(outcome))
        (line,) = [line for line in outcome["log"] if "one value for gate and up" in line]
        assert line.startswith("WARNING")
        said = wrapped[f"{form}/up global alone"]["error"]
        assert "experts model.layers.0.mlp.experts: no usable value in w13_weight_" in said
        before = stock[f"{form}/up global alone"]
        if not (form == "quark" and installed.QUARK_REFUSES_A_MISMATCH):
            assert not any(is_right(layer) or is_right(layer, alpha=0.02) for layer in experts(before))

    @pytest.mark.parametrize("kind", ["qkv_proj", "gate_up_proj"])
    @pytest.mark.parametrize("scale", ["globals", "input"])
    def test_vllm_writes_a_fused_scale_to_every_shard(self, stock, form, kind, scale):
        """What a missing shard is told from: were it the first slot alone, such a scale would have to be spread."""
        values = stock[f"fused/{form}"][kind][scale]
        assert values == pytest.approx([0.25] * (3 if kind == "qkv_proj" else 2))

    def test_one_of_two_parameters_is_missing(self, wrapped, form):
        """A layer that could quantise the inputs of gate and up, and not those of down, quantises neither."""
        outcome = wrapped[f"{form}/down alone missing"]
        assert all(is_weight_only(layer) for layer in experts(outcome))
        assert [line for line in outcome["log"] if "no usable value in w2_input_" in line and "routed to" in line]

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


def test_outcomes_are_of_both_kinds(stock, wrapped):
    """The overlay was in front of one process and not of the other, and both ran everything."""
    assert stock.keys() == wrapped.keys()
    assert not any(outcome["log"] for outcome in stock.values())
    assert sum(bool(outcome["log"]) for outcome in wrapped.values()) > 50
    assert json.dumps(stock) != json.dumps(wrapped)
