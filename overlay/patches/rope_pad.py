"""rope_pad: on vLLM 0.30 the packed rows with rope serve a model without, by a rope of zeros."""

from types import ModuleType
from typing import Any

from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, impossible, present

MLA = "vllm.model_executor.layers.attention.mla_attention"
SM120 = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120"
ROPE = 64  # of packed fp8_ds_mla rows
TOPK = 2048  # index columns that FlashInfer's kernel is compiled for; the indexer's tail lies behind them


def probe(ctx: Context) -> Verdict:
    if not ctx.sources.has("vllm.models.glm5next"):
        return absent("this vLLM has no rope-free sparse-MLA model (the first came with 0.30.0)")
    if ctx.sources.has("vllm.models.glm5next.common.model"):
        reason = "from 0.31 vLLM stores rows without rope itself: a rope of zeros would only waste them"
        return impossible(reason) if ctx.wanted is True else absent(reason)
    if ctx.hardware.lacks(12):
        return absent(f"{ctx.hardware.architecture} is not of the 12.x family")
    return present("fp8_ds_mla rows need a rope of 64, and the model has none")


def pad_layer(module: ModuleType, ctx: Context) -> None:
    """The layer is built and called with a rope; the model, its projections and its indexer know nothing of it."""

    def init(wrapped: Any, layer: Any, args: tuple, kwargs: dict) -> None:
        from vllm.platforms import current_platform

        capability = current_platform.get_device_capability()
        ours = kwargs.get("use_sparse") and kwargs.get("qk_rope_head_dim") == 0 and kwargs.get("attn_backend") is None
        if ours and capability is not None and capability.major == 12:
            # The softmax scale is an argument of its own and stays qk_nope_head_dim ** -0.5.
            kwargs = {**kwargs, "qk_rope_head_dim": ROPE}
        wrapped(*args, **kwargs)

    def forward(wrapped: Any, layer: Any, args: tuple, kwargs: dict) -> Any:
        q, kv_c_normed, k_pe, *rest = args
        if layer.qk_rope_head_dim == ROPE and k_pe.shape[-1] == 0:
            q = module.torch.nn.functional.pad(q, (0, ROPE))
            k_pe = k_pe.new_zeros(*k_pe.shape[:-1], ROPE)
        return wrapped(q, kv_c_normed, k_pe, *rest, **kwargs)

    ctx.wrap(module, "MLAAttention.__init__", init)
    ctx.wrap(module, "MLAAttention.forward", forward)


def cut_index_rows(module: ModuleType, ctx: Context) -> None:
    def run(wrapped: Any, impl: Any, args: tuple, kwargs: dict) -> Any:
        q, kv_cache, indices = args
        return wrapped(q, kv_cache, keep_tail(indices) if indices.shape[1] > TOPK else indices, **kwargs)

    ctx.wrap(module, "FlashInferMLASparseSM120Impl._run_mqa_kernel", run)


def keep_tail(indices: Any) -> Any:
    """[T, > 2048] index rows as [T, 2048]: the newest tokens, behind column 2048, take the place of the last columns.

    There are up to three of them, and only where the row is longer than 2048: then its history is full, and three of
    2048 selected tokens give way. Fixed shapes and no sync, so it can be captured.
    """
    rows = indices[:, :TOPK].clone()
    tail = indices[:, TOPK : TOPK + 3]
    last = rows[:, -tail.shape[1] :]
    last.copy_(tail.where(tail >= 0, last))
    return rows


PATCH = Patch(
    id="rope_pad",
    title="vLLM 0.30 cannot store latent rows without rope on 12.x",
    why=(
        "0.30's one sparse-MLA backend for 12.x keeps packed fp8_ds_mla rows. Their writer wants a rope of 64 (`pe_dim "
        "must be 64 for fp8_ds_mla`), and its kernel takes 2048 index columns where the k-pool indexer writes 2176."
    ),
    how=(
        "Another way than the overlay's own backend, the one that early ports went: the attention layer is built for "
        "512 + 64, queries and keys get a rope of zeros, which adds nothing to any logit, and index rows are cut to "
        "2048 columns with the newest tokens kept. The model's configuration stays: a rope there would change the "
        "softmax scale and turn the indexer's keys. It costs 144 bytes a row and up to three selected tokens."
    ),
    upstream=("vllm-project/vllm#55277",),
    until="0.31, whose cache writer takes rows without rope",
    targets=(
        Target(MLA, "MLAAttention.__init__"),
        Target(MLA, "MLAAttention.forward", ("(self, q, kv_c_normed, k_pe, output_shape=..., q_dcp_replicated=...)",)),
        Target(SM120, "FlashInferMLASparseSM120Impl._run_mqa_kernel", ("(self, q, kv_cache, topk_indices_physical)",)),
    ),
    probe=probe,
    apply={MLA: pad_layer, SM120: cut_index_rows},
    default=False,
)
