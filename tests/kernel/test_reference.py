"""The fp64 reference against the formula, number by number."""

import math

import pytest
import torch

from overlay.kernel.reference import sparse_mla_reference


def naive(q, rows, indices, scale):
    """Loops over Python floats."""
    tokens, heads, width = q.shape
    out = torch.zeros(tokens, heads, width, dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    q, rows = q.double().tolist(), rows.double().tolist()
    for t in range(tokens):
        named = [i for i in indices[t].tolist() if 0 <= i < len(rows)]
        for h in range(heads):
            scores = [scale * sum(a * b for a, b in zip(q[t][h], rows[i], strict=True)) for i in named]
            if not scores:
                continue
            total = sum(math.exp(score) for score in scores)
            lse[t, h] = math.log(total)
            for d in range(width):
                weighted = (math.exp(score) * rows[i][d] for score, i in zip(scores, named, strict=True))
                out[t, h, d] = sum(weighted) / total
    return out, lse


@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_against_loops(chunk):
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(5, 3, 8, generator=generator).to(torch.bfloat16)
    rows = torch.randn(11, 8, generator=generator).to(torch.bfloat16)
    indices = torch.randint(-4, 15, (5, 7), generator=generator, dtype=torch.int32)
    indices[1] = -1
    indices[2] = 99
    indices[3] = 4  # one row, seven times
    out, lse = sparse_mla_reference(q, rows, indices, 0.4, chunk=chunk)
    expected, expected_lse = naive(q, rows, indices, 0.4)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    assert (out[1:3] == 0).all() and lse[1:3].isneginf().all()


def test_fp8_rows_and_their_bytes():
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(2, 2, 8, generator=generator).to(torch.bfloat16)
    codes = torch.randn(9, 8, generator=generator).to(torch.float8_e4m3fn)
    indices = torch.randint(0, 9, (2, 5), generator=generator, dtype=torch.int32)
    expected, _ = naive(q, codes.double() * 0.37, indices, 0.4)
    for rows in (codes, codes.view(torch.uint8)):
        out, _ = sparse_mla_reference(q, rows, indices, 0.4, 0.37)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_rows_that_are_not_named_do_not_matter():
    q = torch.ones(1, 1, 8, dtype=torch.bfloat16)
    rows = torch.full((4, 8), torch.nan, dtype=torch.bfloat16)
    rows[2] = 3.0
    out, _ = sparse_mla_reference(q, rows, torch.tensor([[-1, 2, 7]], dtype=torch.int32), 1.0)
    assert (out == 3).all()
