"""The limits of this GPU, measured: gathering the same rows without arithmetic, and mma.sync without memory."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from overlay.bench.cases import Case, Inputs
from overlay.bench.timing import warm
from overlay.kernel import source
from overlay.kernel.build import Program
from overlay.kernel.load import cuda_device, cupy_stream, load_function
from overlay.kernel.variants import LATENT, SHARED_LIMIT

# Rows in flight a warp, and blocks that share a token: the best of these is the limit. More in flight does not help.
DEPTHS = (8, 16)
MMA_ROUNDS = 4096


def gather_us(case: Case, calls: list[Inputs]) -> float:
    """Microseconds to bring the case's rows into shared memory and do nothing with them: the best configuration."""
    rows = [(call.kv, call.indices[:, : case.valid].contiguous()) for call in calls]  # a limit reads no masked column
    return min(warm([_gather(*row, depth, splits) for row in rows]) for depth in DEPTHS for splits in _splits(case))


def multiply_tflops() -> float:
    """Peak of mma.sync m16n8k16, bf16 with fp32 accumulation, in TFLOP/s."""
    function = _function("multiply_fragments", 0)
    blocks = 4 * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

    def call() -> None:
        function((blocks,), (256,), (np.int32(MMA_ROUNDS), 0), stream=_stream())

    return blocks * 8 * MMA_ROUNDS * 8 * 4096 / warm([call]) / 1e6


def _splits(case: Case) -> list[int]:
    """One block a token where there are many; else enough blocks to fill the GPU twice."""
    blocks = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    wanted = {1, min(32, max(1, blocks // case.tokens)), min(32, max(1, 2 * blocks // case.tokens))}
    return sorted(wanted)


def _gather(kv: torch.Tensor, indices: torch.Tensor, depth: int, splits: int) -> Callable[[], None]:
    tokens, columns = indices.shape
    row_bytes = LATENT * kv.element_size()
    columns_per_block = -(-columns // splits)
    shared = (columns_per_block * 4 + 1023) // 1024 * 1024 + 4 * depth * row_bytes
    function = _function("gather_rows", SHARED_LIMIT)
    arguments = (
        kv.data_ptr(),
        np.uint32(row_bytes),
        np.int32(kv.shape[0]),
        indices.data_ptr(),
        np.int32(columns),
        np.int32(columns_per_block),
        np.int32(depth),
        0,
    )
    return lambda: function((tokens, splits), (128,), arguments, shared_mem=shared, stream=_stream())


@cache
def _function(name: str, shared: int):
    device = cuda_device(torch.device("cuda"))
    return load_function(device, Program(name, source.flatten("ceilings.cu"), 256, shared))


def _stream():
    return cupy_stream(torch.cuda.current_stream().cuda_stream)
