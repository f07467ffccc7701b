"""Every difference between the vLLM releases that the backend serves (0.30 to 0.33), in one place.

Differences that a default argument absorbs are absorbed where they occur: `kv_cache_spec=None` of
`get_supported_kernel_block_sizes` (0.30 calls it without), `**kwargs` of the implementation's constructor.
"""

import dataclasses
import importlib

from vllm.v1.attention.backend import MLAAttentionImpl
from vllm.v1.kv_cache_interface import AttentionSpec

try:
    from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
except ImportError:  # before 0.32 the map is made on the host, so no captured graph can remake it
    compute_token_to_req_indices = None


def align_blocks_to_rows(spec: AttentionSpec) -> AttentionSpec:
    """Ask the planner for a block stride that is a whole number of latent rows.

    0.30 has no such field: its MLA cache is contiguous, so a block is a whole number of rows by itself.
    """
    if "block_stride_alignment" not in {field.name for field in dataclasses.fields(spec)}:
        return spec
    return dataclasses.replace(spec, block_stride_alignment=spec.state_content_size_bytes)


def profile_run_reserves() -> bool:
    """Whether the profile run calls `reserve_workspace` (from 0.33); before, it calls nothing of the implementation."""
    return hasattr(MLAAttentionImpl, "reserve_workspace")


def indexer_merges_over_dcp() -> bool:
    """Whether the model's indexer merges its ranks' selections under decode context parallelism (from 0.32).

    0.30 and 0.31 let every rank select from its own shard only, and say nothing.
    """
    try:
        indexer = importlib.import_module("vllm.models.glm5next.nvidia.sparse_indexer")
    except ModuleNotFoundError:
        return False
    return hasattr(indexer, "_merge_dcp_topk_global")
