"""The variants of the kernel: which shapes are compiled, and what each of them needs."""

from dataclasses import dataclass
from typing import Literal

KvDtype = Literal["bf16", "fp8"]

LATENT = 512
SLICES = 4  # warps side by side over the latent dimension
MAX_COLUMNS = 8192  # index columns of a row, as wide as the kernel's bit map
MAX_SPLITS = 32
SHARED_LIMIT = 101_376  # bytes a block may use on sm_120 and sm_121
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121")


@dataclass(frozen=True)
class Variant:
    """One compiled shape of the main kernel: `heads` of a token by one range of index columns a block."""

    heads: int
    kv_dtype: KvDtype
    tile_rows: int  # latent rows of a tile
    slots: int  # tiles in shared memory
    blocks: int  # blocks that fit on a multiprocessor of sm_120

    @property
    def name(self) -> str:
        """Name of the entry point."""
        return f"sparse_mla_h{self.heads}_{self.kv_dtype}"

    @property
    def groups(self) -> int:
        """Warps that share a slice of the latent row, each with its own heads."""
        return 2 if self.heads > 32 else 1

    @property
    def threads(self) -> int:
        return 32 * SLICES * self.groups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, field by field as `Shared` in cuda/shape.cuh; the compiler checks that they agree."""
        head_tiles = self.heads // self.groups // 8
        row_tiles = self.tile_rows // 16
        buffers = 2 if head_tiles * row_tiles <= 2 else self.groups
        element = 1 if self.kv_dtype == "fp8" else 2
        tiles = SLICES * max(self.slots * self.tile_rows * element, self.heads * 2) * (LATENT // SLICES)
        partial = buffers * SLICES * row_tiles * head_tiles * 32 * 16
        weights = self.groups * row_tiles * -(-head_tiles // 2) * 32 * 16
        decisions = 2 * self.heads * 4 + self.groups * 16
        columns = 256 * 4 + MAX_COLUMNS // 32 * 4 + MAX_COLUMNS // 16 * 2
        query = (SLICES if self.kv_dtype == "fp8" else 1) * self.heads * 4
        total = tiles + partial + weights + decisions + columns + query + 4
        return -(-total // 256) * 256

    @property
    def entry(self) -> str:
        """The line of source that instantiates it."""
        shape = f"{self.heads}, {str(self.kv_dtype == 'fp8').lower()}, {self.tile_rows}, {self.slots}"
        return f"SPARSE_MLA_VARIANT({self.name}, {shape}, {self.blocks}, {self.shared_bytes})"


VARIANTS = (
    Variant(8, "bf16", tile_rows=16, slots=2, blocks=2),
    Variant(16, "bf16", tile_rows=16, slots=2, blocks=2),
    Variant(32, "bf16", tile_rows=16, slots=2, blocks=2),
    Variant(64, "bf16", tile_rows=16, slots=4, blocks=1),
    Variant(8, "fp8", tile_rows=32, slots=2, blocks=2),
    Variant(16, "fp8", tile_rows=32, slots=2, blocks=2),
    Variant(32, "fp8", tile_rows=16, slots=4, blocks=2),
    Variant(64, "fp8", tile_rows=16, slots=8, blocks=1),
)


def variant_for(num_heads: int, kv_dtype: str) -> Variant:
    """The narrowest variant that holds all heads, else the widest: several blocks of it then share the heads.

    Raises:
        ValueError: no heads, or a KV dtype that the kernel does not read.
    """
    if kv_dtype not in ("bf16", "fp8"):
        raise ValueError(f"KV dtype {kv_dtype!r}: the kernel reads 'bf16' and 'fp8' (e4m3)")
    if num_heads < 1:
        raise ValueError(f"{num_heads} heads: at least one is needed")
    fitting = sorted((variant for variant in VARIANTS if variant.kv_dtype == kv_dtype), key=lambda v: v.heads)
    return next((variant for variant in fitting if variant.heads >= num_heads), fitting[-1])
