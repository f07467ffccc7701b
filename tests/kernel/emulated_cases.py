"""Calls of the emulated kernels, and how far their results are from the fp64 reference."""

import itertools
from dataclasses import dataclass, replace

import torch

from overlay.kernel.reference import sparse_mla_reference

SCHEDULES = list(itertools.product((False, True), repeat=2))  # the last warp first; copies at the latest moment


@dataclass
class Case:
    q: torch.Tensor
    kv_rows: torch.Tensor
    indices: torch.Tensor
    k_scale: torch.Tensor | None
    scale: float = 512**-0.5


def make_case(tokens, heads, kv_dtype, columns, rows=211, seed=0):
    """Normal data; one index in seven is -1 or beyond the rows, and tile 1 is masked as a whole."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, 512, generator=generator).to(torch.bfloat16)
    kv_rows = torch.randn(rows, 512, generator=generator)
    k_scale = torch.tensor(0.37) if kv_dtype == "fp8" else None
    kv_rows = (kv_rows / 0.37).to(torch.float8_e4m3fn) if kv_dtype == "fp8" else kv_rows.to(torch.bfloat16)
    indices = torch.randint(-15, rows + 15, (tokens, columns), generator=generator, dtype=torch.int32)
    indices[:, 16:32] = -1
    return Case(q, kv_rows, indices, k_scale)


def run(kernel, case, splits=1, variant=None):
    tokens, columns = case.indices.shape
    out = torch.full_like(case.q, torch.nan, memory_format=torch.contiguous_format)
    lse = torch.full(case.q.shape[:2], torch.nan)
    partial = kernel.plan(tokens, columns, splits, variant).partial_bytes(tokens)
    workspace = torch.full((max(16, partial),), 255, dtype=torch.uint8)
    operands = (case.q, case.kv_rows, case.indices, case.scale, out, workspace)
    kernel(*operands, k_scale=case.k_scale, lse=lse, splits=splits, variant=variant)
    return out, lse


def error_of(case, out, lse):
    """Relative Frobenius error of `out`; `lse` is checked on the way."""
    k_scale = 1.0 if case.k_scale is None else case.k_scale.item()
    reference, reference_lse = sparse_mla_reference(case.q, case.kv_rows, case.indices, case.scale, k_scale)
    empty = reference_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert (out[empty] == 0).all()
    if not (lse - reference_lse)[~empty].abs().le(1e-5).all():
        return float("inf")
    return ((out.double() - reference).norm() / reference.norm()).item()


def poisoned(case):
    """NaN in every row that no index names, so that one that is read by mistake is seen."""
    named = torch.isin(torch.arange(case.kv_rows.shape[0]), case.indices.long())
    return replace(case, kv_rows=case.kv_rows.float().where(named[:, None], torch.nan).to(case.kv_rows.dtype))
