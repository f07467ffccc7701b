"""The batches of `probe attention` against definitions written out token by token, and what its judgement sees."""

import dataclasses

import pytest
import torch

from overlay.kernel.reference import sparse_mla_reference
from overlay.probe import batches

LIMITS = (0.9999, 0.01)
HEADS = 2


@pytest.fixture(scope="module")
def batch():
    return batches.make(64, "as selected", HEADS)


def test_sizes_include_those_that_were_answered_with_nan():
    assert {1, 64, 128, 256, 4096} <= set(batches.SIZES)


def test_every_row_selects_what_the_indexer_would(batch):
    for length, row in zip(batch.lengths.tolist(), batch.index_rows.tolist(), strict=True):
        valid = [index for index in row if index >= 0]
        assert len(set(valid)) == len(valid) and all(index < length for index in valid)
        if length <= 2048:
            assert row == [*range(length), *[-1] * (2176 - length)]
            continue
        pools = [row[i : i + 4] for i in range(0, 2048, 4)]
        assert all(pool == list(range(pool[0], pool[0] + 4)) and pool[0] % 4 == 0 for pool in pools)
        tail = length % 4
        assert row[2048:] == [*range(length - tail, length), *[-1] * (128 - tail)]


def test_the_lengths_have_both_sides_of_every_edge(batch):
    assert {1, 2047, 2048, 2049, 2050, 2051, 2052} <= set(batch.lengths.tolist())
    assert batch.lengths.max() <= batches.LONGEST <= batch.block_table.shape[1] * batches.BLOCK


def test_kinds():
    masked, empty = (batches.make(64, kind, HEADS).index_rows for kind in ("masked", "empty"))
    share = (masked[0, :2048] < 0).float().mean()
    assert 0.25 < share < 0.35
    assert (empty[::3] == -1).all() and (empty[1::3] >= 0).any(1).all()
    assert (batches.make(1, "empty", HEADS).index_rows == -1).all()


def test_rows_follow_the_block_table(batch):
    token, column = 9, 700
    position = int(batch.index_rows[token, column])
    block = int(batch.block_table[token, position // batches.BLOCK])
    assert batch.rows[token, column] == block * batches.BLOCK + position % batches.BLOCK
    assert ((batch.rows >= 0) == (batch.index_rows >= 0)).all()
    assert batch.rows.max() < batches.BLOCKS * batches.BLOCK and batch.block_table.min() > 0


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.0), ("fp8", 0.07)])
def test_stored_rows(dtype, error):
    rows = batches.latents()[:100]
    found = (batches.stored(rows, dtype) - rows.float()).abs()
    assert (found <= error * rows.float().abs() + 0.01 * (error > 0)).all()
    assert (found > 0).any() == (error > 0)


def packed(factor: float) -> torch.Tensor:
    """fp8_ds_mla rows of the latents by the definition, their scales `factor` times what uses the range of fp8."""
    groups = batches.latents()[:50].float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(-1) / 448 * factor
    rows = torch.full((50, 656), 255, dtype=torch.uint8)
    rows[:, :512] = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(1).view(torch.uint8)
    rows[:, 512:528] = scales.view(torch.uint8)
    return rows


@pytest.mark.parametrize("factor", [1.0, 1.7, 16.0])
def test_packed_rows_are_read_whatever_scales_their_writer_chose(factor):
    rows = packed(factor)
    found = batches.unpacked(rows)
    assert torch.allclose(found, batches.latents()[:50].float(), rtol=0.07, atol=0.02)


def test_packed_rows_with_other_scales_than_their_codes_are_refused():
    rows = packed(1.0)
    rows[:, 512:528] = rows[:, 512:528].view(torch.float32).mul(2).view(torch.uint8)
    with pytest.raises(ValueError, match="off by 1"):
        batches.unpacked(rows)


def test_unknown_rows_are_refused():
    with pytest.raises(ValueError, match="nvfp4_ds_mla"):
        batches.stored(batches.latents()[:1], "nvfp4_ds_mla")


@pytest.fixture(scope="module")
def answer():
    batch = batches.make(12, "empty", HEADS)
    rows = batches.stored(batches.latents(), "bfloat16")
    return batch, rows, sparse_mla_reference(batch.queries, rows, batch.rows, batches.SCALE)[0]


def test_the_reference_itself_passes(answer):
    _, _, wanted = answer
    found = batches.compare(wanted.bfloat16(), wanted)
    assert found.fault(LIMITS) == "" and found.leftover == 0 and found.broken == 0


def changed(answer, change):
    _, _, wanted = answer
    found = wanted.clone()
    change(found)
    return batches.compare(found, wanted).fault(LIMITS)


def test_one_head_of_one_token_decides(answer):
    def scale(found):
        found[4, 1] *= 1.02

    def turn(found):
        found[4, 1] = found[4, 1].roll(1)

    def nan(found):
        found[4, 1, 7] = torch.nan

    def left(found):
        found[3, 0, 0] = 1e-3

    def zero(found):
        found[4, 1] = 0

    assert changed(answer, scale) == "magnitude"
    assert changed(answer, turn) == "direction"
    assert changed(answer, nan) == "1 tokens with NaN or infinity"
    assert changed(answer, left) == "a token without rows gives 0.001, not 0"
    assert changed(answer, zero) == "direction"


def test_what_a_wrong_kernel_would_do_is_seen(answer):
    """The newest tokens cut off at 2048 columns; the scale of fp8 rows forgotten; blocks taken as adjacent."""
    batch, rows, wanted = answer

    def fault(indices, kv_rows, k_scale=1.0):
        found, _ = sparse_mla_reference(batch.queries, kv_rows, indices, batches.SCALE, k_scale)
        return batches.compare(found, wanted).fault((0.99999, 0.01))

    assert fault(batch.rows, rows) == ""
    assert fault(batch.rows[:, :2048], rows) == "direction"
    assert fault(batch.rows, rows, batches.K_SCALE) != ""
    misplaced = dataclasses.replace(batch, block_table=batch.block_table.roll(1, 1))
    assert fault(misplaced.rows, rows) == "direction"
