"""How a call is cut into blocks: pure functions of shapes and of the number of multiprocessors.

Never of the contents of a call: a captured CUDA graph repeats the launch it was captured with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from overlay.kernel.variants import LATENT, MAX_SPLITS, Variant, variants_for

MAX_WAVES = 3  # splits never launch more than this many times what the GPU holds at once
MERGE_WARPS = 4  # of a block of the merge
FRAGMENTS = LATENT // 16  # of a head tile: what a warp of the merge joins


class Cost(NamedTuple):
    """Microseconds of a block: `fixed`, and for each index column; and of what a second one on the same
    multiprocessor adds, the share."""

    fixed: float
    column: float
    second: float


class Model(NamedTuple):
    """What a launch costs beyond what every launch costs, in microseconds.

    `split_head`: a block writes one head of a partial output instead of a final one. `merge`: the merge, and for each
    split of a token `merge_split`, and for each head of a partial output, which is read, `merge_head`.
    """

    blocks: Mapping[str, Cost]  # by the variant's name
    split_head: float
    merge: float
    merge_split: float
    merge_head: float


# Fitted to 948 launches on an H200: 8 to 64 heads, 1 to 256 tokens of 2048 columns, every variant and split count. Of
# the 72 shapes 64 get the fastest launch that was measured, the others one that is at most 4.2 % slower. Beyond those
# shapes it extrapolates. Only ratios matter, so the choice holds for other parts as far as their multiprocessors are
# alike: `python -m overlay bench --tune` measures and fits it anew.
MODEL = Model(
    blocks={
        "sparse_mla_h8_bf16": Cost(1.82, 0.0235, 0.524),
        "sparse_mla_h16_bf16": Cost(2.74, 0.0281, 0.406),
        "sparse_mla_h32_bf16": Cost(2.31, 0.0434, 0.297),
        "sparse_mla_h8_bf16_deep": Cost(2.92, 0.0189, 0.988),
        "sparse_mla_h16_bf16_deep": Cost(3.47, 0.0223, 0.594),
        "sparse_mla_h8_fp8": Cost(1.97, 0.0160, 0.477),
        "sparse_mla_h16_fp8": Cost(2.85, 0.0240, 0.311),
        "sparse_mla_h32_fp8": Cost(1.27, 0.0356, 0.403),
    },
    split_head=0.0579,
    merge=1.95,
    merge_split=0.0154,
    merge_head=0.000897,
)


@dataclass(frozen=True)
class Plan:
    """The launch of one call."""

    variant: Variant
    head_blocks: int
    splits: int
    split_columns: int  # index columns of a split; the last one may have fewer
    sharers: int  # warps of the merge that share the splits of a fragment

    def partial_bytes(self, tokens: int) -> int:
        """Workspace of this plan: nothing without a split, else `output_bytes` and a maximum and a sum per head."""
        if self.splits == 1:
            return 0
        return self.output_bytes(tokens) + tokens * self.splits * self.head_blocks * self.variant.heads * 8

    def output_bytes(self, tokens: int) -> int:
        """Partial outputs, fp32, at the start of the workspace; the sums follow."""
        return tokens * self.splits * self.head_blocks * self.variant.heads * LATENT * 4

    def merge_grid(self, tokens: int) -> tuple[int, int]:
        """Head tiles, and groups of the fragments of one."""
        return tokens * self.head_blocks * self.variant.heads // 8, FRAGMENTS * self.sharers // MERGE_WARPS


@lru_cache(maxsize=4096)
def plan(
    num_heads: int,
    kv_dtype: str,
    tokens: int,
    columns: int,
    sm_count: int,
    splits: int | None = None,
    variant: Variant | None = None,
) -> Plan:
    """Cut `tokens` x `num_heads` x `columns` into blocks; `splits` and `variant` force what is else chosen.

    Remembered: every layer of every step asks.

    Raises:
        ValueError: a split count outside 1 to 32, or a variant that does not serve these heads.
    """
    serving = variants_for(num_heads, kv_dtype)
    if variant is not None and variant not in serving:
        raise ValueError(f"{variant.name} does not serve {num_heads} heads of {kv_dtype} rows")
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"{splits} splits: 1 to {MAX_SPLITS} are possible")
    variant, splits = choose(serving if variant is None else (variant,), num_heads, tokens, columns, sm_count, splits)
    head_blocks = -(-num_heads // variant.heads)
    return Plan(
        variant,
        head_blocks,
        splits,
        split_columns(columns, splits),
        _sharers(tokens * head_blocks * variant.heads // 8, sm_count),
    )


def split_columns(columns: int, splits: int) -> int:
    """Columns of a split: whole words of the kernel's bit map, so that no tile straddles two splits."""
    return -(-columns // (32 * splits)) * 32


def choose(
    serving: tuple[Variant, ...], num_heads: int, tokens: int, columns: int, sm_count: int, splits: int | None = None
) -> tuple[Variant, int]:
    """The variant and the split count with the smallest modelled time; the first of equals."""
    candidates = [
        (variant, count)
        for variant in serving
        for count in ((splits,) if splits else range(1, MAX_SPLITS + 1))
        if splits or count == 1 or worth_splitting(variant, num_heads, tokens, columns, sm_count, count)
    ]
    return min(candidates, key=lambda one: microseconds(MODEL, *one, num_heads, tokens, columns, sm_count))


def worth_splitting(variant: Variant, num_heads: int, tokens: int, columns: int, sm_count: int, splits: int) -> bool:
    """Whether so many splits neither launch far more than the GPU holds at once nor leave a block too few columns."""
    blocks = tokens * -(-num_heads // variant.heads) * splits
    return blocks <= MAX_WAVES * sm_count * variant.blocks and split_columns(columns, splits) >= 64


def microseconds(
    model: Model, variant: Variant, splits: int, num_heads: int, tokens: int, columns: int, sm_count: int
) -> float:
    """Blocks in turns on their multiprocessors, then the merge."""
    cost, blocks = model.blocks[variant.name], tokens * -(-num_heads // variant.heads)
    rounds, rest = divmod(-(-blocks * splits // sm_count), variant.blocks)
    turns = rounds * (1 + cost.second * (variant.blocks - 1)) + rest
    block = cost.fixed + cost.column * split_columns(columns, splits)
    if splits == 1:
        return turns * block
    merge = model.merge + model.merge_split * splits + model.merge_head * splits * blocks * variant.heads
    return turns * (block + model.split_head * variant.heads) + merge


def _sharers(head_tiles: int, sm_count: int) -> int:
    """As many warps to a fragment of the merge as leave at most two blocks to a multiprocessor: 1, 2 or 4."""
    blocks = head_tiles * FRAGMENTS // MERGE_WARPS
    return next((sharers for sharers in (4, 2) if blocks * sharers <= 2 * sm_count), 1)


@lru_cache(maxsize=256)
def workspace_bytes(num_heads: int, kv_dtype: str, max_tokens: int, columns: int, sm_count: int) -> int:
    """The most that any call of up to `max_tokens` tokens needs with the plan chosen for it."""
    serving = variants_for(num_heads, kv_dtype)
    most_split = max(MAX_WAVES * sm_count * one.blocks // (2 * -(-num_heads // one.heads)) for one in serving)
    return max(
        (
            plan(num_heads, kv_dtype, tokens, columns, sm_count).partial_bytes(tokens)
            for tokens in range(1, min(max_tokens, most_split) + 1)
        ),
        default=0,
    )
