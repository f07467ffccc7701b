"""The rules for single scales, on tensors alone."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlay.nvfp4 import scales

NAN = math.nan
TINY = torch.finfo(torch.float32).tiny


@pytest.mark.parametrize(
    ("value", "good"),
    [
        (5.58e-4, True),
        (3.72e-2, True),
        (TINY, True),
        (1e4, True),
        (NAN, False),
        (math.inf, False),
        (-math.inf, False),
        (0.0, False),
        (-0.01, False),
        (1e-42, False),
        (1.0001e4, False),
        (1e30, False),
    ],
)
def test_usable(value, good):
    assert scales.usable(torch.tensor([value])).tolist() == [good]


@pytest.mark.parametrize(
    ("stored", "good"),
    [
        (632.0, True),
        (27.0, True),
        (1e6, True),
        (9.9e-5, False),
        (0.0, False),
        (math.inf, False),
        (NAN, False),
        (-5.0, False),
    ],
)
def test_usable_reciprocals(stored, good):
    """The rule is about the factor: a reciprocal of 1e6 is the factor 1e-6, one below 1e-4 a factor above 1e4."""
    assert scales.usable(torch.tensor([stored]), reciprocal=True).tolist() == [good]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine it is, and proves nothing
@given(st.lists(st.floats(width=32) | st.floats(2**-12, 2**-4, width=32), min_size=1, max_size=20))
def test_reading_and_repair(values):
    stored = torch.tensor(values, dtype=torch.float32)
    reading = scales.read_input_scales(stored)
    good = [v for v in stored.tolist() if TINY <= v <= 1e4]
    assert len(reading.bad) == len(values) - len(good)
    assert reading.all_bad == (not good)
    assert reading.clean == (len(good) == len(values))
    if good:
        expected = [v if TINY <= v <= 1e4 else max(good) for v in stored.tolist()]
        assert reading.repaired().tolist() == expected


def test_reciprocals_are_repaired_by_the_minimum():
    reading = scales.read_input_scales(torch.tensor([100.0, 25.0, 0.0, NAN]), reciprocal=True)
    assert reading.bad == (2, 3)
    assert reading.repaired().tolist() == [100.0, 25.0, 25.0, 25.0]
    assert reading.filled(0.01).tolist() == [100.0, 25.0, pytest.approx(100.0), pytest.approx(100.0)]


def test_one_half_of_a_pair_serves_both():
    reading = scales.read_input_scales(torch.tensor([[0.01, 0.02], [NAN, 0.03], [0.04, 0.0], [NAN, 1e30]]))
    assert (reading.bad, reading.one_sided) == ((3,), (1, 2))
    assert torch.equal(reading.repaired(), torch.tensor([[0.01, 0.02], [0.03, 0.03], [0.04, 0.04], [0.04, 0.04]]))


def test_rows_of_other_ranks():
    local = torch.tensor([True, True, False, False])
    reading = scales.read_input_scales(torch.tensor([0.01, 0.02, NAN, 1e30]), local=local)
    assert (reading.bad, reading.elsewhere) == ((3,), (2,))
    assert reading.repaired().tolist() == pytest.approx([0.01, 0.02, 0.02, 0.02])
    assert scales.read_input_scales(torch.tensor([NAN, NAN, NAN, NAN]), local=local).all_bad
    assert not scales.read_input_scales(torch.tensor([NAN, NAN, 0.01, NAN]), local=local).all_bad


def test_nothing_of_a_clean_reading_changes():
    stored = torch.tensor([[0.01, 0.02], [0.03, 0.04]])
    reading = scales.read_input_scales(stored)
    assert reading.clean
    assert torch.equal(reading.completed, stored)


def test_gates_for_both():
    assert torch.equal(
        scales.gates_for_both(torch.tensor([[0.1, NAN], [0.2, NAN]])), torch.tensor([[0.1, 0.1], [0.2, 0.2]])
    )
    for other in (
        [[NAN, 0.1], [NAN, 0.2]],  # up's alone
        [[0.1, NAN], [0.2, 0.2]],  # a scale is missing
        [[0.1, NAN], [NAN, 0.2]],
        [[0.1, NAN], [NAN, NAN]],
        [[0.1, 0.1]],
        [[NAN, NAN]],
        [[0.1], [NAN]],
    ):
        assert scales.gates_for_both(torch.tensor(other)) is None


def test_weight_scales():
    assert scales.unusable_weight_scales(torch.tensor([[0.02, NAN], [0.0, 0.02], [math.inf, 0.02], [-1.0, 0.02]])) == (
        0,
        2,
        3,
    )
    # a reciprocal of infinity is the scale 0 of an all-zero projection
    assert scales.unusable_weight_scales(torch.tensor([50.0, 0.0, NAN, math.inf]), reciprocal=True) == (1, 2)


def e4m3(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("chunk", [1, scales.CHUNK])
def test_unloaded_blocks(monkeypatch, chunk):
    monkeypatch.setattr(scales, "CHUNK", chunk)
    blocks = e4m3([[[1.0, 2.0]], [[NAN, NAN]], [[448.0, NAN]], [[-NAN, 3.0]], [[0.0, 0.0]]])
    assert scales.unloaded_blocks(blocks) == ((1,), (2, 3))
    scales.zero_unloaded_blocks(blocks)
    assert blocks.float().tolist() == [[[1.0, 2.0]], [[0.0, 0.0]], [[448.0, 0.0]], [[0.0, 3.0]], [[0.0, 0.0]]]


def test_margin():
    """Gate and up of 3 rows each and 48 columns, loaded into 4 rows and 80 columns; without padding there is none."""
    assert scales.margin((8, 5), 2, 4, 80) is None
    assert scales.margin((8, 5), 2, None, None) is None
    mask = scales.margin((8, 5), 2, 3, 48)
    half = [[0, 0, 0, 1, 1]] * 3 + [[1] * 5]
    assert mask.int().tolist() == half + half


def test_unloaded_blocks_within_a_margin():
    mask = scales.margin((2, 2), 1, 2, 16)
    blocks = e4m3([[[1.0, NAN], [1.0, NAN]], [[NAN, NAN], [1.0, NAN]], [[NAN, 1.0], [NAN, NAN]]])
    assert scales.unloaded_blocks(blocks, mask) == ((2,), (1,))
    assert scales.unloaded_blocks(blocks) == ((), (0, 1, 2))


@pytest.mark.parametrize("reciprocal", [False, True])
def test_reconcile(reciprocal):
    """The product of block and global scale stays, but for e4m3's rounding; the larger global scale wins."""
    random = torch.Generator().manual_seed(1)
    factors = torch.tensor([[0.02, 0.02], [0.02, 0.021], [0.01, 0.07], [0.05, 0.01], [0.0, 0.02]])
    stored = 1 / factors if reciprocal else factors.clone()
    blocks = (torch.rand(5, 6, 4, generator=random) * 400 + 40).to(torch.float8_e4m3fn)
    before, untouched = blocks.clone(), blocks.view(torch.uint8).clone()
    assert scales.reconcile(stored, blocks, (2, 4), reciprocal) == (2, 3, 4)
    after = 1 / stored if reciprocal else stored
    torch.testing.assert_close(after, torch.tensor([[0.02, 0.02], [0.02, 0.021], [0.07] * 2, [0.05] * 2, [0.02] * 2]))
    for row in (0, 1):
        assert torch.equal(blocks.view(torch.uint8)[row], untouched[row])
    for row in (2, 3):
        wanted = before[row].double() * torch.cat([factors[row, :1].expand(2), factors[row, 1:].expand(4)])[:, None]
        found = blocks[row].double() * after[row, 0].double()
        assert ((found - wanted).abs() <= wanted / 16).all()  # half a step of a three-bit mantissa
        kept = slice(2, 6) if row == 2 else slice(0, 2)
        assert torch.equal(blocks.view(torch.uint8)[row, kept], untouched[row, kept])
    assert (blocks[4, :2].float() == 0).all()


def test_reconcile_does_not_overflow():
    blocks = torch.full((1, 2, 1), 448.0).to(torch.float8_e4m3fn)
    scales.reconcile(torch.tensor([[0.1, 0.9]]), blocks, (1, 1))
    assert blocks.float().flatten().tolist() == [48.0, 448.0]
