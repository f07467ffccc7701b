"""NVFP4 weights: two e2m1 values a byte, an e4m3 scale for each 16 of them, one fp32 scale for the tensor.

value = e2m1 * block scale * global scale. The first of two values is in the low nibble, as
`vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py` unpacks them.

The global scales written here are powers of two. A dequantised weight then has at most six significant bits and is
exact in BF16, so a BF16 twin holds the very same weights and nothing but the engine's arithmetic can differ.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# Halfway between neighbours of E2M1; a tie goes to the neighbour with the even code.
_MIDPOINTS = tuple((low + high) / 2 for low, high in itertools.pairwise(E2M1))


@dataclass(frozen=True)
class Packed:
    """One quantised weight [rows, columns]."""

    codes: torch.Tensor  # uint8 [rows, columns / 2]
    block_scales: torch.Tensor  # float8_e4m3fn [rows, columns / 16]
    global_scale: float


def global_scale(largest: float) -> float:
    """The smallest power of two with which weights up to `largest` need no block scale above e4m3's maximum."""
    return 2.0 ** math.ceil(math.log2(largest / (E2M1_MAX * E4M3_MAX)))


def quantise(weight: torch.Tensor, scale: float) -> Packed:
    """Pack `weight` [rows, columns], columns a multiple of 16, with the global scale `scale`.

    A block of zeros gets block scale 1: a stored scale of zero would look like the fault this project hunts.
    """
    rows, columns = weight.shape
    blocks = weight.float().view(rows, columns // BLOCK, BLOCK) / scale
    largest = blocks.abs().amax(-1)
    block_scales = torch.where(largest > 0, largest / E2M1_MAX, 1.0).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    values = (blocks / block_scales.float().unsqueeze(-1)).view(rows, columns)
    midpoints = torch.tensor(_MIDPOINTS)
    magnitude = values.abs()
    below = torch.bucketize(magnitude, midpoints)
    above = torch.bucketize(magnitude, midpoints, right=True)
    codes = torch.where(below % 2 == 0, below, above) + 8 * torch.signbit(values)
    codes = codes.to(torch.uint8)
    return Packed(codes[:, ::2] | codes[:, 1::2] << 4, block_scales, scale)


def dequantise(packed: Packed) -> torch.Tensor:
    """The BF16 weight [rows, columns] that `packed` stands for; exact where the global scale is a power of two."""
    codes = torch.stack((packed.codes & 15, packed.codes >> 4), -1).flatten(1).long()
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes]
    scales = (packed.block_scales.float() * packed.global_scale).repeat_interleave(BLOCK, dim=1)
    return (values * scales).bfloat16()
