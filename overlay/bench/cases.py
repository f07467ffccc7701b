"""What is measured: shapes, index patterns, and the inputs that are made of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from overlay.kernel.variants import LATENT

Pattern = Literal["uniform", "hot", "overlap"]

POOL_ROWS = 65_536  # 64 MiB of bf16 rows: more than the L2 of an H200, less than that of an RTX PRO 6000
HEADS = (8, 16, 32, 64)
TOKENS = (1, 8, 64, 128, 1024, 4096)
KV_DTYPES = ("bf16", "fp8")
# vLLM's index rows are 2176 wide, of which at most 2051 are valid; 64 valid is a short context in the same row.
WIDTHS = ((2048, 2048), (2176, 2051), (2176, 64))


@dataclass(frozen=True)
class Case:
    """One shape: `valid` of `columns` indices of a token name a row, the rest are -1 at the end of the row."""

    heads: int
    tokens: int
    columns: int
    valid: int
    kv_dtype: str
    pattern: Pattern = "uniform"

    @property
    def plain(self) -> bool:
        """Indices from anywhere, all of them valid: what peers are given, too."""
        return self.pattern == "uniform" and self.columns == self.valid

    @property
    def flop(self) -> int:
        """Useful operations: two products of 512 by `valid` for every head and token."""
        return 4 * LATENT * self.valid * self.heads * self.tokens

    @property
    def gathered_bytes(self) -> int:
        return self.tokens * self.valid * LATENT * (2 if self.kv_dtype == "bf16" else 1)


def grid(heads: tuple[int, ...] = HEADS, tokens: tuple[int, ...] = TOKENS) -> Iterator[Case]:
    """Every case of the table: all shapes with uniform indices, and the other patterns at the full width of vLLM."""
    for kv_dtype in KV_DTYPES:
        for head_count in heads:
            for token_count in tokens:
                for columns, valid in WIDTHS:
                    yield Case(head_count, token_count, columns, valid, kv_dtype)
                for pattern in ("hot", "overlap"):
                    yield Case(head_count, token_count, 2048, 2048, kv_dtype, pattern)


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call. `kv` is shared by all rotations, the rest is each call's own."""

    q: torch.Tensor  # [T, H, 512] bf16
    kv: torch.Tensor  # [rows, 512] bf16 or float8_e4m3fn
    indices: torch.Tensor  # [T, K] int32
    out: torch.Tensor  # [T, H, 512] bf16
    scale: float = 256**-0.5


def pool(kv_dtype: str, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normal latent rows, [POOL_ROWS, 512]."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(POOL_ROWS, LATENT, generator=generator, device=device)
    return rows.to(torch.bfloat16 if kv_dtype == "bf16" else torch.float8_e4m3fn)


def inputs(case: Case, kv: torch.Tensor, seed: int) -> Inputs:
    """Fresh queries and indices for one call."""
    device = kv.device
    generator = torch.Generator(device).manual_seed(seed)
    q = torch.randn(case.tokens, case.heads, LATENT, generator=generator, device=device).to(torch.bfloat16)
    indices = torch.full((case.tokens, case.columns), -1, dtype=torch.int32, device=device)
    indices[:, : case.valid] = _select(case, generator)
    return Inputs(q, kv, indices, torch.empty_like(q))


def rotation(case: Case, kv: torch.Tensor) -> list[Inputs]:
    """Calls to time in turn, each with queries and selections of its own; fewer where they are large."""
    return [inputs(case, kv, seed) for seed in range(4 if case.tokens <= 128 else 2)]


def _select(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Row numbers [T, valid]: anywhere in the pool, in its hottest sixteenth, or nine tenths shared by neighbours."""
    shape, device = (case.tokens, case.valid), generator.device
    if case.pattern == "hot":
        return torch.randint(POOL_ROWS // 16, shape, generator=generator, device=device, dtype=torch.int32)
    own = torch.randint(POOL_ROWS, shape, generator=generator, device=device, dtype=torch.int32)
    if case.pattern == "overlap":
        own[:, : case.valid * 9 // 10] = own[0, : case.valid * 9 // 10].clone()
    return own
