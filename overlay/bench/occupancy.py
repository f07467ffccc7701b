"""Run on another GPU as sm_12x would: with as many blocks a multiprocessor as fit there.

An H200's multiprocessor has 228 KB of shared memory where sm_120 has 100: without this, its figures would say nothing
about the target. Each block is launched with so much shared memory that one more would not fit.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from overlay.kernel.launch import SparseMLA
from overlay.kernel.variants import Variant

SM120_SHARED = 100 * 1024  # bytes a multiprocessor
RESERVED = 1024  # bytes that the driver takes for each block


def blocks_on_sm120(shared_bytes: int) -> int:
    """Blocks of that much shared memory that one multiprocessor of sm_120 holds."""
    return SM120_SHARED // (shared_bytes + RESERVED)


def padded(shared_bytes: int, blocks: int, available: int) -> int:
    """Shared memory of a block such that `blocks` fit into `available` bytes and one more does not."""
    return max(shared_bytes, available // (blocks + 1) - RESERVED + 128) // 128 * 128


@contextmanager
def as_on_sm120(kernel: SparseMLA) -> Iterator[dict[Variant, int]]:
    """Pads the kernel's launches while the context lasts; yields the blocks that a multiprocessor then holds."""
    own = dict(kernel.shared_bytes)
    available = torch.cuda.get_device_properties(kernel.device).shared_memory_per_multiprocessor
    blocks = {variant: blocks_on_sm120(size) for variant, size in own.items()}
    kernel.reserve_shared({variant: padded(size, blocks[variant], available) for variant, size in own.items()})
    try:
        yield blocks
    finally:
        kernel.reserve_shared(own)
