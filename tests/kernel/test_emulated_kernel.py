"""The kernel's source, run on the CPU, against the fp64 reference.

The emulator runs warps in two orders and lets asynchronous copies land at the earliest and at the latest moment that
the source allows. A missing barrier between warps, or wait, shows as a wrong result in one of the four combinations
(test_emulated_faults.py).
"""

import itertools
from dataclasses import replace

import pytest
import torch

from overlay.kernel.launch import IndexRows
from overlay.kernel.reference import sparse_mla_reference
from overlay.kernel.variants import MAX_SPLITS, VARIANTS, variants_for
from tests.kernel import emulation
from tests.kernel.emulated_cases import SCHEDULES, Case, error_of, make_case, poisoned, run
from tests.kernel.index_reference import index_rows_reference


def each_variant(wanted=lambda variant: True):
    chosen = [variant for variant in VARIANTS if wanted(variant)]
    return pytest.mark.parametrize("variant", chosen, ids=lambda variant: variant.name)


every_variant = each_variant()


@pytest.mark.parametrize(("backwards", "late"), SCHEDULES)
@pytest.mark.parametrize("columns", [193, 256, 257])  # up to 256 listed at once
@every_variant
def test_against_the_reference(emulated, variant, columns, backwards, late):
    case = make_case(2, variant.heads, variant.kv_dtype, columns)
    case.indices[1, :150] = -1
    kernel = emulated(variant.heads, variant.kv_dtype, reversed=backwards, late=late)
    out, lse = run(kernel, case, variant=variant)
    assert error_of(case, out, lse) <= 3e-3


@pytest.mark.parametrize("columns", [1, 33, 256, 257, 300])
@every_variant
def test_nothing_depends_on_what_shared_memory_held(emulated, library, variant, columns):
    case = make_case(1, variant.heads, variant.kv_dtype, columns)
    case.indices[case.indices == 3] = 5  # row 3 is poison as an index, and NaN
    case.indices[:, 100:240] = -1
    kernel, results = emulated(variant.heads, variant.kv_dtype, late=True), []
    for word in (0xFFFFFFFF, 3):
        library.poison(word)
        results.append(run(kernel, poisoned(case), variant=variant))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert error_of(case, *results[0]) <= 3e-3 if columns > 1 else not results[0][0].isnan().any()


@pytest.mark.parametrize("dim", [0, 127, 128, 255, 256, 511])
@each_variant(lambda variant: variant.kv_dtype == "fp8")
def test_the_largest_element_of_q_may_stand_anywhere(emulated, variant, dim):
    """fp8: Q goes to f16 by its largest element, which each warp sees a part of."""
    case = replace(make_case(1, variant.heads, "fp8", 64), scale=512**-0.5 / 3e4)
    case.q[:, :, dim] = 3e5
    out, lse = run(emulated(variant.heads, "fp8"), case, variant=variant)
    assert error_of(case, out, lse) <= 3e-3


@every_variant
def test_splits_and_empty_tokens(emulated, variant):
    case = make_case(3, variant.heads, variant.kv_dtype, 230)
    case.indices[1] = -1
    case.indices[2, 32:] = -1  # the later splits are empty
    out, lse = run(emulated(variant.heads, variant.kv_dtype, late=True), case, 3, variant)
    assert error_of(case, out, lse) <= 3e-3


@pytest.mark.parametrize(("heads", "kv_dtype"), [(12, "bf16"), (64, "bf16"), (40, "fp8")])
def test_a_call_may_take_two_launches(emulated, heads, kv_dtype):
    """Whatever the strides, the second one starts where the first one ends."""
    case = make_case(9, heads, kv_dtype, 1100)
    wide = torch.zeros(9, heads + 1, 520, dtype=torch.bfloat16)
    wide[:, :heads, :512] = case.q
    indices = torch.full((9, 1111), -1, dtype=torch.int32)
    indices[:, :1100] = case.indices
    strided = replace(case, q=wide[:, :heads, :512], indices=indices[:, :1100])
    kernel = emulated(heads, kv_dtype, late=True)
    kernel.sm_count = 4
    first, rest = kernel.parts(9, 1100)
    assert (first.tokens, rest.tokens) == (8, 1) and rest.plan.splits > 1
    main, last = (kernel._functions[part.plan.variant] for part in (first, rest))
    out = torch.full((9, heads + 2, 512), torch.nan, dtype=torch.bfloat16)[:, :heads]
    lse = torch.full((9, heads + 3), torch.nan)[:, :heads]
    workspace = torch.full((kernel.workspace_bytes(9, 1100),), 255, dtype=torch.uint8)
    operands = (strided.q, strided.kv_rows, strided.indices, strided.scale, out, workspace)
    kernel(*operands, k_scale=strided.k_scale, lse=lse)
    assert [launch[0] for launch in dict.fromkeys(main.launches + last.launches)] == [
        first.plan.grid(8),
        rest.plan.grid(1),
    ]
    assert error_of(strided, out, lse) <= 3e-3


