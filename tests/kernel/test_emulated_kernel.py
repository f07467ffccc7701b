"""The kernel's source, run on the CPU, against the fp64 reference.

The emulator runs warps in two orders and lets asynchronous copies land at the earliest and at the latest moment that
the source allows. A missing barrier between warps, or wait, shows as a wrong result in one of the four combinations;
that it does is tested too, by taking barriers and waits out.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch

from overlay.kernel.launch import IndexRows
from overlay.kernel.reference import sparse_mla_reference
from overlay.kernel.variants import MAX_SPLITS, VARIANTS, variants_for
from tests.kernel import emulation
from tests.kernel.index_reference import index_rows_reference

SCHEDULES = list(itertools.product((False, True), repeat=2))


def each_variant(wanted=lambda variant: True):
    chosen = [variant for variant in VARIANTS if wanted(variant)]
    return pytest.mark.parametrize("variant", chosen, ids=lambda variant: variant.name)


every_variant = each_variant()


@dataclass
class Case:
    q: torch.Tensor
    kv_rows: torch.Tensor
    indices: torch.Tensor
    k_scale: torch.Tensor | None
    scale: float = 512**-0.5


def make_case(tokens, heads, kv_dtype, columns, rows=211, seed=0):
    """Normal data; one index in seven is -1 or beyond the rows, and tile 1 is masked as a whole."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, 512, generator=generator).to(torch.bfloat16)
    kv_rows = torch.randn(rows, 512, generator=generator)
    k_scale = torch.tensor(0.37) if kv_dtype == "fp8" else None
    kv_rows = (kv_rows / 0.37).to(torch.float8_e4m3fn) if kv_dtype == "fp8" else kv_rows.to(torch.bfloat16)
    indices = torch.randint(-15, rows + 15, (tokens, columns), generator=generator, dtype=torch.int32)
    indices[:, 16:32] = -1
    return Case(q, kv_rows, indices, k_scale)


def run(kernel, case, splits=1, variant=None):
    tokens, columns = case.indices.shape
    out = torch.full_like(case.q, torch.nan, memory_format=torch.contiguous_format)
    lse = torch.full(case.q.shape[:2], torch.nan)
    partial = kernel.plan(tokens, columns, splits, variant).partial_bytes(tokens)
    workspace = torch.full((max(16, partial),), 255, dtype=torch.uint8)
    operands = (case.q, case.kv_rows, case.indices, case.scale, out, workspace)
    kernel(*operands, k_scale=case.k_scale, lse=lse, splits=splits, variant=variant)
    return out, lse


