"""How a call is cut into blocks: pure functions of shapes and of the number of multiprocessors.

Never of the contents of a call: a captured CUDA graph repeats the launch it was captured with.
"""

from dataclasses import dataclass
from functools import lru_cache

from overlay.kernel.variants import LATENT, MAX_SPLITS, Variant

MAX_WAVES = 3  # splits never launch more than this many times what the GPU holds at once


@dataclass(frozen=True)
class Plan:
    """The launch of one call."""

    head_blocks: int
    splits: int
    split_columns: int  # index columns of a split; the last one may have fewer

    def partial_bytes(self, variant: Variant, tokens: int) -> int:
        """Workspace of this plan: nothing without a split, else `output_bytes` and a maximum and a sum per head."""
        if self.splits == 1:
            return 0
        return self.output_bytes(variant, tokens) + tokens * self.splits * self.head_blocks * variant.heads * 8

    def output_bytes(self, variant: Variant, tokens: int) -> int:
        """Partial outputs, fp32, at the start of the workspace; the sums follow."""
        return tokens * self.splits * self.head_blocks * variant.heads * LATENT * 4


def plan(variant: Variant, num_heads: int, tokens: int, columns: int, sm_count: int, splits: int | None = None) -> Plan:
    """Cut `tokens` x `num_heads` x `columns` into blocks; `splits` forces a split count.

    Raises:
        ValueError: a split count outside 1 to 32.
    """
    head_blocks = -(-num_heads // variant.heads)
    if splits is None:
        splits = choose_splits(variant, tokens * head_blocks, columns, sm_count)
    elif not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"{splits} splits: 1 to {MAX_SPLITS} are possible")
    return Plan(head_blocks, splits, split_columns(columns, splits))


def split_columns(columns: int, splits: int) -> int:
    """Columns of a split: whole words of the kernel's bit map, so that no tile straddles two splits."""
    return -(-columns // (32 * splits)) * 32


@lru_cache(maxsize=4096)
def choose_splits(variant: Variant, blocks: int, columns: int, sm_count: int) -> int:
    """The split count with the smallest modelled time, in units of one index column gathered by a block of its own SM.

    A block costs its columns plus a fixed part: Q in, O out, and for a split 4 columns a head, because a partial output
    is written and read in fp32. Two blocks on one multiprocessor take 1.4 times as long as one. The merge reads the
    partial outputs of a token one after the other. With these constants the model picks the best split counts measured
    on an H200 for 8 to 64 heads: 32 at one token, 16 at 8, then as many as fit.
    """
    best, best_cost = 1, float("inf")
    for splits in range(1, MAX_SPLITS + 1):
        too_many = blocks * splits > MAX_WAVES * sm_count * variant.blocks
        if splits > 1 and (too_many or split_columns(columns, splits) < 64):
            break
        rounds, rest = divmod(-(-blocks * splits // sm_count), variant.blocks)
        turns = rounds * (1.4 if variant.blocks == 2 else 1.0) + rest
        fixed = 64 + 4 * variant.heads if splits > 1 else 64
        merge = 32 + splits * (2 + 0.4 * blocks) if splits > 1 else 0
        cost = turns * (split_columns(columns, splits) + fixed) + merge
        if cost < best_cost:
            best, best_cost = splits, cost
    return best


def workspace_bytes(variant: Variant, num_heads: int, max_tokens: int, columns: int, sm_count: int) -> int:
    """The most that any call of up to `max_tokens` tokens needs with the split count chosen for it."""
    head_blocks = -(-num_heads // variant.heads)
    most_split = min(max_tokens, MAX_WAVES * sm_count * variant.blocks // (2 * head_blocks))
    return max(
        (
            plan(variant, num_heads, tokens, columns, sm_count).partial_bytes(variant, tokens)
            for tokens in range(1, most_split + 1)
        ),
        default=0,
    )
