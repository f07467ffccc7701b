"""The variants of the kernel: which shapes are compiled, and what each of them needs."""

from dataclasses import dataclass
from typing import Literal

KvDtype = Literal["bf16", "fp8"]

LATENT = 512
WARPS = 4  # of a group
MAX_COLUMNS = 8192  # index columns of a row, as wide as the kernel's bit map
MAX_SPLITS = 72  # 2176 columns, vLLM's width, are 68 splits of 32
MERGE_WARPS = (4, 8)  # of a block of the merge, least and most
MERGE_WARP_BYTES = 2112  # of shared memory for each; the compiler checks that cuda/merge.cu needs as much
SHARED_LIMIT = 101_376  # bytes a block may use on sm_120 and sm_121
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121")


@dataclass(frozen=True)
class Variant:
    """One compiled shape of the main kernel: `heads` of a token by one range of index columns a block."""

    heads: int
    kv_dtype: KvDtype
    tile_rows: int  # latent rows of a tile
    ring: int  # pieces of a slice in shared memory, 128 bytes of each row of a tile
    blocks: int  # blocks that fit on a multiprocessor of sm_120
    streams: int  # sets of warps that take every other tile of a block

    @property
    def deep(self) -> bool:
        """More rows in flight than two blocks of a multiprocessor have room for: for calls of few blocks."""
        return self.blocks == 1 and self.groups == 1 and not self.few

    @property
    def few(self) -> bool:
        """Made for few tokens (cuda/few_tokens.cuh): one stream of up to 16 heads, a block to a multiprocessor."""
        return self.heads <= 16 and self.streams == 1

    @property
    def name(self) -> str:
        """Name of the entry point."""
        kind = "_deep" if self.deep else "_few" if self.few else ""
        return f"sparse_mla_h{self.heads}_{self.kv_dtype}{kind}"

    @property
    def groups(self) -> int:
        """Sets of warps that share the tiles of a block, each with its own heads: a warp holds 32 at most."""
        return 2 if self.heads > 32 else 1

    @property
    def group_heads(self) -> int:
        """Heads of a head block, the work of one group."""
        return self.heads // self.groups

    @property
    def slices(self) -> int:
        """Parts of the latent row, each the work of one warp of a stream."""
        return WARPS // self.streams

    @property
    def threads(self) -> int:
        return 32 * WARPS * self.groups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, field by field as `Shared` in cuda/shape.cuh; the compiler checks that they agree."""
        groups, heads = self.groups, self.group_heads
        head_tiles, row_tiles, tiles = heads // 8, self.tile_rows // 16, MAX_COLUMNS // self.tile_rows
        replicated, pair = self.heads <= 16, self.streams > 1
        query = 0 if self.few else groups * heads * (LATENT // self.slices) * 2  # staged
        buffers = 2 if heads == 8 or self.few or (replicated and self.kv_dtype == "fp8") else 1
        fragments = buffers * groups * WARPS * row_tiles * (head_tiles - (not replicated))
        fields = (  # size and alignment
            (WARPS * max(self.ring * self.tile_rows * 128, query), 256),  # tiles
            (fragments * 32 * 16, 16),  # partial: of 16 rows by 8 heads, fp32
            (groups * row_tiles * (32 if replicated else head_tiles * 256), 16),  # weights
            (2 * self.heads * 4, 4),  # rescale, norm
            (groups * 4 * 4, 16),  # grown
            (self.streams * (heads if pair else 1) * (2 if pair and self.kv_dtype == "fp8" else 1) * 8, 8),  # sums
            (256 * 4, 16),  # ring
            ((tiles + self.streams) * self.tile_rows // 8, self.tile_rows // 8),  # live
            ((tiles + 2 * self.streams) * 2, 2),  # list
            (4, 4),  # tiles_live
            (24, 8),  # what is needed once in a while
        )
        total = 0
        for size, alignment in fields:
            total = -(-total // alignment) * alignment + size
        return -(-total // 256) * 256

    @property
    def entry(self) -> str:
        """The line of source that instantiates it."""
        fp8 = "true" if self.kv_dtype == "fp8" else "false"
        shape = f"{self.group_heads}, {fp8}, {self.tile_rows}, {self.ring}, {self.groups}, {self.streams}"
        return f"SPARSE_MLA_VARIANT({self.name}, {shape}, {self.blocks}, {self.shared_bytes})"


VARIANTS = (
    Variant(8, "bf16", tile_rows=16, ring=5, blocks=2, streams=2),
    Variant(16, "bf16", tile_rows=16, ring=5, blocks=2, streams=2),
    Variant(32, "bf16", tile_rows=16, ring=4, blocks=2, streams=1),
    Variant(64, "bf16", tile_rows=32, ring=4, blocks=1, streams=1),
    Variant(8, "bf16", tile_rows=16, ring=10, blocks=1, streams=2),
    Variant(16, "bf16", tile_rows=16, ring=10, blocks=1, streams=2),
    Variant(8, "bf16", tile_rows=32, ring=4, blocks=1, streams=1),
    Variant(16, "bf16", tile_rows=32, ring=4, blocks=1, streams=1),
    Variant(8, "fp8", tile_rows=32, ring=2, blocks=2, streams=2),
    Variant(16, "fp8", tile_rows=16, ring=4, blocks=2, streams=2),
    Variant(32, "fp8", tile_rows=32, ring=2, blocks=2, streams=1),
    Variant(8, "fp8", tile_rows=32, ring=3, blocks=1, streams=1),
    Variant(16, "fp8", tile_rows=32, ring=3, blocks=1, streams=1),
)


def variants_for(num_heads: int, kv_dtype: str) -> tuple[Variant, ...]:
    """The variants that may serve a head count: first the narrowest that holds all heads, else the widest.

    Then narrower ones, down to a quarter of that: a call of few tokens has more blocks with several blocks to a token.
    Of 8 heads only the variant for few tokens; `deep` ones serve their own head count alone.

    Raises:
        ValueError: no heads, or a KV dtype that the kernel does not read.
    """
    if kv_dtype not in ("bf16", "fp8"):
        raise ValueError(f"KV dtype {kv_dtype!r}: the kernel reads 'bf16' and 'fp8' (e4m3)")
    if num_heads < 1:
        raise ValueError(f"{num_heads} heads: at least one is needed")
    of_type = [variant for variant in VARIANTS if variant.kv_dtype == kv_dtype]
    widths = sorted({variant.heads for variant in of_type})
    width = next((heads for heads in widths if heads >= num_heads), widths[-1])

    def serves(variant: Variant) -> bool:
        if variant.heads == width:
            return True
        return width // 4 <= variant.heads < width and (variant.few or (variant.heads > 8 and not variant.deep))

    return tuple(sorted(filter(serves, of_type), key=lambda variant: (-variant.heads, variant.deep or variant.few)))
