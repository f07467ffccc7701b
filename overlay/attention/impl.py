"""The forward pass: index rows to physical rows, one kernel for decode and prefill, in buffers of a fixed address."""

from typing import Any

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
)
from vllm.v1.attention.backend import AttentionLayer, AttentionType
from vllm.v1.worker.workspace import current_workspace_manager

from overlay.attention import compat
from overlay.attention.choice import BACKEND_NAME, KV_CACHE_DTYPES, LATENT_SIZE
from overlay.errors import OverlayError

_FP8_DTYPES = ("fp8", "fp8_e4m3")


class SparseMLAImpl(SparseMLACommonImpl[SparseMLACommonMetadata]):
    """One MLA layer. Every token of every batch, decode, draft or prefill, goes through `forward_mqa`."""

    supports_dense_mha_prefill: bool = False  # vLLM then plans no dense prefill and sends all tokens to forward_mqa
    supports_quant_query_input: bool = False  # queries stay bf16 beside fp8 rows
    supports_pcp: bool = False
    supports_dcp: bool = True
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    # Each draft token brings its own index row, so no interleaving of positions over ranks can mislead its mask.
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        indexer: object | None = None,
        topk_indices_buffer: torch.Tensor | None = None,
        index_group_builder: object | None = None,
        **mla_args: Any,
    ) -> None:
        _refuse(alibi_slopes=alibi_slopes, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap)
        _refuse(kv_sharing_target_layer_name=kv_sharing_target_layer_name)
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"{BACKEND_NAME} serves decoder attention, not {attn_type}")
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise NotImplementedError(
                f"{BACKEND_NAME} stores {', '.join(KV_CACHE_DTYPES)} rows, not {kv_cache_dtype}; "
                "fp8_ds_mla is served by vLLM's own backend"
            )
        # Given the indexer or its buffer, the base class would allocate a second index buffer for every layer
        # ([max_num_batched_tokens + 1, 2176] int32) and a side stream; physical rows are shared scratch here.
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        self.is_fp8 = kv_cache_dtype in _FP8_DTYPES
        # Under decode context parallelism a rank sees the heads of its whole group over its share of the rows.
        self.kernel_heads = num_heads * self.dcp_world_size

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Compile, load and warm the kernels: after the weights, before memory is profiled and graphs are captured."""
        super().process_weights_after_loading(act_dtype)
        tokens, width = self.topk_indices_buffer.shape
        self.kernel, self.index_rows = load_kernels(
            self.topk_indices_buffer.device, self.kernel_heads, "fp8" if self.is_fp8 else "bf16"
        )
        self.scratch_shapes = (
            ((tokens, width), torch.int32),
            ((self.kernel.workspace_bytes(tokens, width),), torch.uint8),
        )
        if not compat.profile_run_reserves():
            self.scratch()

    def reserve_workspace(self) -> None:
        """Called in the profile run, so that the memory planner counts the scratch."""
        self.scratch()

    def scratch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Physical index rows [max tokens, top-k width] int32 and the kernel's workspace, uint8.

        Both come from vLLM's workspace manager: one allocation for all layers of a worker (and for the indexer, which
        has finished with it by then), one for each micro-batch, fixed in place when it is locked after graph capture.
        The full size is asked for every time, so the second part always starts at the same offset.
        """
        index_rows, workspace = current_workspace_manager().get_simultaneous(*self.scratch_shapes)
        return index_rows, workspace

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from q [T, heads, 512] bf16 (or that and a rope part of width 0) to the rows that each token selected.

        Returns [T, heads, 512] bf16 and, under decode context parallelism, the natural-log LSE [T, heads] fp32: a token
        that owns no selected row on this rank gives exact zeros and -inf. The cache is [blocks, block size, 512].
        """
        query = q[0] if isinstance(q, tuple) else q
        tokens = query.shape[0]
        rows, block_size, block_stride_rows = row_view(kv_c_and_k_pe_cache)
        index_rows, workspace = self.scratch()
        index_rows = index_rows[:tokens]
        # Resolved now, not in the constructor: speculators point the indexer at another buffer after loading.
        self.index_rows(
            self.topk_indices_buffer[:tokens],
            attn_metadata.req_id_per_token[:tokens],
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            block_size,
            block_stride_rows,
            index_rows,
            dcp_size=self.dcp_world_size,
            dcp_rank=self.dcp_rank,
            # The engine settles it after the layers are built, so the constructor cannot know it.
            dcp_interleave=attn_metadata.cp_kv_cache_interleave_size,
        )
        out = query.new_empty(query.shape)
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        self.kernel(
            query,
            rows,
            index_rows,
            self.scale,
            out,
            workspace,
            k_scale=layer._k_scale if self.is_fp8 else None,
            lse=lse,
        )
        return out, lse


def load_kernels(device: torch.device, num_heads: int, kv_dtype: str) -> tuple[Any, Any]:
    """The attention kernel and the index translation for a device; CuPy is imported here and not before."""
    from overlay.kernel.launch import IndexRows, SparseMLA

    return SparseMLA.load(device, num_heads, kv_dtype), IndexRows.load(device)


def row_view(cache: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A paged cache [blocks, block size, 512] as rows [n, 512], with its block size and its block stride in rows.

    Other layers' pages lie between the blocks of a hybrid model, so the stride is not the block size; the rows between
    are in the view and no index names them. Raises OverlayError where a block is not a whole number of rows.
    """
    blocks, block_size, width = cache.shape
    stride, row_stride, column_stride = cache.stride()
    if (width, row_stride, column_stride) != (LATENT_SIZE, LATENT_SIZE, 1) or stride % LATENT_SIZE:
        raise OverlayError(
            f"{BACKEND_NAME}: a latent cache of shape {tuple(cache.shape)} and strides {cache.stride()} is not made of "
            f"rows of {LATENT_SIZE}; run with --attention-backend of vLLM's own, or OVERLAY_PATCHES=sparse_mla=false"
        )
    block_stride_rows = stride // LATENT_SIZE
    rows = cache.as_strided(((blocks - 1) * block_stride_rows + block_size, LATENT_SIZE), (LATENT_SIZE, 1))
    return rows, block_size, block_stride_rows


def _refuse(**features: object) -> None:
    asked = [name for name, value in features.items() if value]
    if asked:
        raise NotImplementedError(f"{BACKEND_NAME} does not support {', '.join(asked)}")
