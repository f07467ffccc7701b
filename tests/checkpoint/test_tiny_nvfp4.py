"""NVFP4 packing against a search through every representable value, in fp64."""

import pytest
import torch

from overlay.checkpoint.tiny_nvfp4 import BLOCK, E2M1, Packed, dequantise, global_scale, quantise

SIGNED = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)


def test_the_first_of_two_values_is_in_the_low_nibble():
    row = torch.zeros(1, BLOCK)
    row[0, :4] = torch.tensor([6.0, -0.5, 1.5, 4.0])
    packed = quantise(row, 1.0)
    assert packed.block_scales.float().item() == 1.0
    assert packed.codes[0, :3].tolist() == [0x7 | 0x9 << 4, 0x3 | 0x6 << 4, 0]


def test_every_representable_value_survives():
    values = torch.cat((SIGNED, SIGNED.flip(0))).float().view(1, 2 * BLOCK)
    for scale in (1.0, 2.0**-9, 2.0**5):
        assert torch.equal(dequantise(quantise(values * scale, scale)).float(), values * scale)


@pytest.mark.parametrize("seed", range(3))
def test_each_value_goes_to_the_nearest_one_that_its_block_scale_allows(seed):
    weight = torch.randn(32, 8 * BLOCK, generator=torch.Generator().manual_seed(seed)) * 10.0**-seed
    scale = global_scale(weight.abs().max().item())
    packed = quantise(weight, scale)
    steps = (packed.block_scales.double() * scale).repeat_interleave(BLOCK, dim=1).unsqueeze(-1)
    nearest = (weight.double().unsqueeze(-1) - steps * SIGNED).abs().amin(-1)
    error = (weight.double() - dequantise(packed).double()).abs()
    assert torch.allclose(error, nearest, rtol=0, atol=1e-12 * weight.abs().max().item())
    assert (error.pow(2).mean() / weight.double().pow(2).mean()).sqrt() < 0.12


def test_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2).view(1, BLOCK)
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]).repeat(2).view(1, BLOCK)
    assert torch.equal(dequantise(quantise(ties, 1.0)).float(), expected)


def test_the_twin_is_exact_in_bf16():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) / 32
    packed = quantise(weight, global_scale(weight.abs().max().item()))
    codes = torch.stack((packed.codes & 15, packed.codes >> 4), -1).flatten(1).long()
    scales = packed.block_scales.double().repeat_interleave(BLOCK, dim=1) * packed.global_scale
    assert torch.equal(dequantise(packed).double(), SIGNED[codes] * scales)


def test_scales_use_the_range_and_a_block_of_zeros_has_none_that_is_zero():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    packed = quantise(weight, global_scale(weight.abs().max().item()))
    scales = packed.block_scales.float()
    assert (scales[3] == 1).all()
    assert (dequantise(packed)[3] == 0).all()
    assert 224 <= scales.max() <= 448
    assert scales.min() >= 2.0**-6, "a subnormal block scale"


def test_packed_is_what_a_loader_expects():
    packed = quantise(torch.ones(8, 64), 2.0**-10)
    assert isinstance(packed, Packed)
    assert (packed.codes.shape, packed.codes.dtype) == ((8, 32), torch.uint8)
    assert (packed.block_scales.shape, packed.block_scales.dtype) == ((8, 4), torch.float8_e4m3fn)
