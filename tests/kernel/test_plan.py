"""Variants, split counts and workspace: pure functions of shapes and of the number of multiprocessors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.kernel.plan import (
    MAX_WAVES,
    MERGE_IN_FLIGHT,
    MODEL,
    UNITS,
    WORTH_CUTTING,
    microseconds,
    parts,
    plan,
    split_columns,
    workspace_bytes,
)
from overlay.kernel.variants import MAX_COLUMNS, MAX_SPLITS, MERGE_WARPS, VARIANTS, variants_for

head_counts = st.sampled_from([1, 8, 12, 16, 24, 32, 64, 128])
kv_dtypes = st.sampled_from(["bf16", "fp8"])
sm_counts = st.sampled_from([20, 48, 132, 170, 188])
columns = st.integers(0, MAX_COLUMNS)


@pytest.mark.parametrize(
    ("heads", "widest"), [(1, 8), (4, 8), (8, 8), (9, 16), (12, 16), (16, 16), (24, 32), (33, 64), (64, 64), (128, 64)]
)
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_variants_that_serve_a_head_count(heads, widest, kv_dtype):
    serving = variants_for(heads, kv_dtype)
    widest = min(widest, 64 if kv_dtype == "bf16" else 32)
    assert serving[0].heads == widest and not serving[0].deep and not serving[0].few
    widths = {width for width in (8, 16, 32, 64) if widest // 4 <= width <= widest}
    assert {variant.heads for variant in serving} == widths
    assert {variant.heads for variant in serving if variant.few} == widths & {8, 16}
    assert all(variant.kv_dtype == kv_dtype for variant in serving)
    # Where several blocks share a token there are blocks enough: nobody needs more rows in flight.
    assert all(variant.heads == widest for variant in serving if variant.deep)
    for variant in serving:
        cut = plan(heads, kv_dtype, 7, 64, 132, splits=2, variant=variant)
        blocks = cut.head_blocks // variant.groups
        assert cut.grid(7) == ((7, 2, blocks) if variant.few else (7 * blocks, 2, 1))
        assert blocks * variant.groups == cut.head_blocks
        assert (blocks - 1) * variant.heads < heads <= blocks * variant.heads


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "message"), [(0, "bf16", "0 heads"), (-3, "fp8", "heads"), (8, "fp16", "fp16")]
)
def test_other_heads_and_types_are_refused(heads, kv_dtype, message):
    with pytest.raises(ValueError, match=message):
        variants_for(heads, kv_dtype)


def test_every_variant_has_its_cost():
    assert list(MODEL.blocks) == [variant.name for variant in VARIANTS]


@given(columns, st.integers(1, MAX_SPLITS))
def test_splits_cover_every_column_once(columns, splits):
    width = split_columns(columns, splits)
    assert width % 32 == 0
    assert width * splits >= columns
    assert width < columns / splits + 32


@given(head_counts, kv_dtypes, st.integers(1, 100_000), columns, sm_counts)
def test_a_plan_is_possible_and_bounded(heads, kv_dtype, tokens, columns, sm_count):
    cut = plan(heads, kv_dtype, tokens, columns, sm_count)
    assert cut.variant in variants_for(heads, kv_dtype)
    assert 1 <= cut.splits <= MAX_SPLITS
    if cut.splits > 1:
        assert math.prod(cut.grid(tokens)) <= MAX_WAVES * sm_count * cut.variant.blocks
        assert cut.split_columns >= (32 if cut.variant.few else 64)
        assert (cut.splits - 1) * cut.split_columns < columns, "a split without columns"
    tiles, groups = cut.merge_grid(tokens)
    assert groups * cut.merge_warps * cut.units == UNITS * cut.sharers and cut.merge_warps in MERGE_WARPS
    assert cut.sharers in (1, 2, 4, 8) and cut.units in (1, 2, 4) and 1 in (cut.sharers, cut.units)
    assert cut.units == 1 or cut.units * cut.splits <= MERGE_IN_FLIGHT
    assert tiles * 8 == tokens * cut.head_blocks * cut.variant.group_heads


@given(st.integers(1, 1000), st.integers(1, 100_000), st.integers(1, MAX_SPLITS), head_counts)
def test_a_warp_of_the_merge_has_as_many_splits_as_it_holds_weights(sm_count, tokens, splits, heads):
    """32, kMostSplits in cuda/merge.cu; several units have at most as many in flight."""
    cut = plan(heads, "bf16", tokens, 8192, sm_count, splits=splits)
    assert -(-splits // cut.sharers) <= (32 if cut.units == 1 else MERGE_IN_FLIGHT // cut.units)
    assert splits <= 32 or cut.sharers == 8


@given(head_counts, kv_dtypes, st.integers(1, 3000), st.integers(1, 3000), columns, sm_counts)
def test_workspace_is_enough_for_every_smaller_call(heads, kv_dtype, tokens, fewer, columns, sm_count):
    tokens, fewer = max(tokens, fewer), min(tokens, fewer)
    needed = plan(heads, kv_dtype, fewer, columns, sm_count).partial_bytes(fewer)
    assert needed <= workspace_bytes(heads, kv_dtype, tokens, columns, sm_count)


def modelled(part, heads, columns, sm_count):
    return microseconds(MODEL, part.plan.variant, part.plan.splits, heads, part.tokens, columns, sm_count)


@given(head_counts, kv_dtypes, st.integers(1, 6000), columns, sm_counts)
def test_a_call_is_one_launch_or_what_fills_the_gpu_and_the_rest(heads, kv_dtype, tokens, columns, sm_count):
    launches = parts(heads, kv_dtype, tokens, columns, sm_count)
    whole = plan(heads, kv_dtype, tokens, columns, sm_count)
    if len(launches) == 1:
        assert launches == ((0, tokens, whole),)
        return
    full, rest = launches
    assert (full.first, full.tokens + rest.tokens, rest.first) == (0, tokens, full.tokens)
    assert full.plan.splits == 1 and rest.plan == plan(heads, kv_dtype, rest.tokens, columns, sm_count)
    at_once = sm_count * full.plan.variant.blocks * full.plan.variant.groups // full.plan.head_blocks
    assert full.tokens % at_once == 0 and 0 < rest.tokens < at_once
    times = [modelled(part, heads, columns, sm_count) for part in launches]
    alone = microseconds(MODEL, whole.variant, whole.splits, heads, tokens, columns, sm_count)
    assert sum(times) + MODEL.launch < (1 - WORTH_CUTTING) * alone
    needed = max(part.plan.partial_bytes(part.tokens) for part in launches)
    assert needed <= workspace_bytes(heads, kv_dtype, tokens, columns, sm_count)


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "tokens", "expected"),
    [
        (8, "bf16", 272, [(264, 8, 1), (8, 8, 16)]),
        (16, "bf16", 272, [(264, 16, 1), (8, 16, 16)]),
        (32, "fp8", 272, [(264, 32, 1), (8, 16, 8)]),
        (64, "bf16", 140, [(132, 64, 1), (8, 32, 16)]),
        (64, "bf16", 172, [(132, 64, 1), (40, 32, 3)]),
        (64, "bf16", 132, [(132, 64, 1)]),
        (64, "bf16", 4096, [(4096, 64, 1)]),
        (32, "bf16", 1024, [(1024, 32, 1)]),
    ],
)
def test_calls_of_two_launches(heads, kv_dtype, tokens, expected):
    """H200: 9 to 28 % faster than one launch just beyond what fits at once; nothing after many turns."""
    launches = parts(heads, kv_dtype, tokens, 2048, 132)
    assert [(part.tokens, part.plan.variant.heads, part.plan.splits) for part in launches] == expected


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "expected"),
    [
        (8, "bf16", [(8, 64), (8, 16), (8, 2), (8, 1), (8, 1)]),
        (16, "bf16", [(8, 64), (16, 16), (16, 4), (16, 1), (16, 1)]),
        (32, "bf16", [(8, 32), (32, 16), (32, 4), (32, 2), (32, 1)]),
        (64, "bf16", [(16, 32), (32, 16), (32, 2), (64, 1), (64, 1)]),
        (8, "fp8", [(8, 32), (8, 16), (8, 4), (8, 2), (8, 1)]),
        (16, "fp8", [(8, 32), (16, 16), (16, 4), (16, 2), (16, 1)]),
        (32, "fp8", [(8, 32), (16, 8), (32, 4), (32, 2), (32, 1)]),
        (64, "fp8", [(16, 32), (16, 8), (32, 2), (32, 1), (32, 1)]),
    ],
)
def test_best_measured_launches(heads, kv_dtype, expected):
    """H200, 132 multiprocessors, 2048 columns: what was fastest, or within 2.5 % of it, in medians of graph replays."""
    cuts = [plan(heads, kv_dtype, tokens, 2048, 132) for tokens in (1, 8, 64, 128, 4096)]
    assert [(cut.variant.heads, cut.splits) for cut in cuts] == expected


def test_few_tokens_take_their_own_variant_and_few_blocks_the_one_with_more_rows_in_flight():
    chosen = [plan(16, "bf16", tokens, 2048, 132).variant for tokens in (1, 8, 16, 32, 128, 256)]
    assert [variant.few for variant in chosen] == [True, True, True, False, False, False]
    assert [variant.deep for variant in chosen] == [False, False, False, True, True, False]


def test_a_forced_plan_is_taken_or_refused():
    narrow, wide = variants_for(8, "bf16")[-1], variants_for(32, "bf16")[0]
    assert narrow.few
    assert plan(16, "bf16", 4096, 2176, 132, splits=7).splits == 7
    assert plan(32, "bf16", 4096, 2176, 132, variant=narrow).head_blocks == 4
    assert plan(16, "bf16", 4096, 2176, 132, splits=72).sharers == 8
    for splits in (0, 73, -1):
        with pytest.raises(ValueError, match="1 to 72"):
            plan(16, "bf16", 4, 2176, 132, splits=splits)
    for heads, kv_dtype in ((16, "bf16"), (32, "fp8")):
        with pytest.raises(ValueError, match="sparse_mla_h32_bf16 does not serve"):
            plan(heads, kv_dtype, 4, 2176, 132, variant=wide)


def test_no_workspace_without_splits():
    assert plan(16, "bf16", 4096, 2176, 132).partial_bytes(4096) == 0
    assert workspace_bytes(16, "bf16", 0, 2176, 132) == 0


def test_partial_bytes_hold_f16_outputs_two_sums_and_a_factor_for_each_quarter():
    wide, grouped = (variant for heads in (32, 64) for variant in variants_for(heads, "bf16")[:1])
    for variant, heads, head_blocks in ((wide, 96, 3), (grouped, 128, 4)):
        cut = plan(96, "bf16", 3, 2176, 132, splits=4, variant=variant)
        assert cut.head_blocks == head_blocks
        assert cut.output_bytes(3) == 3 * 4 * heads * 512 * 2
        assert cut.partial_bytes(3) - cut.output_bytes(3) == 3 * 4 * (heads * 2 + head_blocks * 4) * 4
