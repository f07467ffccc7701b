"""indexer_topk: on capability 12.x the indexer's decode top-k is one that is exact and fits."""

from types import ModuleType
from typing import Any

from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, present
from overlay.substitute import Substitute

DISPATCHER = "vllm.model_executor.layers.indexer_topk"
# 0.30's k-pool indexer has no dispatcher: it calls the operator itself.
INDEXER_030 = "vllm.model_executor.layers.sparse_attn_indexer_kpool"


def probe(ctx: Context) -> Verdict:
    if not ctx.sources.has(DISPATCHER):
        return absent("this vLLM has no k-pool indexer (the first came with 0.30.0)")
    if ctx.hardware.lacks(12):
        return absent(f"{ctx.hardware.architecture} is not of the 12.x family")
    if '"persistent"' not in ctx.sources.source_of(DISPATCHER, "SparseIndexerTopk._resolve_auto"):
        return absent("this vLLM's automatic choice is never the persistent top-k")
    return present("the automatic choice on 12.x is the persistent top-k, which drops candidates and may not fit")


def here(ctx: Context) -> bool:
    """The GPU in use is of 12.x; with enabled = true any, so that the choice can be tested elsewhere."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return ctx.wanted is True or (capability is not None and capability.major == 12)


def choose_per_row(module: ModuleType, ctx: Context) -> None:
    """What the automatic choice answers; a backend that the user names is taken as it is."""

    def resolve(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> str:
        choice = wrapped(*args, **kwargs)
        return "per_row" if choice == "persistent" and here(ctx) else choice

    ctx.wrap(module, "SparseIndexerTopk._resolve_auto", resolve)


def call_per_row(module: ModuleType, ctx: Context) -> None:
    """0.30: the indexer's module sees a torch whose persistent top-k is the one that works row by row."""
    if "persistent_topk" not in ctx.sources.text(INDEXER_030):
        return
    torch = module.torch

    def persistent_topk(logits: Any, lengths: Any, out: Any, workspace: Any, k: int, max_seq_len: int) -> None:
        if not here(ctx):
            return torch.ops._C.persistent_topk(logits, lengths, out, workspace, k, max_seq_len)
        rows = logits.shape[0]
        # Lengths come per request ([B], or [B, next_n] under speculative decoding), logits per row.
        torch.ops._C.top_k_per_row_decode(
            logits, rows // lengths.shape[0], lengths, out, rows, logits.stride(0), logits.stride(1), k
        )

    operators = Substitute(torch.ops._C, persistent_topk=persistent_topk)
    ctx.replace(module, "torch", Substitute(torch, ops=Substitute(torch.ops, _C=operators)))


PATCH = Patch(
    id="indexer_topk",
    title="the indexer's decode top-k does not fit 12.x, and drops candidates",
    why=(
        "On 12.x the automatic choice is persistent_topk. Rows past about 24K tokens need more co-resident blocks than "
        "GB10's 48 SMs hold, and its fallback 128 KiB of shared memory where 99 KiB are to be had: the engine dies "
        "while decoding. And wherever more than 16,384 scores share a coarse bin, candidates are dropped in silence."
    ),
    how=(
        "The automatic choice becomes top_k_per_row_decode, vLLM's own fallback for small shared memory, which refines "
        "a crowded bin instead of truncating it. A backend named by --sparse-indexer-topk-backend is left alone. "
        "0.30's k-pool indexer calls the operator without a choice; there the call itself is redirected."
    ),
    upstream=("vllm-project/vllm#51782", "vllm-project/vllm#54110", "vllm-project/vllm#52149"),
    until="persistent_topk handles candidate overflow (#52149) and falls back by itself (#54110) in a release",
    targets=(
        Target(DISPATCHER, "SparseIndexerTopk._resolve_auto", ("(self, logits, topk_tokens, num_rows)",)),
        Target(INDEXER_030, "SparseAttnIndexerKpool", optional=True),
    ),
    probe=probe,
    apply={DISPATCHER: choose_per_row, INDEXER_030: call_per_row},
)
