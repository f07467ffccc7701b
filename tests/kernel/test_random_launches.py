"""Launches at random, made on the CPU by the emulated kernels: the draws reach every edge, and a fault is seen."""

import json
from collections import Counter

import pytest
import torch

from overlay.kernel.variants import MAX_COLUMNS
from tests.gpu import kernel_cases as cases
from tests.gpu import random_launches
from tests.gpu.random_launches import PATTERNS, POOL_ROWS, Pool, draw, indices, launch

CPU = torch.device("cpu")
DRAWS = [draw(1, number) for number in range(10_000)]


def test_a_number_is_one_launch_wherever_it_runs():
    assert [draw(1, number) for number in range(50)] == DRAWS[:50]
    assert draw(2, 0) != draw(1, 0)


def test_the_draws_reach_every_edge():
    assert {drawn.pattern for drawn in DRAWS} == set(PATTERNS)
    assert {drawn.heads for drawn in DRAWS} == set(random_launches.HEADS)
    for name, lowest, highest in (("tokens", 1, 290), ("columns", 1, 8000), ("rows", 1, 65_000)):
        values = [getattr(drawn, name) for drawn in DRAWS]
        assert min(values) == lowest and max(values) > highest
    assert all(drawn.columns <= MAX_COLUMNS and drawn.rows <= POOL_ROWS for drawn in DRAWS)
    counts = Counter(drawn.kv_dtype for drawn in DRAWS)
    assert min(counts.values()) > 4500
    assert {drawn.splits for drawn in DRAWS} == {None, *range(1, 73)}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_indices_are_what_the_pattern_says(pattern):
    drawn = next(
        drawn for drawn in DRAWS if drawn.pattern == pattern and 40 < drawn.columns < 400 and drawn.tokens > 20
    )
    found = indices(drawn, torch.Generator().manual_seed(1), CPU)
    assert found.shape == (drawn.tokens, drawn.columns) and found.dtype == torch.int32
    valid = (found >= 0) & (found < drawn.rows)
    counts = valid.sum(dim=1)
    expected = {
        "all valid": valid.all(),
        "masked tail": (valid[:, :-1] | ~valid[:, 1:]).all() and len(counts.unique()) > 5,
        "scattered": 0.1 < valid.float().mean() < 0.4,
        "garbage": 0.3 < valid.float().mean() < 0.7 and (found < -1).any() and (found > drawn.rows).any(),
        "one valid": (counts == 1).all(),
        "none valid": not valid.any(),
        "duplicates": len(found.unique()) <= 3,
        "mixed rows": set(counts.tolist()) == {0, drawn.columns},
    }
    assert expected[pattern]


@pytest.fixture
def on_this_machine(emulated, monkeypatch):
    """The launches run in the emulator."""
    monkeypatch.setattr(cases, "gpu", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kernels = {}

    def load(case):
        key = (case.q.shape[1], case.kv_dtype)
        if key not in kernels:
            kernels[key] = emulated(*key)
        return kernels[key]

    monkeypatch.setattr(cases, "load", load)


def small(count):
    """Of each pattern the first `count` draws that the emulator makes in a moment."""
    fitting = [d for d in DRAWS if d.tokens <= 8 and d.rows < 5000 and d.tokens * -(-d.heads // 8) * d.columns < 4000]
    return [d for pattern in PATTERNS for d in [d for d in fitting if d.pattern == pattern][:count]]


def test_launches_that_are_small_enough_for_the_emulator(on_this_machine):
    pool = Pool.make(CPU, 1)
    for drawn in small(2):
        launch(drawn, pool, 1)


def test_what_splits_leave_may_be_rounded_and_nothing_else(on_this_machine):
    """Two tokens off by more than weights and output explain: of a call of two launches, the first must not be."""
    case = cases.Case(
        torch.randn(2, 8, 512).bfloat16(), torch.randn(90, 512).bfloat16(), torch.randint(90, (2, 80)), None
    )
    expected, spread, lse = random_launches.reference(case)
    weights = random_launches.WEIGHT_ROUNDING["bf16"] + random_launches.FP32
    summed = (weights + 0.9 * random_launches.PARTIAL_ROUNDING) * spread
    out = expected + summed + random_launches.OUT_ROUNDING * (expected.abs() + summed)
    random_launches.check(case, out, lse, many_rows=False, split_from=0)
    for split_from in (1, 2):
        with pytest.raises(AssertionError, match="more than rounding explains"):
            random_launches.check(case, out, lse, many_rows=False, split_from=split_from)


def test_a_gpu_case_of_few_tokens_is_checked_by_the_usual_variant_too(on_this_machine, monkeypatch):
    case, call, asked = cases.make_case(2, 8, "fp8", 100, valid=60, rows=300), cases.call, []

    def noted(case, splits, variant):
        asked.append(variant and variant.few)
        return call(case, splits, variant)

    monkeypatch.setattr(cases, "call", noted)
    cases.run_and_check(case)
    assert asked == [None, False]

    def broken(case, splits, variant):
        out, lse = call(case, splits, variant)
        return (out * 1.1 if variant else out), lse

    monkeypatch.setattr(cases, "call", broken)
    with pytest.raises(AssertionError, match="relative error"):
        cases.run_and_check(case)


def test_a_wrong_result_is_counted_and_the_report_is_kept(on_this_machine, monkeypatch):
    first = small(1)
    monkeypatch.setattr(random_launches, "draw", lambda seed, number: first[number])
    kept = {}
    monkeypatch.setattr(random_launches.measurement, "keep", lambda name, document: kept.update({name: document}))
    call = cases.call

    def broken(case, splits):
        out, lse = call(case, splits)
        return (out * 1.1 if case.q.shape[0] == first[1].tokens else out), lse

    monkeypatch.setattr(cases, "call", broken)
    report = random_launches.run(3, 600.0, 1)
    assert report["launches"] == 3 and report["failed"] >= 1
    assert any(failure.startswith("launch 1: ") for failure in report["failures"])
    assert json.loads(json.dumps(kept["random-launches"]))["wanted"] == 3


def test_time_that_is_up_is_said(on_this_machine, monkeypatch):
    monkeypatch.setattr(random_launches.measurement, "keep", lambda name, document: None)
    assert random_launches.run(5, -1.0, 1)["launches"] == 0
