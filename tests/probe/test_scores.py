"""The cases of `probe indexer`, and that its judgement sees what a top-k can do wrong."""

import pytest
import torch

from overlay.probe import scores

CASES = {case.name: case for case in scores.cases(33)}


def right(case):
    """By Python, row by row; NaN rows take their first ids."""
    chosen = torch.full((33, scores.K), -1, dtype=torch.int32)
    for row, (values, length) in enumerate(zip(case.scores.tolist(), case.lengths.tolist(), strict=True)):
        order = sorted(range(length), key=lambda i, values=values: -values[i] if values[i] == values[i] else 0.0)
        ids = order[: scores.K]
        chosen[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return chosen


@pytest.mark.parametrize("name", CASES)
def test_a_right_selection_passes(name):
    assert scores.wrong(CASES[name], right(CASES[name])) == 0


def test_the_cases_are_those_that_were_met():
    lengths = {name: case.lengths for name, case in CASES.items()}
    assert (lengths["16,384 values in one bin"] == 16_384).all()
    assert (lengths["16,385 values in one bin"] == 16_385).all()
    assert {0, 1, 511, 512} <= set(lengths["short rows"].tolist())
    crowded = CASES["16,385 values in one bin"].scores[:, :16_385]
    assert all(len(row.unique()) == 16_385 for row in crowded)
    # One bin: equal in sign, exponent and the first six bits of the mantissa, in fp32 and so in fp16.
    assert len((crowded.view(torch.int32) >> 17).unique()) == 1
    assert CASES["NaN rows"].unclear.sum() == 14 and not CASES["short rows"].unclear.any()


def edited(name, edit):
    case = CASES[name]
    chosen = right(case)
    edit(chosen)
    return scores.wrong(case, chosen)


def test_one_wrong_entry_is_seen():
    def dropped(chosen):
        chosen[7, 100] = -1

    def repeated(chosen):
        chosen[7, 100] = chosen[7, 101]

    def too_far(chosen):
        chosen[7, 100] = 16_385

    def garbage(chosen):
        chosen[7, 100] = -5

    def worse(chosen):
        case = CASES["16,385 values in one bin"]
        chosen[7, 100] = case.scores[7, :16_385].argmin()

    for edit in (dropped, repeated, too_far, garbage, worse):
        assert edited("16,385 values in one bin", edit) > 0


def test_short_rows_are_filled_with_nothing_but_minus_one():
    def zeros_after(chosen):
        chosen[1, 1:] = 0  # of length 1

    assert edited("short rows", zeros_after) > 0


def test_rows_with_nan_owe_ids_in_range_and_no_order():
    def others(chosen):
        chosen[0] = torch.arange(scores.K) + 1000
        chosen[5, 10:] = -1

    def out_of_range(chosen):
        chosen[0, 3] = 20_000

    def repeated(chosen):
        chosen[0] = 3

    assert edited("NaN rows", others) == 0
    assert edited("NaN rows", out_of_range) > 0 and edited("NaN rows", repeated) > 0


def test_expansion_by_hand():
    ids = torch.tensor([[0, 2, 1_000_000, -1], [5, -7, 0, 2**40]])
    found = scores.expanded(ids, torch.tensor([13, 9]))
    none = [-1] * 4
    assert found.tolist() == [
        [0, 1, 2, 3, 8, 9, 10, 11, *none, *none, 12, -1, -1],
        [*none, *none, 0, 1, 2, 3, *none, 8, -1, -1],
    ]
