"""Batches for one sparse-MLA layer with index rows as the k-pool indexer writes them, and how an answer is judged.

Only torch: what a batch means is written down here once more, independently of vLLM and of the kernel.
"""

from dataclasses import dataclass

import torch

LATENT, TOPK, POOL, WIDTH = 512, 2048, 4, 2176
SCALE = 256**-0.5
# FlashInfer 0.6.17 answered 64 to 256 rows with NaN: both edges, and some between.
SIZES = (1, 2, 8, 63, 64, 65, 128, 200, 256, 257, 1024, 4096)
# Of "masked" rows three entries in ten are -1, of "empty" batches every third row is nothing but -1. The indexer writes
# neither by itself: ids that are out of range become -1, and so do rows of tokens that fill up a CUDA graph's batch.
KINDS = ("as selected", "masked", "empty")
# The cache: blocks of 256 rows, 320 rows apart, for other layers' pages lie between them. All blocks are full.
BLOCK, BLOCK_STRIDE, BLOCKS = 256, 320, 48
LONGEST = 6000
# Both sides of the top-k's edge, every length of a tail, one token, and the longest.
LENGTHS = (3001, 1, 2047, 2048, 2049, 2050, 2051, 2052, 17, LONGEST)
FP8_MAX = 448.0
K_SCALE = 0.37  # of fp8 rows: a kernel that forgets it is off by that factor
GROUP = 128  # elements of an fp8_ds_mla row that share a scale


