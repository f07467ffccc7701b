"""A projection, not a measurement: the time of a long prefill on parts that nobody has measured here.

A block's time is taken apart, in clocks of its multiprocessor, into the tensor cores' share and the rest (latencies,
shared memory, address arithmetic). The rest is what an H200 needed beyond its own tensor time, held to the occupancy of
sm_120; it is carried over clock by clock. The tensor share follows from the part's rate. Neither may beat the bounds:
tensor cores, shared memory, issue slots, and the gather through the L2.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlay.bench import sass
from overlay.bench.bars import Row
from overlay.bench.cases import HEADS, KV_DTYPES
from overlay.kernel.plan import plan
from overlay.kernel.variants import LATENT, Variant

TOKENS, COLUMNS = 4096, 2048
SHARED_BYTES_A_CLOCK = 128  # of one multiprocessor, on every part of the family
ISSUED_A_CLOCK = 4


@dataclass(frozen=True)
class Part:
    """A GPU. `tflops`: mma.sync of bf16 with fp32 accumulation; `l2_tbps`: TB/s that its L2 delivers."""

    name: str
    arch: str
    sms: int
    clock_ghz: float
    tflops: float
    l2_tbps: float


# Multiprocessors and rates are the vendor's; 8.7 TB/s was published for the RTX PRO 6000, and the other two are assumed
# to deliver as much for each multiprocessor and clock. H200: clock under this load, tensor rate from the run itself.
H200_CLOCK_GHZ, H200_SMS = 1.75, 132
PARTS = (
    Part("RTX 5090", "sm_120", 170, 2.41, 209.0, 7.3),
    Part("RTX PRO 6000", "sm_120", 188, 2.6, 504.0, 8.7),
    Part("GB10", "sm_121", 48, 2.42, 119.0, 2.07),
)


@dataclass(frozen=True)
class Projection:
    """Milliseconds of TOKENS x COLUMNS. `limit` names the bound that is the largest of `bounds`."""

    part: str
    heads: int
    kv_dtype: str
    bounds: Mapping[str, float]
    projected: float

    @property
    def limit(self) -> str:
        return max(self.bounds, key=self.bounds.__getitem__)


def shared_bytes_a_tile(variant: Variant) -> int:
    """Bytes of shared memory for one tile: written once, read as K and as V by each group, and the exchange."""
    row = LATENT * (1 if variant.kv_dtype == "fp8" else 2)
    tile = variant.tile_rows * row * (1 + 2 * variant.groups)
    fragments = variant.tile_rows * variant.heads * 4  # partial scores of one slice, fp32
    if variant.slices == 2:
        return tile + 2 * fragments * 2  # each warp writes its own and reads the other's
    dealt = 2 * fragments * (variant.slices - 1)  # to owners, and read by them
    weights = variant.tile_rows * variant.heads * 2 * (1 + variant.slices)  # written once, read by all
    return tile + dealt + weights


def served_by(heads: int, kv_dtype: str) -> tuple[Variant, int]:
    """The variant of such a prefill, and how many blocks of it share a token's heads."""
    cut = plan(heads, kv_dtype, TOKENS, COLUMNS, H200_SMS)
    return cut.variant, cut.head_blocks // cut.variant.groups


def project(part: Part, heads: int, kv_dtype: str, row: Row, instructions: int) -> Projection:
    """One part and shape from the measured row of the same shape and the instructions of a warp's tile."""
    variant, blocks = served_by(heads, kv_dtype)
    tiles = blocks * TOKENS * COLUMNS / variant.tile_rows
    sm_clocks_a_ms = part.sms * part.clock_ghz * 1e6
    bounds = {
        "tensor cores": 4 * LATENT * COLUMNS * heads * TOKENS / part.tflops / 1e9,
        "shared memory": tiles * shared_bytes_a_tile(variant) / SHARED_BYTES_A_CLOCK / sm_clocks_a_ms,
        "issue": tiles * variant.slices * variant.groups * instructions / ISSUED_A_CLOCK / sm_clocks_a_ms,
        "L2": blocks * TOKENS * COLUMNS * LATENT * (1 if kv_dtype == "fp8" else 2) / part.l2_tbps / 1e9,
    }
    rest = (row["us"] - row["multiply_us"]) / 1e3 * H200_SMS * H200_CLOCK_GHZ / (part.sms * part.clock_ghz)
    return Projection(part.name, heads, kv_dtype, bounds, max(rest + bounds["tensor cores"], *bounds.values()))


def projections(rows: Sequence[Row]) -> list[Projection]:
    """Every part and shape whose prefill `rows` of a bench run hold."""
    found = []
    for heads, kv_dtype in itertools.product(HEADS, KV_DTYPES):
        wanted = {"kernel": "ours", "heads": heads, "kv_dtype": kv_dtype, "tokens": TOKENS}
        wanted |= {"columns": COLUMNS, "valid": COLUMNS, "pattern": "uniform"}
        row = next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)
        if row is None:
            continue
        variant, _ = served_by(heads, kv_dtype)
        counts = {arch: sass.loop_counts(variant, arch)["all"] for arch in {part.arch for part in PARTS}}
        found += [project(part, heads, kv_dtype, row, counts[part.arch]) for part in PARTS]
    return found


def table(found: Sequence[Projection]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows, in milliseconds."""
    bounds = list(found[0].bounds) if found else []
    headers = ["part", "heads", "KV", *bounds, "limit", "projected"]
    rows = [
        [
            one.part,
            str(one.heads),
            one.kv_dtype,
            *(f"{one.bounds[name]:.2f}" for name in bounds),
            one.limit,
            f"{one.projected:.2f}",
        ]
        for one in sorted(found, key=lambda one: (one.part, one.kv_dtype, one.heads))
    ]
    return headers, rows
