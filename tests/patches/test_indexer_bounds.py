"""indexer_bounds against vLLM's real expansion kernel and the real indexer function, for prefill and decode."""

import pytest
import torch

from tests.patches.scenarios.indexer_bounds import GARBAGE, POOL, STALE, TOPK, written_ids

LENGTHS = [2050, 4097, 9003]


@pytest.fixture
def answers(answer):
    return answer("indexer_bounds")


def reference(pool_ids: list[int], seq_len: int) -> list[int]:
    """Row of token indices by the definition: whole pools that exist, and the incomplete last pool."""
    row = []
    for pool in pool_ids:
        exists = 0 <= pool < seq_len // POOL
        row += [pool * POOL + i if exists else -1 for i in range(POOL)]
    tail = list(range(seq_len // POOL * POOL, seq_len))
    return row + tail + [-1] * (POOL - 1 - len(tail))


def valid(row: list[int]) -> list[int]:
    return sorted(token for token in row if token >= 0)


def test_the_known_case(answers):
    assert [valid(row) for row in answers["wrapped"]["case"]] == [
        [0, 1, 2, 3, 8, 9, 10, 11, 12],
        [0, 1, 2, 3, 8],
    ]
    assert {4000000, 4000003} <= set(answers["stock"]["case"][0])
    assert {20, 23, 8589932} <= set(answers["stock"]["case"][1])


def test_many_rows_against_the_definition(answers):
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(0, 9000, (12,), generator=generator, dtype=torch.int32)
    lengths[:6] = torch.arange(6)
    ids = torch.randint(-1000, 4000, (12, TOPK // POOL), generator=generator)
    expected = [reference(row, length) for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    assert answers["wrapped"]["random"] == expected
    assert answers["stock"]["random"] != expected


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_the_top_k_does_not_write_selects_nothing(answers, phase):
    for length, row in zip(LENGTHS, answers["wrapped"][phase], strict=True):
        assert valid(row) == valid(reference(written_ids(length // POOL), length))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_stock_lets_garbage_and_stale_pools_in(answers, phase):
    for row in answers["stock"][phase]:
        assert row.count(GARBAGE * POOL) > 1
        assert row.count(STALE * POOL) > 1


def test_taking_the_patch_away_and_putting_it_back_changes_nothing_else(answers):
    assert answers["again"] == answers["wrapped"]["case"]
