"""Variants, split counts and workspace: pure functions of shapes and of the number of multiprocessors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.kernel.plan import MAX_WAVES, choose_splits, plan, split_columns, workspace_bytes
from overlay.kernel.variants import MAX_COLUMNS, MAX_SPLITS, VARIANTS, variant_for

variants = st.sampled_from(VARIANTS)
sm_counts = st.sampled_from([20, 48, 132, 170, 188])
columns = st.integers(0, MAX_COLUMNS)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [(1, 8), (4, 8), (8, 8), (9, 16), (12, 16), (16, 16), (24, 32), (33, 64), (64, 64), (65, 64), (128, 64)],
)
def test_heads_are_padded_to_the_next_variant(heads, expected):
    for kv_dtype in ("bf16", "fp8"):
        variant = variant_for(heads, kv_dtype)
        assert (variant.heads, variant.kv_dtype) == (expected, kv_dtype)
        blocks = plan(variant, heads, 1, 64, 132).head_blocks
        assert (blocks - 1) * variant.heads < heads <= blocks * variant.heads


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "message"), [(0, "bf16", "0 heads"), (-3, "fp8", "heads"), (8, "fp16", "fp16")]
)
def test_other_heads_and_types_are_refused(heads, kv_dtype, message):
    with pytest.raises(ValueError, match=message):
        variant_for(heads, kv_dtype)


@given(columns, st.integers(1, MAX_SPLITS))
def test_splits_cover_every_column_once(columns, splits):
    width = split_columns(columns, splits)
    assert width % 32 == 0
    assert width * splits >= columns
    assert width < columns / splits + 32


@given(variants, st.integers(0, 100_000), columns, sm_counts)
def test_chosen_splits_are_possible_and_bounded(variant, tokens, columns, sm_count):
    splits = choose_splits(variant, tokens, columns, sm_count)
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or tokens * splits <= MAX_WAVES * sm_count * variant.blocks
    assert splits == 1 or split_columns(columns, splits) >= 64


@given(variants, st.integers(1, 3000), st.integers(1, 3000), columns, sm_counts)
def test_workspace_is_enough_for_every_smaller_call(variant, tokens, fewer, columns, sm_count):
    heads = variant.heads + 3
    tokens, fewer = max(tokens, fewer), min(tokens, fewer)
    needed = plan(variant, heads, fewer, columns, sm_count).partial_bytes(variant, fewer)
    assert needed <= workspace_bytes(variant, heads, tokens, columns, sm_count)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_best_measured_split_counts(heads):
    """H200, 132 multiprocessors, 2048 columns, two blocks each: medians of graph replays."""
    variant = variant_for(heads, "bf16")
    assert [choose_splits(variant, tokens, 2048, 132) for tokens in (1, 8, 64, 128, 4096)] == [32, 16, 4, 2, 1]


def test_best_measured_split_counts_of_64_heads():
    variant = variant_for(64, "bf16")
    assert [choose_splits(variant, tokens, 2048, 132) for tokens in (1, 8, 64, 128, 4096)] == [32, 16, 2, 1, 1]


def test_a_forced_split_count_is_taken_or_refused():
    variant = variant_for(16, "bf16")
    assert plan(variant, 16, 4096, 2176, 132, splits=7).splits == 7
    for splits in (0, 33, -1):
        with pytest.raises(ValueError, match="1 to 32"):
            plan(variant, 16, 4, 2176, 132, splits=splits)


def test_no_workspace_without_splits():
    variant = variant_for(16, "bf16")
    assert plan(variant, 16, 4096, 2176, 132).partial_bytes(variant, 4096) == 0
    assert workspace_bytes(variant, 16, 0, 2176, 132) == 0


def test_partial_bytes_hold_fp32_outputs_and_two_sums():
    variant = variant_for(64, "bf16")
    cut = plan(variant, 96, 3, 2176, 132, splits=4)
    assert cut.head_blocks == 2
    assert cut.output_bytes(variant, 3) == 3 * 4 * 128 * 512 * 4
    assert cut.partial_bytes(variant, 3) - cut.output_bytes(variant, 3) == 3 * 4 * 128 * 2 * 4
