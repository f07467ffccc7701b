"""The variants of the kernel: which shapes are compiled, and what each of them needs."""

from dataclasses import dataclass
from typing import Literal

KvDtype = Literal["bf16", "fp8"]

LATENT = 512
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
    ring: int  # pieces of a warp's slice in shared memory, 128 bytes of each row of a tile
    blocks: int  # blocks that fit on a multiprocessor of sm_120

    @property
    def name(self) -> str:
        """Name of the entry point."""
        return f"sparse_mla_h{self.heads}_{self.kv_dtype}"

    @property
    def slices(self) -> int:
        """Parts of the latent row, each the work of one warp of a stream or group."""
        return 2 if self.heads <= 16 else 4

    @property
    def streams(self) -> int:
        """Sets of warps that take every other tile of a block."""
        return 4 // self.slices

    @property
    def groups(self) -> int:
        """Warps that share a slice of the latent row, each with its own heads."""
        return 2 if self.heads > 32 else 1

    @property
    def threads(self) -> int:
        return 32 * self.slices * self.streams * self.groups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, field by field as `Shared` in cuda/shape.cuh; the compiler checks that they agree."""
        head_tiles, row_tiles = self.heads // self.groups // 8, self.tile_rows // 16
        fragment = 32 * 16  # bytes of 16 rows by 8 heads, fp32
        tiles = 4 * max(self.ring * self.tile_rows * 128, self.heads * (LATENT // self.slices) * 2)
        buffers = 2 if self.heads == 8 or self.groups == 2 else 1
        decided = self.groups  # sets of decisions: two in turn where warps share a slice
        shown = head_tiles if self.slices == 2 else head_tiles - 1
        partial = buffers * self.streams * self.groups * self.slices * row_tiles * shown * fragment
        weights = decided * row_tiles * head_tiles * (8 if self.slices == 2 else self.groups * 32 * 8)
        decisions = (decided + 1) * self.heads * 4 + decided * self.groups * 16
        decisions += self.streams * (self.heads if self.streams > 1 else 1) * 8
        columns = 256 * 4 + (MAX_COLUMNS // self.tile_rows + self.streams) * self.tile_rows // 8
        columns += MAX_COLUMNS // self.tile_rows * 2
        total = tiles + partial + -(-(weights + decisions) // 16) * 16 + -(-(columns + 4) // 8) * 8 + 24
        return -(-total // 256) * 256

    @property
    def entry(self) -> str:
        """The line of source that instantiates it."""
        shape = f"{self.heads}, {str(self.kv_dtype == 'fp8').lower()}, {self.tile_rows}, {self.ring}"
        return f"SPARSE_MLA_VARIANT({self.name}, {shape}, {self.blocks}, {self.shared_bytes})"


VARIANTS = (
    Variant(8, "bf16", tile_rows=16, ring=5, blocks=2),
    Variant(16, "bf16", tile_rows=16, ring=5, blocks=2),
    Variant(32, "bf16", tile_rows=16, ring=4, blocks=2),
    Variant(64, "bf16", tile_rows=16, ring=8, blocks=1),
    Variant(8, "fp8", tile_rows=32, ring=2, blocks=2),
    Variant(16, "fp8", tile_rows=16, ring=4, blocks=2),
    Variant(32, "fp8", tile_rows=32, ring=2, blocks=2),
    Variant(64, "fp8", tile_rows=16, ring=8, blocks=1),
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
