"""Per-batch metadata: vLLM's own fields for sparse MLA, without the workspace of a dense prefill that never runs."""

from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec

from overlay.attention import compat


class SparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]):
    """Decode, speculative and prefill tokens are all one token with one index row, so nothing is planned per batch."""

    metadata_cls = SparseMLACommonMetadata
    # A replay needs only the device's tensors (lengths, tables, index rows) and the token count it was captured with.
    # Mixed batches would replay too, but no model with this attention can: its linear-attention layers allow uniform
    # decode batches at most, so more has never been run.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        # vLLM then captures all steps of a draft in one graph instead of building metadata between them.
        self.supports_draft_decode_metadata_update = (
            self.dcp_world_size == 1 and compat.compute_token_to_req_indices is not None
        )

    def update_draft_decode_metadata(self, metadata: SparseMLACommonMetadata) -> None:
        """Remake what a step of a captured draft changes: all else in `metadata` is a view of the runner's buffers."""
        tokens = metadata.num_decode_tokens
        if tokens:
            compat.compute_token_to_req_indices(metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens)

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: VllmConfig) -> int:
        """No rows: the base class gathers context here for a dense prefill, which this backend never runs.

        It would take 64 MiB of bf16 rows (65,536 of them) a group at common settings.
        """
        return 0