@pytest.mark.parametrize(
    ("sms", "splits", "sharers"),
    [(1, 7, 1), (1, 19, 1), (4, 7, 2), (3, 19, 2), (8, 7, 4), (4, 19, 4), (132, 3, 8), (132, 40, 8), (1, 71, 8)],
)
@pytest.mark.parametrize(("heads", "kv_dtype"), [(8, "bf16"), (12, "fp8")])
def test_any_number_of_warps_may_share_a_unit_of_the_merge(emulated, heads, kv_dtype, sms, splits, sharers):
    """Among empty splits, too, and where there are more warps than splits."""
    case, kernel = make_case(1, heads, kv_dtype, 2240), emulated(heads, kv_dtype, late=True, reversed=True)
    head_tiles = -(-heads // 8)
    kernel.sm_count = sms * head_tiles
    case.indices[0, 320:640] = -1
    cut = kernel.plan(1, 2240, splits)
    assert (cut.sharers, cut.units) == (sharers, 1)
    out, lse = run(kernel, case, splits=splits)
    assert error_of(case, out, lse) <= 3e-3


@pytest.mark.parametrize(("splits", "units"), [(2, 4), (3, 2), (4, 2), (5, 1), (8, 1), (9, 1)])
@pytest.mark.parametrize(("heads", "kv_dtype"), [(16, "bf16"), (12, "fp8")])
def test_a_warp_of_the_merge_may_join_several_units(emulated, heads, kv_dtype, splits, units):
    """Among live splits, empty ones in every place: what stands where they would have left outputs is poison."""
    case, kernel = make_case(3, heads, kv_dtype, 320), emulated(heads, kv_dtype, late=True)
    kernel.sm_count = 2
    assert kernel.plan(3, 320, splits).units == units
    width = kernel.plan(3, 320, splits).split_columns
    case.indices[0, :width] = -1
    case.indices[1, width : 2 * width] = -1
    case.indices[2, (splits - 1) * width :] = -1
    out, lse = run(kernel, case, splits)
    assert error_of(case, out, lse) <= 3e-3


@pytest.mark.parametrize("exponent", [-80, -20, 20, 80])
@each_variant(lambda variant: variant.kv_dtype == "bf16" and variant.heads in (8, 64))
def test_splits_of_rows_of_any_size(emulated, variant, exponent):
    """f16 alone holds neither 2^20 nor 2^-80; dims of a row, too, are of unlike size."""
    case = make_case(2, variant.heads, "bf16", 320)
    unlike = torch.linspace(-8, 8, 512).round().exp2()
    case.kv_rows = (case.kv_rows.float() * unlike * 2.0**exponent).to(torch.bfloat16)
    case.q = (case.q.float() / unlike).to(torch.bfloat16)
    case.scale *= 2.0**-exponent
    out, lse = run(emulated(variant.heads, "bf16"), case, 3, variant)
    assert error_of(case, out, lse) <= 3e-3
    reference, _ = sparse_mla_reference(case.q, case.kv_rows, case.indices, case.scale)
    by_dim = (out.double() - reference).flatten(0, 1).norm(dim=0) / reference.flatten(0, 1).norm(dim=0)
    assert by_dim.max() <= 1e-2


def test_as_many_splits_as_there_are(emulated):
    case = make_case(1, 8, "bf16", 2300)
    out, lse = run(emulated(8, "bf16"), case, splits=MAX_SPLITS)
    assert error_of(case, out, lse) <= 3e-3


@pytest.mark.parametrize("masked", [0, 2043])
@every_variant
def test_a_long_row_wraps_every_ring(emulated, variant, masked):
    case = make_case(1, variant.heads, variant.kv_dtype, 2176)
    case.indices[0, : masked // 2] = -1
    case.indices[0, 2176 - masked + masked // 2 :] = -1
    out, lse = run(emulated(variant.heads, variant.kv_dtype, late=True, reversed=True), case, variant=variant)
    assert error_of(case, out, lse) <= 3e-3


@pytest.mark.parametrize(("heads", "kv_dtype"), [(1, "bf16"), (12, "fp8"), (24, "bf16"), (80, "bf16"), (72, "fp8")])
def test_head_counts_between_the_variants(emulated, heads, kv_dtype):
    case = make_case(2, heads, kv_dtype, 70)
    for splits, variant in itertools.product((1, 2), variants_for(heads, kv_dtype)):
        out, lse = run(emulated(heads, kv_dtype), case, splits, variant)
        assert error_of(case, out, lse) <= 3e-3


@pytest.mark.parametrize("padded", [0, 3])
@each_variant(lambda variant: (variant.heads, variant.kv_dtype) in ((8, "bf16"), (16, "fp8"), (64, "bf16")))
def test_strided_operands_and_nothing_read_beside_the_rows(emulated, library, variant, padded):
    heads, kv_dtype = variant.heads - padded, variant.kv_dtype
    plain = make_case(2, heads, kv_dtype, 77)
    q = torch.zeros(heads, 2, 528, dtype=torch.bfloat16)[:, :, 8:520].transpose(0, 1)
    kv_rows = torch.zeros(211, 560, dtype=plain.kv_rows.dtype)
    kv_rows[:, :512] = plain.kv_rows
    indices = torch.full((2, 100), 5, dtype=torch.int32)[:, 3:80]
    q.copy_(plain.q)
    indices.copy_(plain.indices)
    case = Case(q, kv_rows[:, :512], indices, plain.k_scale)
    # Copies may read Q, and of the pool the rows that the indices name: not the padding, not a masked row.
    library.allow_all()
    for head, token in itertools.product(range(heads), range(2)):
        library.allow(q[token, head].data_ptr(), 1024)
    for row in set(indices.flatten().tolist()) & set(range(211)):
        library.allow(kv_rows[row].data_ptr(), 512 * kv_rows.element_size())
    out, lse = run(emulated(heads, kv_dtype), case, variant=variant)
    assert error_of(case, out, lse) <= 3e-3
    assert torch.equal(out, run(emulated(heads, kv_dtype, late=True), case, variant=variant)[0])


@pytest.mark.parametrize("kind", ["low", "high", "equal", "rising"])
@each_variant(lambda variant: variant.heads in (8, 64))
def test_extreme_scores(emulated, variant, kind):
    heads, kv_dtype = variant.heads, variant.kv_dtype
    case = make_case(1, heads, kv_dtype, 130, rows=130)
    case.indices[0] = torch.arange(130, dtype=torch.int32)
    whole = (torch.arange(130 * 512).view(130, 512) % 7 - 3).float()
    if kind == "equal":
        whole[:] = whole[0]
    elif kind == "rising":  # each row scores higher than the one before: the maximum moves in every tile
        whole = torch.arange(130).float()[:, None].expand(130, 512) / 16
        case.q.fill_(0.25)
    else:
        whole[:, :64] = 8.0
        case.q[:] = (case.q.float() * 2).round().clamp(-4, 4).to(torch.bfloat16)
        case.q[:, :, :64] = 2048.0 if kind == "high" else -2048.0
        case.scale = 0.15
    case.kv_rows = whole.to(case.kv_rows.dtype)
    out, lse = run(emulated(heads, kv_dtype), case, variant=variant)
    k_scale = 1.0 if case.k_scale is None else case.k_scale.item()
    reference, reference_lse = sparse_mla_reference(case.q, case.kv_rows, case.indices, case.scale, k_scale)
    assert ((out.double() - reference).norm() / reference.norm()).item() <= 3e-3
    assert ((lse - reference_lse).abs() <= 1e-5 + 1e-6 * reference_lse.abs()).all()


def test_matrix_loads_are_free_of_bank_conflicts(emulated, library):
    before = library.conflicts()
    for variant in VARIANTS:
        kernel = emulated(variant.heads, variant.kv_dtype)
        run(kernel, make_case(1, variant.heads, variant.kv_dtype, 70), variant=variant)
    assert library.conflicts() == before == 0


@each_variant(lambda variant: (variant.heads, variant.kv_dtype) == (8, "bf16"))
def test_masked_rows_are_not_copied(emulated, library, variant):
    """The control of the read check: with no row allowed, a single live index is an error."""
    case = make_case(1, 8, "bf16", 40)
    case.indices.fill_(-1)
    library.allow_all()
    library.allow(case.q.data_ptr(), case.q.numel() * 2)
    out, _ = run(emulated(8, "bf16"), case, variant=variant)
    assert (out == 0).all()
    case.indices[0, 33] = 7
    with pytest.raises(AssertionError, match="outside its tensors"):
        run(emulated(8, "bf16"), case, variant=variant)


@pytest.mark.parametrize(("size", "rank", "interleave"), [(1, 0, 1), (2, 1, 1), (4, 2, 16)])
@pytest.mark.parametrize("block_size", [48, 144])
def test_index_rows(on_cpu, library, block_size, size, rank, interleave):
    generator = torch.Generator().manual_seed(3)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    topk, requests = draw(-3, 3 * block_size * size, 5, 300), torch.tensor([0, 2, 1, 3, -1], dtype=torch.int32)
    lengths, table = draw(0, 3 * block_size * size, 3), draw(-1, 40, 3, 2)
    kernel = IndexRows(torch.device("cpu"), emulation.EmulatedFunction(library, "index_rows", "index_rows"))
    out = torch.full((5, 310), 77, dtype=torch.int32)
    dcp = dict(dcp_size=size, dcp_rank=rank, dcp_interleave=interleave)
    kernel(topk, requests, lengths, table, block_size, 1000, out[:, 5:305], **dcp)
    assert torch.equal(out[:, 5:305], index_rows_reference(topk, requests, lengths, table, block_size, 1000, **dcp))
    assert (out[:, 5:305] >= 0).any() and (out[3:, 5:305] == -1).all()
    assert (out[:, :5] == 77).all() and (out[:, 305:] == 77).all()
