"""Barriers, waits and sums taken out of the kernel's source: each must show in a call on the CPU."""

import itertools
from typing import NamedTuple

import pytest

from overlay.kernel.variants import variants_for
from tests.kernel import emulation
from tests.kernel.emulated_cases import SCHEDULES, error_of, make_case, poisoned, run


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
def test_a_broken_kernel_is_noticed(emulated, library, tmp_path, fault):
    heads, kv_dtype, text, instead, columns, splits, few = BROKEN[fault]
    serving = variants_for(heads, kv_dtype)
    variant = next(one for one in serving if one.few and one.heads == heads) if few else serving[0]
    case = make_case(1, heads, kv_dtype, columns)
    case.indices[case.indices == 3] = 5
    if splits > 1:
        case.indices[:, 200:] = -1  # one of three is empty

    def errors(of):
        for (backwards, late), word in itertools.product(SCHEDULES, (0xFFFFFFFF, 3)):
            of.poison(word)
            try:
                kernel = emulated(heads, kv_dtype, library=of, reversed=backwards, late=late)
                yield error_of(case, *run(kernel, poisoned(case), splits, variant))
            except AssertionError:
                yield float("inf")

    whole = list(errors(library))
    assert all(error <= 3e-3 for error in whole), whole
    broken = list(errors(emulation.build(tmp_path, serving, [(text, instead)])))
    assert not all(error <= 3e-3 for error in broken), broken
