"""The two options, and the words for what was done."""

import logging
import math
import re
from types import SimpleNamespace

import pytest
import torch

from overlay.nvfp4 import experts, findings, linears, promotion
from overlay.nvfp4.findings import Finding
from overlay.nvfp4.policy import Policy
from overlay.nvfp4.scales import read_input_scales
from overlay.nvfp4.settle import ScaleError, Subject, settle

SUBJECT = Subject("ModelOpt experts", "model.layers.3.mlp.experts", "experts")
NAN = math.nan


def readings(*values: list[float]) -> dict:
    return {f"w{i}": read_input_scales(torch.tensor(row)) for i, row in enumerate(values)}


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("overlay"), "propagate", True)
    caplog.set_level(logging.DEBUG, "overlay")
    return lambda: [f"{record.levelname}: {record.getMessage()}" for record in caplog.records]


def test_one_parameter_without_any_scale_is_enough_to_route():
    settlement = settle(SUBJECT, readings([0.01, 0.01], [NAN, NAN]), Policy(), False)
    assert (settlement.route, settlement.missing) == (True, "w1")
    assert settle(SUBJECT, readings([0.01, 0.01], [0.01, 0.01]), Policy(), missing_elsewhere=True).route


def test_a_number_fills_only_what_is_missing(lines):
    settlement = settle(SUBJECT, readings([0.01, NAN], [NAN, 0.0]), Policy(all_missing=0.002), False)
    assert not settlement.route
    assert settlement.values["w0"].tolist() == pytest.approx([0.01, 0.01])
    assert settlement.values["w1"].tolist() == pytest.approx([0.002, 0.002])
    assert len(lines()) == 2


@pytest.mark.parametrize(
    ("values", "policy", "said"),
    [
        (([NAN, NAN],), Policy(all_missing="refuse"), "no usable value in w0. The checkpoint is weight-only, or"),
        (([NAN, 0.01],), Policy(some_bad="refuse"), "no usable value in w0, experts 0. some_bad = "),
    ],
)
def test_refusals_name_layer_parameter_and_experts(values, policy, said):
    with pytest.raises(ScaleError, match=re.escape(f"{SUBJECT.kind} {SUBJECT.name}: ")) as refused:
        settle(SUBJECT, readings(*values), policy, False)
    assert said in str(refused.value)


def test_several_layers_of_a_kind_are_one_line(lines):
    model = torch.nn.Module()
    with findings.loading(model, draft=False):
        for layer in (3, 4, 5, 9):
            name = f"model.layers.{layer}.mlp.experts"
            findings.note(Finding("ModelOpt experts", name, "no usable value", "w13_input_scale", "routed"))
        findings.note(Finding("ModelOpt linear", "lm_head", "no usable value", "input_scale", "routed"))
        assert lines() == []
    assert lines() == [
        "WARNING: ModelOpt experts model.layers.*.mlp.experts, layers 3-5, 9: "
        "no usable value in w13_input_scale; routed",
        "WARNING: ModelOpt linear lm_head: no usable value in input_scale; routed",
    ]


def test_different_experts_are_told_by_layer(lines):
    findings.write(
        Finding("ModelOpt experts", f"layers.{layer}.experts", "no usable value", "w2_input_scale", "repaired", rows)
        for layer, rows in ((1, (2,)), (7, (0, 1, 5)))
    )
    (line,) = lines()
    assert (
        "layers 1, 7: no usable value in w2_input_scale (layer 1: experts 2; layer 7: experts 0-1, 5); repaired" in line
    )


def test_a_refusal_does_not_swallow_what_was_found_before(lines):
    with pytest.raises(ScaleError), findings.loading(torch.nn.Module(), draft=False):
        findings.note(Finding("ModelOpt linear", "lm_head", "no usable value", "input_scale", "routed"))
        raise ScaleError("the next layer")
    assert len(lines()) == 1


def test_names_of_layers():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert findings.layer_name(SimpleNamespace(layer_name="", prefix="model.o_proj")) == "model.o_proj"
    with findings.loading(model, draft=True):
        assert findings.layer_name(model[0]) == "0"  # where vLLM built it without a name, its place in the model
        assert findings.is_draft()
    assert findings.layer_name(model[0]) == "a Linear without a name"
    assert not findings.is_draft()


@pytest.mark.parametrize(
    ("kernel", "owner", "reads"),
    [
        ("FlashInferCutlassNvFp4LinearKernel", {}, True),
        ("HummingNvFp4LinearKernel", {}, True),
        ("MarlinNvFp4LinearKernel", {}, False),
        ("FlashInferCuteDslNvFp4W4A16LinearKernel", {}, False),
        ("HummingNvFp4LinearKernel", {"use_a16": True}, False),
        ("HummingNvFp4LinearKernel", {"spec": SimpleNamespace(activation=None)}, False),
    ],
)
def test_linear_kernels_that_read_input_scales(kernel, owner, reads):
    instance = type(kernel, (), {})()
    assert linears.quantises_activations(SimpleNamespace(kernel=instance, **owner)) == reads


def test_ranks_that_exchange_activations_agree(monkeypatch):
    """One rank that has to route takes the others along; without an exchange each goes its own way."""
    import torch.distributed

    parallel_state = pytest.importorskip("vllm.distributed.parallel_state")
    monkeypatch.setattr(parallel_state, "get_ep_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flag, op, group: flag.fill_(1))
    assert experts.missing_on_any_rank(False, SimpleNamespace(use_all2all_kernels=True))
    assert not experts.missing_on_any_rank(False, SimpleNamespace(use_all2all_kernels=False))


GROUPS = [
    {"targets": ["*self_attn*"], "input_activations": {"num_bits": 4}},
    {"targets": ["*experts*"], "input_activations": None},
]


def test_groups_are_found_in_every_shape():
    group = {"weights": {"num_bits": 4}}
    for config in (
        {"config_groups": {"group_0": group}},
        {"config_groups": [group]},
        {"quantization": {"config_groups": {"group_0": group}}},
    ):
        assert promotion.config_groups(config) == [group]
    assert promotion.config_groups({"config_groups": {}}) == promotion.config_groups({}) == []


@pytest.mark.parametrize(("activations", "weight_only"), [(None, True), ({}, True), ({"num_bits": 4}, False)])
def test_weight_only_groups(activations, weight_only):
    assert promotion.is_weight_only([{"input_activations": activations}]) == weight_only
    assert not promotion.is_weight_only([])
    assert promotion.is_weight_only([{}])


def test_experts_of_mixed_groups():
    assert not promotion.is_weight_only(GROUPS)
    assert promotion.experts_are_weight_only(GROUPS, "model.layers.3.mlp.experts")
    assert not promotion.experts_are_weight_only(GROUPS[:1], "model.layers.3.mlp.experts")
    one_by_itself = [{**group, "targets": group["targets"][0]} for group in GROUPS]
    assert promotion.experts_are_weight_only(one_by_itself, "model.layers.3.mlp.experts")
    assert not promotion.experts_are_weight_only(one_by_itself[:1], "model.layers.3.mlp.experts")
    both = [*GROUPS, {"targets": ["*experts*"], "input_activations": {"num_bits": 4}}]
    assert not promotion.experts_are_weight_only(both, "model.layers.3.mlp.experts")
