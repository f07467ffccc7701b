"""prefill_profile: the profile run sets aside what the overlay's attention backend allocates, not a dense prefill."""

from types import ModuleType
from typing import Any

from overlay.attention.choice import BACKEND_NAME
from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, present

MLA = "vllm.model_executor.layers.attention.mla_attention"
ROWS = "MLAAttention.chunked_prefill_workspace_size"


def probe(ctx: Context) -> Verdict:
    if not ctx.sources.has("vllm.models.glm5next"):
        return absent("this vLLM has no rope-free sparse-MLA model (the first came with 0.30.0)")
    if "self.chunked_prefill_workspace_size" not in ctx.sources.source_of(MLA, "MLAAttention.forward_impl"):
        return absent("the profile run of this vLLM sets nothing aside for a dense prefill")
    return present("the profile run sets memory aside for a dense prefill that sparse MLA without one never runs")


def rows_of_forward(layer: Any) -> int:
    """Rows of [heads, qk_nope + v] elements that hold what one forward pass of the backend allocates.

    The absorbed queries and the outputs, [tokens, heads, latent] each, live beside each other. Under decode context
    parallelism the queries are concatenated and gathered over the ranks' heads first, and so are the outputs.
    """
    config = layer._vllm_config
    ranks = config.parallel_config.decode_context_parallel_size
    buffers = 2 if ranks == 1 else 2 + 2 * ranks
    elements = buffers * config.scheduler_config.max_num_batched_tokens * layer.kv_lora_rank
    return -(-elements // (layer.qk_nope_head_dim + layer.v_head_dim))


def size_for_what_runs(module: ModuleType, ctx: Context) -> None:
    stock = vars(module.MLAAttention)["chunked_prefill_workspace_size"]

    def chunked_prefill_workspace_size(layer: Any) -> int:
        """Rows that the profile run allocates for attention."""
        if layer.attn_backend.get_name() != BACKEND_NAME or layer.prefill_backend is not None:
            return stock.fget(layer)
        return rows_of_forward(layer)

    ctx.replace(module, ROWS, property(chunked_prefill_workspace_size))


PATCH = Patch(
    id="prefill_profile",
    title="memory is set aside for a dense prefill that never runs",
    why=(
        "In the profile run every MLA layer allocates the up-projected keys and values of a chunked dense prefill: "
        "69,632 rows of [heads, 512] bf16, 4.6 GB at 64 heads per rank. A sparse MLA layer without dense prefill never "
        "computes them, yet the KV cache is smaller by that much."
    ),
    how=(
        "Where a layer is served by the overlay's own backend, found by asking the layer itself, the same allocation "
        "has the size of what its forward pass does allocate: absorbed queries and outputs, 1.1 GB at 64 heads and "
        "8192 tokens. The kernel's scratch is counted apart. vLLM's own backend for 12.x also runs no dense prefill, "
        "but it has buffers of its own that are only made at the first request and live in this slack: left alone."
    ),
    upstream=(),
    until="vLLM sizes the profile run by the backend's own needs",
    targets=(
        Target(MLA, ROWS, ("(self)",)),
        Target(MLA, "MLAAttention.forward_impl"),
    ),
    probe=probe,
    apply={MLA: size_for_what_runs},
)
