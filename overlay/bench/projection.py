"""A projection, not a measurement: the time of a long prefill on parts that nobody has measured here.

A block's time is taken apart, in clocks of its multiprocessor, into the tensor cores' share and the rest (latencies,
shared memory, address arithmetic). The rest is what an H200 needed beyond its own tensor time, held to the occupancy of
sm_120; it is carried over clock by clock. The tensor share follows from the part's rate. Neither may beat the bounds:
tensor cores, shared memory, issue slots, and the gather through the L2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlay.bench import sass
from overlay.bench.bars import Row
from overlay.kernel.variants import LATENT, VARIANTS, Variant

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
    variant: Variant
    bounds: Mapping[str, float]
    projected: float

    @property
    def limit(self) -> str:
        return max(self.bounds, key=self.bounds.__getitem__)


def shared_bytes_a_tile(variant: Variant) -> int:
    """Bytes of shared memory for one tile: written once, read as K and as V by every group, and the exchange."""
    row = LATENT * (1 if variant.kv_dtype == "fp8" else 2)
    tile = variant.tile_rows * row * (1 + 2 * variant.groups)
    fragments = variant.tile_rows * variant.heads * 4  # partial scores of one slice, fp32
    if variant.slices == 2:
        return tile + 2 * fragments * 2  # each warp writes its own and reads the other's
    dealt = 2 * fragments * (variant.slices - 1)  # to owners, and read by them
    weights = variant.tile_rows * variant.heads * 2 * variant.slices  # written once, read by the three others
    return tile + dealt + weights


def project(part: Part, variant: Variant, row: Row, instructions: int) -> Projection:
    """One part and variant from the measured row of the same shape and the instructions of a warp's tile."""
    tiles = TOKENS * COLUMNS / variant.tile_rows
    warps = variant.slices * variant.groups  # that work on a tile
    sm_clocks_a_ms = part.sms * part.clock_ghz * 1e6
    bounds = {
        "tensor cores": 4 * LATENT * COLUMNS * variant.heads * TOKENS / part.tflops / 1e9,
        "shared memory": tiles * shared_bytes_a_tile(variant) / SHARED_BYTES_A_CLOCK / sm_clocks_a_ms,
        "issue": tiles * warps * instructions / ISSUED_A_CLOCK / sm_clocks_a_ms,
        "L2": TOKENS * COLUMNS * LATENT * (1 if variant.kv_dtype == "fp8" else 2) / part.l2_tbps / 1e9,
    }
    rest = (row["us"] - row["multiply_us"]) / 1e3 * H200_SMS * H200_CLOCK_GHZ / (part.sms * part.clock_ghz)
    return Projection(part.name, variant, bounds, max(rest + bounds["tensor cores"], *bounds.values()))


def projections(rows: Sequence[Row]) -> list[Projection]:
    """Every part and variant whose prefill `rows` of a bench run hold."""
    found = []
    for variant in VARIANTS:
        wanted = {"kernel": "ours", "heads": variant.heads, "kv_dtype": variant.kv_dtype, "tokens": TOKENS}
        wanted |= {"columns": COLUMNS, "valid": COLUMNS, "pattern": "uniform"}
        row = next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)
        if row is None:
            continue
        counts = {arch: sass.loop_counts(variant, arch)["all"] for arch in {part.arch for part in PARTS}}
        found += [project(part, variant, row, counts[part.arch]) for part in PARTS]
    return found


def table(found: Sequence[Projection]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows, in milliseconds."""
    bounds = list(found[0].bounds) if found else []
    headers = ["part", "heads", "KV", *bounds, "limit", "projected"]
    rows = [
        [
            one.part,
            str(one.variant.heads),
            one.variant.kv_dtype,
            *(f"{one.bounds[name]:.2f}" for name in bounds),
            one.limit,
            f"{one.projected:.2f}",
        ]
        for one in sorted(found, key=lambda one: (one.part, one.variant.kv_dtype, one.variant.heads))
    ]
    return headers, rows
