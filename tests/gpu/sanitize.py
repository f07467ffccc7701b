"""Small calls of every variant: `compute-sanitizer --tool memcheck python -m tests.gpu.sanitize`.

The rows begin at the start of their allocation and end at its end, so a read for a masked index, or one row too far,
is an error that memcheck sees.

`--one-group` leaves out the variant of 64 heads, whose two groups of warps meet at a barrier from two places of the
loop. A barrier is a number and a count of threads to PTX, whatever instruction they wait in; synccheck wants all of
them in the same one ("divergent thread(s) in block"). memcheck and racecheck follow it.
"""

import argparse
import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # every tensor is an allocation of its own

import torch

from overlay.kernel.launch import IndexRows, SparseMLA
from overlay.kernel.variants import VARIANTS, Variant, variants_for


def attention(
    device: torch.device, heads: int, kv_dtype: str, tokens: int, columns: int, splits: int, variant: Variant
) -> None:
    kernel = SparseMLA.load(device, heads, kv_dtype)
    rows = 37
    kv_rows = torch.ones(rows, 512, dtype=torch.bfloat16, device=device)
    kv_rows = kv_rows if kv_dtype == "bf16" else kv_rows.to(torch.float8_e4m3fn)
    q = torch.ones(tokens, heads, 512, dtype=torch.bfloat16, device=device)
    indices = (torch.arange(tokens * columns, device=device).view(tokens, columns) % (rows + 3) - 1).to(torch.int32)
    indices[-1, columns // 3 :] = -1
    out = torch.empty_like(q)
    lse = torch.empty(tokens, heads, device=device)
    size = kernel.plan(tokens, columns, splits, variant).partial_bytes(tokens)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    kernel(q, kv_rows, indices, 0.1, out, workspace, lse=lse, splits=splits, variant=variant)
    torch.cuda.synchronize()
    assert (out == 1).all(), (heads, variant.name, tokens, columns, splits)


def index_rows(device: torch.device) -> None:
    kernel = IndexRows.load(device)
    topk = torch.arange(-3, 97, device=device, dtype=torch.int32).repeat(4, 1)
    requests = torch.tensor([0, 1, 7, -1], dtype=torch.int32, device=device)
    lengths = torch.tensor([90, 11], dtype=torch.int32, device=device)
    table = torch.tensor([[3, 1, -1], [0, 2, 4]], dtype=torch.int32, device=device)
    out = torch.empty_like(topk)
    kernel(topk, requests, lengths, table, 17, 40, out)
    torch.cuda.synchronize()
    assert (out[2:] == -1).all()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize")
    parser.add_argument("--one-group", action="store_true", help="leave out variants of two groups of warps")
    most_groups = 1 if parser.parse_args().one_group else 2
    device = torch.device("cuda", 0)
    for variant in (variant for variant in VARIANTS if variant.groups <= most_groups):
        shape = (device, variant.heads, variant.kv_dtype)
        attention(*shape, tokens=2, columns=150, splits=1, variant=variant)
        attention(*shape, tokens=1, columns=600, splits=2, variant=variant)  # more columns than are listed at once
    for heads, kv_dtype, splits in ((12, "bf16", 1), (72, "fp8", 2)):
        for variant in variants_for(heads, kv_dtype):
            attention(device, heads, kv_dtype, tokens=1, columns=33, splits=splits, variant=variant)
    # Splits of few columns, merged two and four units to a warp; and a list of tiles in several rounds.
    for heads, kv_dtype, tokens, columns in ((8, "bf16", 40, 64), (64, "fp8", 16, 128), (8, "bf16", 1, 5900)):
        narrowest = variants_for(heads, kv_dtype)[0]
        attention(device, heads, kv_dtype, tokens=tokens, columns=columns, splits=2, variant=narrowest)
    # Units of the merge that two, four and eight warps share, these with more splits than they read at once.
    for heads, kv_dtype, tokens, columns, splits in (
        (64, "fp8", 5, 256, 8),
        (64, "fp8", 2, 128, 4),
        (8, "bf16", 1, 2176, 68),
    ):
        few = next(variant for variant in variants_for(heads, kv_dtype) if variant.few)
        attention(device, heads, kv_dtype, tokens=tokens, columns=columns, splits=splits, variant=few)
    index_rows(device)
    print("sanitize: done")


if __name__ == "__main__":
    main()
