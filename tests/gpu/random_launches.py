"""Launches with shapes, strides and indices drawn at random, each against the fp64 reference.

    python -m tests.gpu.random_launches [--launches N] [--seconds N] [--seed N]

Writes docs/measurements/random-launches-GPU.json. Launch N of a seed is the same wherever it runs: --only N repeats it.
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch

from overlay import measurement
from overlay.kernel.variants import MAX_COLUMNS, MAX_SPLITS
from tests.gpu import kernel_cases as cases

POOL_ROWS = 70_000
CHUNK = 64  # tokens of the reference at a time
# A rounding to nearest is off by 2**-8 of a bf16 at most, 2**-11 of an f16. Weights are f16 where rows are fp8; what a
# split leaves for the merge always is.
OUT_ROUNDING = 2.0**-8
WEIGHT_ROUNDING = {"bf16": 2.0**-8, "fp8": 2.0**-11}
PARTIAL_ROUNDING = 2.0**-11
RELATIVE = 3e-3
FP32 = 4e-5  # of scores, exponentials and sums, all fp32
HEADS = (8, 16, 32, 64) * 4 + (1, 3, 12, 24, 48, 80, 128)
PATTERNS = ("all valid", "masked tail", "scattered", "garbage", "one valid", "none valid", "duplicates", "mixed rows")


@dataclass(frozen=True)
class Drawn:
    """One launch. `columns` is the top-k width; strides are in elements beyond what a contiguous tensor has."""

    number: int
    tokens: int
    heads: int
    kv_dtype: str
    columns: int
    rows: int
    pattern: str
    splits: int | None
    pad_q: int
    pad_rows: int
    pad_indices: int
    scale: float
    k_scale: float | None


def draw(seed: int, number: int) -> Drawn:
    """Mostly small calls, so that many can be made; every size up to the kernel's limits can come."""
    pick = random.Random(f"{seed} {number}")
    kv_dtype = pick.choice(("bf16", "fp8"))
    columns = round(pick.choice((300, 2176, 2176, MAX_COLUMNS)) ** pick.random()) if pick.random() < 0.8 else 2176
    return Drawn(
        number=number,
        tokens=round((300 if columns < 3000 else 20) ** pick.random()),
        heads=pick.choice(HEADS),
        kv_dtype=kv_dtype,
        columns=columns,
        rows=round(POOL_ROWS ** pick.random()),
        pattern=pick.choice(PATTERNS),
        splits=None if pick.random() < 0.6 else pick.randint(1, MAX_SPLITS),
        pad_q=pick.choice((0, 8, 64)),
        pad_rows=pick.choice((0, 16, 144)),
        pad_indices=pick.choice((0, 1, 77)),
        scale=cases.SCALE * pick.choice((0.25, 1.0, 1.0)),
        k_scale=pick.choice((None, 0.02, 0.37, 1.0)) if kv_dtype == "fp8" else None,
    )


def indices(drawn: Drawn, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """[tokens, columns] int32 in the drawn pattern, as a view with other numbers, valid ones too, around it."""
    shape = (drawn.tokens, drawn.columns)

    def uniform(low: int, high: int, shape: tuple[int, ...] = shape) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.int64)

    column = torch.arange(drawn.columns, device=device)
    valid = uniform(0, drawn.rows)
    if drawn.pattern == "duplicates":
        valid = uniform(0, min(drawn.rows, 3))
    keep = torch.ones(shape, dtype=torch.bool, device=device)
    if drawn.pattern == "masked tail":
        keep = column[None] < uniform(0, drawn.columns + 1, (drawn.tokens, 1))
    elif drawn.pattern == "scattered":
        keep = uniform(0, 4) == 0
    elif drawn.pattern == "one valid":
        keep = column[None] == uniform(0, drawn.columns, (drawn.tokens, 1))
    elif drawn.pattern == "none valid":
        keep = ~keep
    elif drawn.pattern == "mixed rows":
        keep = keep & (uniform(0, 2, (drawn.tokens, 1)) == 0)
    elif drawn.pattern == "garbage":
        keep = uniform(0, 2) == 0
    other = torch.full_like(valid, -1)
    if drawn.pattern == "garbage":
        other = torch.where(uniform(0, 2) == 0, uniform(-(2**31), 0), uniform(drawn.rows, 2**31))
    wide = uniform(0, drawn.rows, (drawn.tokens, drawn.columns + drawn.pad_indices)).int()
    view = wide[:, drawn.pad_indices :]
    view.copy_(torch.where(keep, valid, other))
    return view


@dataclass(frozen=True)
class Pool:
    """Latent rows that all launches take theirs from: views of one allocation, so that drawing costs nothing."""

    normal: torch.Tensor  # fp32

    @staticmethod
    def make(device: torch.device, seed: int) -> "Pool":
        generator = torch.Generator(device).manual_seed(seed)
        return Pool(torch.randn(POOL_ROWS + 1, cases.LATENT, generator=generator, device=device))

    def rows(self, drawn: Drawn, generator: torch.Generator) -> torch.Tensor:
        """[rows, 512], `pad_rows` elements from row to row, NaN between them."""
        dtype = torch.bfloat16 if drawn.kv_dtype == "bf16" else torch.float8_e4m3fn
        width = cases.LATENT + drawn.pad_rows
        first = int(torch.randint(0, POOL_ROWS - drawn.rows + 1, (1,), generator=generator, device=self.normal.device))
        wide = torch.full((drawn.rows, width), torch.nan, device=self.normal.device).to(dtype)
        view = wide[:, : cases.LATENT]
        divisor = 1.0 if drawn.k_scale is None else drawn.k_scale
        view.copy_((self.normal[first : first + drawn.rows] / divisor).clamp(-448, 448).to(dtype))
        return view


