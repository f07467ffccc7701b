"""Layers of experts built by hand: what is asked of a backend, margins of padded layers, the net after a conversion."""

import math
from types import SimpleNamespace

import pytest
import torch

from overlay.nvfp4 import experts, scales
from overlay.nvfp4.settle import ScaleError, Subject

SUBJECT = Subject("ModelOpt experts", "experts", "experts")
NAN = math.nan


def method(backend: str = "FLASHINFER_CUTLASS", use_a16: bool = False, **state):
    named = SimpleNamespace(name=backend, value=backend)
    return SimpleNamespace(nvfp4_backend=named, use_a16=use_a16, **state)


@pytest.mark.parametrize(
    ("state", "w4a16", "reads"),
    [
        ({"backend": "MARLIN"}, True, True),
        ({"backend": "HUMMING"}, True, True),
        ({"backend": "FLASHINFER_B12X"}, False, False),
        ({"backend": "FLASHINFER_B12X", "use_a16": True}, False, False),
        ({"backend": "FLASHINFER_MOE_EP_CUTEDSL"}, False, False),
        ({"use_a16": True}, True, True),
        ({}, False, True),
        ({"per_token_activation": True}, False, False),
    ],
)
def test_what_a_backend_does_to_activations(state, w4a16, reads):
    assert experts.computes_w4a16(method(**state)) == w4a16
    assert experts.reads_no_input_scale(method(**state)) == (not reads)


class Layer(torch.nn.Module):
    """Four experts of 288 x 128, of which 256 x `inner` are in the checkpoint; every scale is loaded."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.layer_name = "experts"
        self.moe_config = SimpleNamespace(
            hidden_dim=288,
            hidden_dim_unpadded=256,
            intermediate_size_per_partition=128,
            intermediate_size_per_partition_unpadded=inner,
        )
        shapes = {"w13_weight_scale": (4, 256, 18), "w2_weight_scale": (4, 288, 8)}
        for name, shape in shapes.items():
            self.register_parameter(name, parameter(torch.empty(shape, dtype=torch.float8_e4m3fn)))
        for name in ("weight_scale_2", "input_scale"):
            self.register_parameter(f"w13_{name}", parameter(torch.empty(4, 2)))
            self.register_parameter(f"w2_{name}", parameter(torch.empty(4)))
        experts.watch(self, experts.MODELOPT, is_dummy=False)
        one = torch.ones((), dtype=torch.float8_e4m3fn)
        for start in (0, 128):
            self.w13_weight_scale.data[:, start : start + inner, :16] = one
        self.w2_weight_scale.data[:, :256, : inner // 16] = one
        self.w13_weight_scale_2.data.fill_(0.02)
        self.w2_weight_scale_2.data.fill_(0.02)


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize("inner", [96, 128])
def test_the_margin_of_a_padded_layer_becomes_zero(inner):
    layer = Layer(inner)
    experts.check_weight_scales(SUBJECT, layer, experts.MODELOPT)
    w13, w2 = layer.w13_weight_scale.float().unflatten(1, (2, 128)), layer.w2_weight_scale.float()
    assert (w13[:, :, :inner, :16] == 1).all()
    assert (w13[..., 16:] == 0).all()
    assert (w13[:, :, inner:] == 0).all()
    assert (w2[:, :256, : inner // 16] == 1).all()
    assert (w2[:, 256:] == 0).all()
    assert (w2[..., inner // 16 :] == 0).all()


@pytest.mark.parametrize("inner", [96, 128])
@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("w13_weight_scale", slice(128, 256), slice(0, 16)),  # up's
        ("w13_weight_scale", slice(0, 1), slice(15, 16)),
        ("w2_weight_scale", slice(255, 256), slice(5, 6)),
    ],
)
def test_a_block_scale_missing_from_a_padded_layer_is_refused(name, rows, columns, inner):
    layer = Layer(inner)
    blocks = getattr(layer, name).data
    blocks[1, rows, columns] = torch.tensor(NAN).to(blocks.dtype)
    with pytest.raises(ScaleError, match=f"values that were never loaded in {name}, experts 1\\."):
        experts.check_weight_scales(SUBJECT, layer, experts.MODELOPT)
    assert scales.unloaded_blocks(blocks)[1]  # nothing was zeroed


GOOD = {name: torch.ones(4) for name in experts.WEIGHT_FACTORS + experts.INPUT_FACTORS}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_no_layer_is_served_with_numbers_that_are_not_finite(name, bad):
    quant = SimpleNamespace(**GOOD | {name: torch.tensor([1.0, 1.0, bad, 1.0])})
    with pytest.raises(
        ScaleError, match=f"experts experts: numbers that are not finite after the conversion in {name}\\."
    ):
        experts.verify(method(moe_quant_config=quant), Layer(128), experts.MODELOPT)


def test_what_a_layer_does_not_read_may_be_anything():
    layer = Layer(128)
    nothing = dict.fromkeys(experts.INPUT_FACTORS)
    experts.verify(method("MARLIN", moe_quant_config=SimpleNamespace(**GOOD | nothing)), layer, experts.MODELOPT)
    unread = GOOD | {"a1_gscale": torch.tensor([NAN] * 4)}
    experts.verify(method("FLASHINFER_B12X", moe_quant_config=SimpleNamespace(**unread)), layer, experts.MODELOPT)
    experts.verify(method(), layer, experts.MODELOPT)  # a derived method without a description of its own