def error_of(case, out, lse):
    """Relative Frobenius error of `out`; `lse` is checked on the way."""
    k_scale = 1.0 if case.k_scale is None else case.k_scale.item()
    reference, reference_lse = sparse_mla_reference(case.q, case.kv_rows, case.indices, case.scale, k_scale)
    empty = reference_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert (out[empty] == 0).all()
    if not (lse - reference_lse)[~empty].abs().le(1e-5).all():
        return float("inf")
    return ((out.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize(("backwards", "late"), SCHEDULES)
@pytest.mark.parametrize("columns", [193, 256, 257])  # up to 256 listed at once
@every_variant
def test_against_the_reference(emulated, variant, columns, backwards, late):
    case = make_case(2, variant.heads, variant.kv_dtype, columns)
    case.indices[1, :150] = -1
    kernel = emulated(variant.heads, variant.kv_dtype, reversed=backwards, late=late)
    out, lse = run(kernel, case, variant=variant)
    assert error_of(case, out, lse) <= 3e-3


def poisoned(case):
    """NaN in every row that no index names, so that one that is read by mistake is seen."""
    named = torch.isin(torch.arange(case.kv_rows.shape[0]), case.indices.long())
    return replace(case, kv_rows=case.kv_rows.float().where(named[:, None], torch.nan).to(case.kv_rows.dtype))


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


# fault -> heads, KV dtype, text of the source and what takes its place
class Fault(NamedTuple):
    """A change to the source that must show in a call of the first variant of its heads, or of that for few tokens."""

    heads: int
    kv_dtype: str
    text: str
    instead: str
    columns: int = 300
    splits: int = 1
    few: bool = False


# Of the next tile, before the values of this one are read.
COPIES_AT_ONCE = """
    if (more) {
      next.read(sm, place, t + kTilesHeld);
      for (int i = 0; i < S::kPieces; ++i) copy_piece<S>(source, piece_offset<S>(first, i), i, next);
    }
    __syncthreads();
    add_slices"""

BROKEN = {
    "no wait for a piece": Fault(8, "bf16", "wait_copies<S::kRing - 1>();", ";"),
    "no barrier after the partial scores": Fault(
        8,
        "bf16",
        "named_barrier<64>(1 + stream);\n        add_partner<S>(s, sm, buffer, place);\n        prefetch",
        "add_partner<S>(s, sm, buffer, place);\n        prefetch",
    ),
    "partial scores overwritten": Fault(16, "bf16", "named_barrier<64>(kRead + warp);\n      publish", "publish"),
    "one buffer for the partial scores of two tiles": Fault(
        16, "fp8", "const int buffer = S::kBuffers > 1 ? t % 2 : 0;", "const int buffer = 0;"
    ),
    "no wait for the last copies": Fault(32, "bf16", "wait_copies<0>();\n", "\n"),
    "weights read before they are there": Fault(
        32, "bf16", "group_barrier();\n      if (gathers) read_next", "if (gathers) read_next"
    ),
    "tiles read before one warp has listed them": Fault(
        16,
        "bf16",
        "if ((S::kFp8 && !S::kLateQuery) || !few) __syncthreads();\n  const int listed",
        "const int listed",
    ),
    "few columns read before all warps have listed them": Fault(
        8, "bf16", "__syncthreads();\n  if (!few && warp == 0) list", "if (!few && warp == 0) list", 193
    ),
    "a swapped byte pair": Fault(8, "fp8", "0x3120", "0x3210"),
    "indices past the last tile left as they were": Fault(
        8, "bf16", "    sm.ring[place %", "    if (place < count) sm.ring[place %", 209
    ),
    "the last columns not scanned": Fault(8, "bf16", "kWords = Columns / 32,", "kWords = Columns / 32 - 1,", 256),
    "halves joined before they are given": Fault(
        16,
        "bf16",
        "__syncthreads();\n#pragma unroll\n  for (int n = 0; n < S::kHeadTiles; ++n) {\n    float own[2], other[2];",
        "#pragma unroll\n  for (int n = 0; n < S::kHeadTiles; ++n) {\n    float own[2], other[2];",
    ),
    "a tile used before the other group has gathered it": Fault(64, "bf16", "else if (!gathers) meet();", ""),
    "the first tile used while it is on its way": Fault(
        64, "bf16", "if (t == 0) wait_copies<S::kPieces>();", "if (t == 0) wait_copies<S::kRing>();"
    ),
    "a tile refilled where the other group still reads": Fault(
        64, "bf16", "if (S::kShared && gathers && t + 2 < tiles) {", "if (S::kShared && gathers) {"
    ),
    "rows staged where the other group still reads": Fault(
        64, "bf16", "__syncthreads();  // also for the tiles", "// also for the tiles", 260
    ),
    "outputs of an empty split used": Fault(16, "bf16", "used ? words[w] : 0", "words[w]", 300, 3),
    "a scale of an empty split used": Fault(
        16,
        "bf16",
        "pair[i].y == 0.0f ? 0.0f : pair[i].x * norm[0] * scale[i]",
        "pair[i].x * norm[0] * scale[i]",
        300,
        3,
    ),
    "shares of the merge read before they are there": Fault(
        8, "bf16", "__syncthreads();\n    constexpr int kMore", "constexpr int kMore", 300, 3
    ),
    "a share of the merge not brought to the common maximum": Fault(
        8, "bf16", "first += factor * part[i].x;", "first += part[i].x;", 300, 3
    ),
    "few tokens: Q read before it is there": Fault(
        8, "bf16", "wait_copies<S::kRing - 1>();\n      __syncwarp();\n      load_query", "load_query", few=True
    ),
    "few tokens: rows where Q still lies": Fault(
        16, "fp8", "region + (S::kRing - 1) * S::kPieceBytes;", "region;", few=True
    ),
    "few tokens: no barrier after the partial scores": Fault(
        8, "bf16", "__syncthreads();\n    add_slices", "add_slices", few=True
    ),
    "few tokens: one buffer for the partial scores of two tiles": Fault(
        8, "bf16", "const int buffer = t % 2;", "const int buffer = 0;", few=True
    ),
    "few tokens: a tile asked for while it is still read": Fault(
        16, "bf16", "__syncthreads();\n    add_slices", COPIES_AT_ONCE, few=True
    ),
    "few tokens: columns read before all warps have listed them": Fault(
        8,
        "bf16",
        "__syncthreads();\n  if (!few) {\n    if (warp == 0)",
        "if (!few) {\n    if (warp == 0)",
        193,
        few=True,
    ),
    "few tokens: tiles read before one warp has listed them": Fault(
        16, "bf16", "list_live_tiles(sm, columns);\n    __syncthreads();", "list_live_tiles(sm, columns);", few=True
    ),
    "few tokens: a tile not asked for": Fault(
        8, "fp8", "t + kTilesHeld < tiles;", "t + kTilesHeld + 1 < tiles;", few=True
    ),
    "few tokens: the parts of Q brought to f16 by one factor": Fault(
        8, "fp8", "inverse[n][i] = half_inverse_factor(", "inverse[n][i] = half_inverse_factor(142 + 0 * ", few=True
    ),
    "few tokens: as few groups as there are tiles": Fault(
        8,
        "bf16",
        "    commit_copies();  // as many groups whatever there is",
        "    if (piece / S::kPieces < tiles) commit_copies();",
        20,
        few=True,
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_noticed(emulated, tmp_path, fault):
    heads, kv_dtype, text, instead, columns, splits, few = BROKEN[fault]
    serving = variants_for(heads, kv_dtype)
    variant = next(one for one in serving if one.few and one.heads == heads) if few else serving[0]
    broken = emulation.build(tmp_path, serving, [(text, instead)])
    case = make_case(1, heads, kv_dtype, columns)
    case.indices[case.indices == 3] = 5
    if splits > 1:
        case.indices[:, 200:] = -1  # one of three is empty
    errors = []
    for (backwards, late), word in itertools.product(SCHEDULES, (0xFFFFFFFF, 3)):
        broken.poison(word)
        try:
            kernel = emulated(heads, kv_dtype, library=broken, reversed=backwards, late=late)
            errors.append(error_of(case, *run(kernel, poisoned(case), splits, variant)))
        except AssertionError:
            errors.append(float("inf"))
    assert not all(error <= 3e-3 for error in errors), errors


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
