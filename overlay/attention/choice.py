"""Whether a layer's attention is ours: the table that users read, as one function that imports nothing of vLLM."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

BACKEND_NAME = "OVERLAY_SPARSE_MLA"
BACKEND_PATH = "overlay.attention.backend.SparseMLABackend"

LATENT_SIZE = 512
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3")
# The one top-k width that the native kernels of capability 12.x are built for.
NATIVE_INDEX_TOPK = 2048

Capability = tuple[int, int]

# Capabilities besides 12.x, filled from the patch's option for testing.
opened: set[Capability] = set()


@dataclass(frozen=True)
class Layer:
    """What vLLM's selector is asked for, and what the model's configuration says about it."""

    capability: Capability
    use_mla: bool
    use_sparse: bool
    head_size: int
    rope_size: int | None  # qk_rope_head_dim; None where there is no model configuration to read it from
    kv_cache_dtype: str  # "auto" where nothing was asked for
    index_topk: int | None
    dcp: bool
    selected: str | None  # an explicit --attention-backend


@dataclass(frozen=True)
class Choice:
    """`ours` None: a layer that this backend is not made for, so nothing is to be said about it."""

    ours: bool | None
    reason: str


def parse_capabilities(text: str) -> tuple[Capability, ...]:
    """`"9.0, 8.9"` -> ((9, 0), (8, 9)). Raises ValueError naming the bad part."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        major, dot, minor = part.partition(".")
        if not (dot and major.isdigit() and minor.isdigit()):
            raise ValueError(f"{part!r} is not a compute capability such as 9.0")
        found.append((int(major), int(minor)))
    return tuple(found)


def in_family(capability: Capability) -> bool:
    """12.0 and 12.1, the GPUs the kernel is made for, and whatever the option for testing opens."""
    return capability[0] == 12 or capability in opened


def choose(
    layer: Layer,
    *,
    wanted: Literal["auto"] | bool,
    native_defect: Callable[[], str | None],
    stock_refusal: Callable[[], str | None],
) -> Choice:
    """Decide for one layer. `native_defect` says why the installed vLLM's own path cannot serve rope-free rows at all,
    `stock_refusal` why its selector refuses this layer; both are called only where the answer hangs on them.
    """
    if not (layer.use_mla and layer.use_sparse and layer.head_size == LATENT_SIZE):
        return Choice(None, "not sparse MLA over latent rows of 512")
    if layer.rope_size is None or layer.rope_size > 0:
        return Choice(None, f"qk_rope_head_dim is {layer.rope_size}, not 0")
    if not in_family(layer.capability):
        return Choice(None, f"compute capability {_dotted(layer.capability)} is not 12.x")
    if layer.selected is not None:
        return Choice(False, f"--attention-backend {layer.selected} was asked for")
    if layer.kv_cache_dtype not in KV_CACHE_DTYPES:
        return Choice(False, f"{layer.kv_cache_dtype} rows belong to vLLM's own backends")
    if defect := native_defect():
        return Choice(True, defect)
    if layer.kv_cache_dtype != "auto":
        return Choice(True, f"--kv-cache-dtype {layer.kv_cache_dtype} asks for rows that the native path does not have")
    if layer.dcp:
        return Choice(True, "the native path has no decode context parallelism; bf16 rows")
    if layer.index_topk != NATIVE_INDEX_TOPK:
        return Choice(True, f"index_topk is {layer.index_topk}, the native path takes {NATIVE_INDEX_TOPK}; bf16 rows")
    if refusal := stock_refusal():
        return Choice(True, f"vLLM refuses its own backends ({refusal}); bf16 rows")
    if wanted is True:
        return Choice(True, "enabled = true takes --kv-cache-dtype auto as well; bf16 rows")
    return Choice(False, "--kv-cache-dtype auto is served by the native path; bfloat16 or fp8 select this backend")


def _dotted(capability: Capability) -> str:
    return "{}.{}".format(*capability)
