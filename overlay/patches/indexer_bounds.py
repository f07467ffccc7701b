"""indexer_bounds: pool ids that the top-k kernels did not write never become token indices."""

from types import ModuleType
from typing import Any

from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, present
from overlay.substitute import Substitute

OPS = "vllm.models.glm5next.nvidia.ops.kpool_compress"
# Where the indexer lives: from 0.31, and in 0.30.
INDEXERS = ("vllm.models.glm5next.nvidia.sparse_indexer", "vllm.model_executor.layers.sparse_attn_indexer_kpool")
EXPAND = "expand_pools_and_append_tail"


def probe(ctx: Context) -> Verdict:
    """The fault is in the text: a top-k buffer of unwritten memory, or ids that are only tested against zero."""
    if not ctx.sources.has(OPS):
        return absent("this vLLM has no k-pool indexer (the first came with 0.30.0)")
    if any("pool_topk = torch.empty(" in ctx.sources.text(module) for module in INDEXERS):
        return present("the pool ids of the top-k are uninitialised memory where its kernel writes nothing")
    if "tl.where(pid >= 0," in ctx.sources.source_of(OPS, f"_{EXPAND}_kernel"):
        return present("pool ids have no upper bound")
    return absent("this vLLM initialises and bounds its pool ids")


def initialise(module: ModuleType, ctx: Context) -> None:
    """The two buffers of pool ids are local variables of one long function: its `torch` is the only seam."""
    torch = module.torch

    def empty(*size: Any, **kwargs: Any) -> Any:
        made = torch.empty(*size, **kwargs)
        return made.fill_(-1) if made.dtype is torch.int32 else made

    ctx.replace(module, "torch", Substitute(torch, empty=empty))


def bound(module: ModuleType, ctx: Context) -> None:
    """Ids past a row's last whole pool become -1; the kernel itself turns every negative id into -1.

    Two small device operations: no sync, and captured like any other.
    """

    def expand(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
        def bounded(pool_ids: Any, seq_lens: Any, pool_size: int) -> Any:
            pools = (seq_lens // pool_size).unsqueeze(1)
            return wrapped(pool_ids.masked_fill(pool_ids >= pools, -1), seq_lens, pool_size)

        return bounded(*args, **kwargs)

    ctx.wrap(module, EXPAND, expand)


PATCH = Patch(
    id="indexer_bounds",
    title="garbage pool ids of the k-pool indexer become token indices",
    why=(
        "The buffer that the top-k kernels fill with pool ids is torch.empty, they write at most as many entries as "
        "there are valid scores (NaN scores and crowded radix bins leave holes), and the expansion to token indices "
        "tests ids against zero only. A hole selects whatever the memory held: intermittent NaN, or an illegal "
        "address at long prefills. An id that an earlier step left behind may even be in range and count tokens twice."
    ),
    how=(
        "The buffer starts as -1 (the indexer's module sees a torch whose `empty` fills int32 matrices), and ids at or "
        "past seq_len // pool_size become -1 before the expansion, without a host sync. It stays on beside the "
        "overlay's own attention backend, which bounds token indices itself: no bound can see a stale id that is in "
        "range, only the initialised buffer cures it."
    ),
    upstream=("vllm-project/vllm#55201", "vllm-project/vllm#51782"),
    until="vLLM initialises pool_topk and bounds pool ids in _expand_pools_and_append_tail_kernel",
    targets=(
        Target(OPS, EXPAND, ("(pool_ids, seq_lens, pool_size)",)),
        *(Target(module, "SparseAttnIndexerKpool", optional=True) for module in INDEXERS),
    ),
    probe=probe,
    apply={OPS: bound, **dict.fromkeys(INDEXERS, initialise)},
)
