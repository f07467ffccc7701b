"""How a call is cut into blocks: pure functions of shapes and of the number of multiprocessors.

Never of the contents of a call: a captured CUDA graph repeats the launch it was captured with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from overlay.kernel.variants import LATENT, MAX_SPLITS, MERGE_WARPS, Variant, variants_for

MAX_WAVES = 3  # splits never launch more than this many times what the GPU holds at once
MERGE_IN_FLIGHT = 8  # splits times units that a warp of the merge asks for at once
UNITS = LATENT // 32  # of a head tile: what a warp of the merge joins


class Cost(NamedTuple):
    """Microseconds of a block: `fixed`, and for each index column; and of what a second one on the same
    multiprocessor adds, the share."""

    fixed: float
    column: float
    second: float


class Model(NamedTuple):
    """What a launch costs beyond what every launch costs, in microseconds.

    `split_head`: a block writes one head of a partial output instead of a final one. `merge`: the merge, and for each
    split of a token `merge_split`, and for each head of a partial output, which is read, `merge_head`. `launch`: what
    every launch costs, where a call has two.
    """

    blocks: Mapping[str, Cost]  # by the variant's name
    split_head: float
    merge: float
    merge_split: float
    merge_head: float
    launch: float


# Fitted to 1,222 launches on an H200 (docs/measurements/tune-nvidia-h200.json) as `python -m overlay bench --tune` does
# it, the best of fourteen walks: 8 to 64 heads, 1 to 256 tokens of 2048 columns, every variant and split count. Of the
# 72 shapes 66 get the fastest launch that was measured, and the others one that is up to 2.4 % slower, 64 heads at 4
# tokens most. Beyond those shapes it extrapolates. Only ratios matter, so the choice holds for other parts as far as
# their multiprocessors are alike. `launch` is what measured times have beyond the model's, on the average that the fit
# weighs by.
MODEL = Model(
    blocks={
        "sparse_mla_h8_bf16": Cost(1.17, 0.0288, 0.431),
        "sparse_mla_h16_bf16": Cost(1.55, 0.0321, 0.304),
        "sparse_mla_h32_bf16": Cost(1.35, 0.041, 0.292),
        "sparse_mla_h64_bf16": Cost(1.18, 0.0527, 0.875),
        "sparse_mla_h8_bf16_deep": Cost(2.15, 0.0205, 2.14),
        "sparse_mla_h16_bf16_deep": Cost(2.89, 0.022, 0.702),
        "sparse_mla_h8_bf16_few": Cost(0.772, 0.0246, 0.696),
        "sparse_mla_h16_bf16_few": Cost(0.862, 0.0296, 0.617),
        "sparse_mla_h8_fp8": Cost(1.62, 0.017, 0.379),
        "sparse_mla_h16_fp8": Cost(2.3, 0.0234, 0.251),
        "sparse_mla_h32_fp8": Cost(1.38, 0.0364, 0.296),
        "sparse_mla_h8_fp8_few": Cost(0.454, 0.0221, 0.865),
        "sparse_mla_h16_fp8_few": Cost(0.782, 0.0246, 0.0704),
    },
    split_head=0.0377,
    merge=1.07,
    merge_split=0.000424,
    merge_head=0.000603,
    launch=1.5,
)
# A second launch must promise so much of the time of one: below it 0 to 3 % were measured, no more than scatter.
WORTH_CUTTING = 0.03


@dataclass(frozen=True)
class Plan:
    """One launch: the main kernel, and the merge where it splits."""

    variant: Variant
    head_blocks: int  # of a token, each the work of one group of warps
    splits: int
    split_columns: int  # index columns of a split; the last one may have fewer
    sharers: int  # warps of the merge that share the splits of a unit
    units: int  # that a warp of the merge joins at once

    def grid(self, tokens: int) -> tuple[int, int, int]:
        """Blocks of all tokens, and splits; for few tokens tokens, splits and the blocks of each."""
        if self.variant.few:
            return tokens, self.splits, self.head_blocks
        return tokens * self.head_blocks // self.variant.groups, self.splits, 1

    def partial_bytes(self, tokens: int) -> int:
        """Workspace of this plan, as cuda/partial.cuh has it: nothing without a split.

        Else `output_bytes`, and for each head block of a split a maximum and a sum per head, and a factor for each
        quarter of the dims.
        """
        if self.splits == 1:
            return 0
        sums = self.variant.group_heads * 8 + 16
        return self.output_bytes(tokens) + tokens * self.splits * self.head_blocks * sums

    def output_bytes(self, tokens: int) -> int:
        """Partial outputs, f16, at the start of the workspace; the sums follow."""
        return tokens * self.splits * self.head_blocks * self.variant.group_heads * LATENT * 2

    @property
    def merge_warps(self) -> int:
        """Of a block of the merge."""
        return max(min(MERGE_WARPS), self.sharers)

    def merge_grid(self, tokens: int) -> tuple[int, int]:
        """Head tiles, and groups of the units of one."""
        groups = UNITS * self.sharers // (self.merge_warps * self.units)
        return tokens * self.head_blocks * self.variant.group_heads // 8, groups


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
        ValueError: a split count outside 1 to 72, or a variant that does not serve these heads.
    """
    serving = variants_for(num_heads, kv_dtype)
    if variant is not None and variant not in serving:
        raise ValueError(f"{variant.name} does not serve {num_heads} heads of {kv_dtype} rows")
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"{splits} splits: 1 to {MAX_SPLITS} are possible")
    variant, splits = choose(serving if variant is None else (variant,), num_heads, tokens, columns, sm_count, splits)
    head_blocks = -(-num_heads // variant.heads) * variant.groups
    return Plan(
        variant,
        head_blocks,
        splits,
        split_columns(columns, splits),
        *_merge_shape(tokens * head_blocks * variant.group_heads // 8, splits, sm_count),
    )


class Part(NamedTuple):
    """One launch of a call: tokens `first` to `first + tokens - 1`."""

    first: int
    tokens: int
    plan: Plan


@lru_cache(maxsize=4096)
def parts(num_heads: int, kv_dtype: str, tokens: int, columns: int, sm_count: int) -> tuple[Part, ...]:
    """The launches of a call: one, or the tokens that fill the GPU a whole number of times, then the rest.

    A few blocks more than the GPU holds at once take as long as that many again, on a GPU that is nearly idle. As a
    launch of its own the rest is cut into as many blocks as there is room for. H200, 8 tokens more than fit at once:
    272 tokens of 16 heads 104 us instead of 134, 140 tokens of 64 heads 128 instead of 166.
    """

    def modelled(count: int, cut: Plan) -> float:
        return microseconds(MODEL, cut.variant, cut.splits, num_heads, count, columns, sm_count)

    one = plan(num_heads, kv_dtype, tokens, columns, sm_count)
    least, best = (1 - WORTH_CUTTING) * modelled(tokens, one), (Part(0, tokens, one),)
    widest, *others = variants_for(num_heads, kv_dtype)
    for variant in (widest, *(other for other in others if other.heads == widest.heads)):
        at_once = sm_count * variant.blocks // -(-num_heads // variant.heads)  # tokens that the GPU holds
        rest = tokens % at_once if at_once else 0
        if not 0 < rest < tokens:
            continue
        full = plan(num_heads, kv_dtype, tokens - rest, columns, sm_count, 1, variant)
        last = plan(num_heads, kv_dtype, rest, columns, sm_count)
        time = modelled(tokens - rest, full) + MODEL.launch + modelled(rest, last)
        if time < least:
            least, best = time, (Part(0, tokens - rest, full), Part(tokens - rest, rest, last))
    return best


def split_columns(columns: int, splits: int) -> int:
    """Columns of a split: whole words of the kernel's bit map, so that no tile straddles two splits."""
    return -(-columns // (32 * splits)) * 32


@lru_cache(maxsize=64)
def split_counts(columns: int) -> tuple[int, ...]:
    """The counts worth a thought: of those that give a split as many columns the smallest, which leaves none empty."""
    smallest = {split_columns(columns, count): count for count in range(MAX_SPLITS, 0, -1)}
    return tuple(sorted(smallest.values()))


def choose(
    serving: tuple[Variant, ...], num_heads: int, tokens: int, columns: int, sm_count: int, splits: int | None = None
) -> tuple[Variant, int]:
    """The variant and the split count with the smallest modelled time; the first of equals."""
    candidates = [
        (variant, count)
        for variant in serving
        for count in ((splits,) if splits else split_counts(columns))
        if splits or count == 1 or worth_splitting(variant, num_heads, tokens, columns, sm_count, count)
    ]
    return min(candidates, key=lambda one: microseconds(MODEL, *one, num_heads, tokens, columns, sm_count))


def worth_splitting(variant: Variant, num_heads: int, tokens: int, columns: int, sm_count: int, splits: int) -> bool:
    """Whether so many splits neither launch far more than the GPU holds at once nor leave a block too few columns.

    A block for few tokens works on a single tile of bf16 rows: H200, one token of 8 heads, 5.0 us in 32 splits and 4.9
    in 64. In fp8, whose rows take half as long to come, 4.8 and 5.0. Other variants need more to pay for their start.
    """
    fewest = 32 if variant.few and variant.kv_dtype == "bf16" else 64
    blocks = tokens * -(-num_heads // variant.heads) * splits
    return blocks <= MAX_WAVES * sm_count * variant.blocks and split_columns(columns, splits) >= fewest


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


def _merge_shape(head_tiles: int, splits: int, sm_count: int) -> tuple[int, int]:
    """Warps to a unit of the merge, and units to a warp: powers of two, one of them 1.

    As many warps as make 8 to a multiprocessor, or 16 where 2 or 4 share and each has four splits or more; else as many
    units as may be in flight and leave 4 warps for every other multiprocessor. H200, by 1, 2, 4 and 8 warps: 8 heads at
    4 tokens in 32 splits 9.0, 7.7, 6.6 and 6.2 us; 32 heads at 8 tokens in 16 splits 13.9, 13.9, 13.5 and 14.7; 64
    heads 17.9, 17.5, 18.4 and 20.9. 8 heads at 64 tokens: 29.2 by units, 28.2 by pairs.
    """
    if splits > 32:  # more than a warp may have, or two
        return max(MERGE_WARPS), 1
    blocks = head_tiles * UNITS // min(MERGE_WARPS)
    for sharers in (8, 4, 2):
        if blocks * sharers <= (4 if sharers < 8 and splits >= 4 * sharers else 2) * sm_count:
            return sharers, 1
    most = min(MERGE_IN_FLIGHT // splits, 2 * blocks // sm_count)
    return 1, next((units for units in (4, 2) if units <= most), 1)


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