def reference(case: cases.Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64: the output [T, H, 512]; the same with every latent made positive; the LSE [T, H]."""
    k_scale = 1.0 if case.k_scale is None else case.k_scale.double()
    outs, spreads, sums = [], [], []
    for q, index in zip(case.q.split(CHUNK), case.indices.split(CHUNK), strict=True):
        valid = (index >= 0) & (index < case.kv_rows.shape[0])
        rows = case.kv_rows[torch.where(valid, index, 0).long()].double() * k_scale
        scores = torch.einsum("thd,tkd->thk", q.double(), rows) * case.scale
        scores = scores.masked_fill(~valid[:, None], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
        outs.append(weights @ rows)
        spreads.append(weights @ rows.abs())
        sums.append(lse)
    return torch.cat(outs), torch.cat(spreads), torch.cat(sums)


def check(case: cases.Case, out: torch.Tensor, lse: torch.Tensor, many_rows: bool, split_from: int) -> None:
    """Each element within what rounding can do to it. Raises AssertionError.

    Weights are rounded, what the splits of a row leave (of tokens from `split_from` on), and the output. Where a token
    attends to `many_rows`, most of that cancels: then the contract's bar for the relative error holds as well.
    """
    expected, spread, expected_lse = reference(case)
    empty = expected_lse.isneginf()
    error = (out.double() - expected).abs()
    summed = (WEIGHT_ROUNDING[case.kv_dtype] + FP32) * spread
    summed[split_from:] += PARTIAL_ROUNDING * spread[split_from:]
    excess = torch.nan_to_num(error - summed - OUT_ROUNDING * (expected.abs() + summed), nan=torch.inf).max().item()
    assert excess <= 0, f"an element is off by {excess:.2e} more than rounding explains"
    relative = (error.norm() / expected.norm()).item() if many_rows else 0.0
    assert relative <= RELATIVE, f"relative error {relative:.2e}"
    assert (out[empty] == 0).all(), "a token without a valid index must give exact zeros"
    assert torch.equal(lse.isneginf(), empty), "-inf is the LSE of tokens without a valid index, and of no other"
    off = ((lse.double() - expected_lse)[~empty].abs() - 1e-5 - 1e-6 * expected_lse[~empty].abs()).nan_to_num(torch.inf)
    assert off.numel() == 0 or off.max() <= 0, f"lse is off by {off.max().item():.2e} more than allowed"


def launch(drawn: Drawn, pool: Pool, seed: int) -> None:
    """Make the call and compare. Raises AssertionError."""
    device = pool.normal.device
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + drawn.number)
    wide = torch.randn(drawn.tokens, drawn.heads, cases.LATENT + drawn.pad_q, generator=generator, device=device)
    k_scale = None if drawn.k_scale is None else torch.tensor(drawn.k_scale, device=device)
    case = cases.Case(
        q=wide.to(torch.bfloat16)[..., : cases.LATENT],
        kv_rows=pool.rows(drawn, generator),
        indices=indices(drawn, generator, device),
        k_scale=k_scale,
        scale=drawn.scale,
    )
    many_rows = drawn.rows >= 64 and drawn.pattern == "all valid" and drawn.columns > 63
    parts = cases.load(case).parts(drawn.tokens, drawn.columns, drawn.splits)
    split_from = next((part.first for part in parts if part.plan.splits > 1), drawn.tokens)
    check(case, *cases.call(case, drawn.splits), many_rows, split_from)


def run(launches: int, seconds: float, seed: int) -> dict[str, object]:
    """Launch until `launches` are made or `seconds` have passed; write and return the measurement."""
    device = cases.gpu()
    pool = Pool.make(device, seed)
    seen: Counter[str] = Counter()
    elements, failures, began, number = 0, [], time.monotonic(), 0
    for number in range(launches):
        if time.monotonic() - began > seconds:
            break
        drawn = draw(seed, number)
        try:
            launch(drawn, pool, seed)
        except AssertionError as error:
            failures.append(f"launch {number}: {error} ({drawn})")
        seen.update((drawn.kv_dtype, f"{drawn.heads} heads", drawn.pattern, "splits" if drawn.splits else "own plan"))
        elements += drawn.tokens * drawn.heads * cases.LATENT
    else:
        number += 1
    report = {
        **measurement.provenance(),
        "seed": seed,
        "launches": number,
        "wanted": launches,
        "elements_compared": elements,
        "drawn": dict(sorted(seen.items())),
        "seconds": round(time.monotonic() - began, 1),
        "failures": failures[:50],
        "failed": len(failures),
    }
    measurement.keep("random-launches", report)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.random_launches", description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1200, help="stop after so many, and say how many were made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="make this one launch, print it, and write nothing")
    options = parser.parse_args()
    if options.only is not None:
        drawn = draw(options.seed, options.only)
        print(drawn)
        launch(drawn, Pool.make(cases.gpu(), options.seed), options.seed)
        return 0
    report = run(options.launches, options.seconds, options.seed)
    print(f"{report['launches']} launches in {report['seconds']} s, {report['failed']} failed")
    for failure in report["failures"]:
        print(failure)
    return int(bool(report["failed"]) or report["launches"] < options.launches)


if __name__ == "__main__":
    sys.exit(main())