@dataclass(frozen=True)
class Batch:
    """One token of each of T requests. Index rows hold positions in the request, -1 for nothing."""

    queries: torch.Tensor  # bf16 [T, heads, 512]
    lengths: torch.Tensor  # int32 [T], of the requests, this token included
    block_table: torch.Tensor  # int32 [T, blocks of the longest]
    index_rows: torch.Tensor  # int32 [T, 2176]

    @property
    def rows(self) -> torch.Tensor:
        """int64 [T, 2176]: block * BLOCK + offset for every index, -1 where there is none."""
        position = self.index_rows.long().clamp_min(0)
        block = self.block_table.long().gather(1, position // BLOCK)
        return torch.where(self.index_rows >= 0, block * BLOCK + position % BLOCK, -1)


def make(tokens: int, kind: str, heads: int, device: str | torch.device = "cpu") -> Batch:
    """A batch of `tokens` requests of mixed lengths; the same for the same arguments on the same device."""
    random = torch.Generator(device).manual_seed(tokens * len(KINDS) + KINDS.index(kind))

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random, device=device)

    lengths = (1 + uniform(tokens) * (LONGEST - 1)).int()
    lengths[: len(LENGTHS)] = torch.tensor(LENGTHS[:tokens], dtype=torch.int32, device=device)
    queries = torch.randn(tokens, heads, LATENT, generator=random, device=device).bfloat16()
    blocks = -(-LONGEST // BLOCK)
    # Blocks of different requests may be the same, as with a shared prefix; block 0 is vLLM's null block.
    block_table = uniform(tokens, BLOCKS - 1).argsort(1)[:, :blocks].int() + 1
    index_rows = select(lengths, uniform(tokens, LONGEST // POOL))
    if kind == "masked":
        index_rows = index_rows.masked_fill(uniform(*index_rows.shape) < 0.3, -1)
    elif kind == "empty":
        index_rows[::3] = -1
    return Batch(queries, lengths, block_table, index_rows)


def select(lengths: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Index rows for requests of `lengths` whose pools have these scores [T, pools].

    Up to 2048 tokens all of them, in order. Beyond, the tokens of the 512 pools with the best scores, the best pool
    first, then those of the pool that is not complete yet.
    """
    tokens, device = len(lengths), lengths.device
    column = torch.arange(WIDTH, device=device)
    length = lengths.long()[:, None]
    everything = torch.where(column < length, column, -1)
    whole = length // POOL
    pool = torch.arange(scores.shape[1], device=device)
    best = scores.masked_fill(pool >= whole, -1.0).topk(TOPK // POOL, dim=1).indices
    chosen = torch.full((tokens, WIDTH), -1, device=device)
    chosen[:, :TOPK] = (best[:, :, None] * POOL + torch.arange(POOL, device=device)).flatten(1)
    tail = whole * POOL + torch.arange(POOL - 1, device=device)
    chosen[:, TOPK : TOPK + POOL - 1] = torch.where(tail < length, tail, -1)
    return torch.where(length <= TOPK, everything, chosen).int()


def latents(device: str | torch.device = "cpu") -> torch.Tensor:
    """bf16 [BLOCKS * BLOCK, 512]: what is written to the cache."""
    random = torch.Generator(device).manual_seed(11)
    return torch.randn(BLOCKS * BLOCK, LATENT, generator=random, device=device).bfloat16()


def stored(rows: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """What a cache of this dtype, bfloat16 or fp8, holds of latent rows, fp32."""
    if kv_cache_dtype == "bfloat16":
        return rows.float()
    if kv_cache_dtype != "fp8":
        raise ValueError(f"rows of {kv_cache_dtype} are not known here")
    codes = (rows.float() / K_SCALE).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.float() * K_SCALE


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """fp32 [n, 512] of fp8_ds_mla rows, uint8 [n, 656]: 512 codes, then four fp32 scales, of 128 codes each.

    Raises ValueError where they are not the latent rows to within the steps of fp8, whatever the scales.
    """
    codes = packed[:, :LATENT].contiguous().view(torch.float8_e4m3fn).float()
    scales = packed[:, LATENT : LATENT + 16].contiguous().view(torch.float32)
    rows = (codes.unflatten(1, (-1, GROUP)) * scales[..., None]).flatten(1)
    written = latents(packed.device)[: len(rows)].float()
    error = ((rows - written).norm(dim=1) / written.norm(dim=1)).max().item()
    if not error < 0.05:
        raise ValueError(f"the cache writer stored rows that are off by {error:.2g}")
    return rows


@dataclass(frozen=True)
class Comparison:
    """The worst of all tokens and heads. `cosine` and `magnitude` are None where no token had anything to attend to."""

    cosine: float | None
    magnitude: float | None  # the factor of the length that is farthest from 1
    leftover: float  # the largest output of a token without a valid index, which must be 0
    broken: int  # tokens with an output that is not finite

    def fault(self, limits: tuple[float, float]) -> str:
        """What is wrong, held against (least cosine, largest deviation of the magnitude from 1); empty if nothing."""
        least, deviation = limits
        if self.broken:
            return f"{self.broken} tokens with NaN or infinity"
        if self.cosine is not None and not self.cosine >= least:
            return "direction"
        if self.magnitude is not None and not abs(self.magnitude - 1) <= deviation:
            return "magnitude"
        if self.leftover:
            return f"a token without rows gives {self.leftover:.3g}, not 0"
        return ""


def compare(found: torch.Tensor, wanted: torch.Tensor) -> Comparison:
    """`found` [T, heads, 512] against the reference's fp64 output, which is 0 for tokens without a valid index."""
    finite = found.isfinite().all(-1).all(-1)
    silent = (wanted == 0).all(-1).all(-1)
    leftover = found[finite & silent].abs().amax().item() if (finite & silent).any() else 0.0
    broken = int((~finite).sum())
    if not (finite & ~silent).any():
        return Comparison(None, None, leftover, broken)
    found, wanted = found[finite & ~silent].double(), wanted[finite & ~silent]
    lengths, right = found.norm(dim=-1), wanted.norm(dim=-1)
    cosine = (found * wanted).sum(-1) / (lengths * right).clamp_min(torch.finfo(torch.float64).tiny)
    magnitude = lengths / right
    worst = magnitude.flatten()[(magnitude - 1).abs().argmax()]
    return Comparison(cosine.min().item(), worst.item(), leftover, broken)
