"""What takes the place of GPU code on CPU tensors: the two kernels, the cache writer, and a few calls of vLLM's own."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from overlay.kernel.reference import sparse_mla_reference

LATENT = 512
E4M3_MAX = 448.0


class Kernel:
    """The attention kernel's interface over its fp64 reference; remembers what it was called with."""

    def __init__(self, num_heads: int, kv_dtype: str) -> None:
        self.num_heads = num_heads
        self.kv_dtype = kv_dtype
        self.calls: list[dict[str, Any]] = []

    def workspace_bytes(self, max_tokens: int, topk_width: int) -> int:
        return 4096 + 8 * max_tokens * self.num_heads

    def __call__(
        self,
        q: torch.Tensor,
        kv_rows: torch.Tensor,
        indices: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        workspace: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        splits: int | None = None,
    ) -> None:
        assert q.shape[1:] == (self.num_heads, LATENT) and q.dtype == torch.bfloat16
        assert kv_rows.dtype == (torch.float8_e4m3fn if self.kv_dtype == "fp8" else torch.bfloat16)
        assert kv_rows.shape[1] == LATENT and kv_rows.stride(1) == 1
        assert (k_scale is not None) == (self.kv_dtype == "fp8")
        assert indices.dtype == torch.int32 and indices.shape[0] == q.shape[0]
        self.calls.append({"indices": indices, "workspace": workspace, "width": indices.shape[1], "lse": lse})
        result, logsumexp = sparse_mla_reference(
            q, kv_rows, indices, scale, 1.0 if k_scale is None else k_scale.double(), chunk=8
        )
        out.copy_(result)
        if lse is not None:
            lse.copy_(logsumexp)


class IndexRows:
    """The index translation's interface: request-local positions to physical rows, -1 for what is out of bounds."""

    def __call__(
        self,
        topk: torch.Tensor,
        req_id_per_token: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        block_stride_rows: int,
        out: torch.Tensor,
        *,
        dcp_size: int = 1,
        dcp_rank: int = 0,
        dcp_interleave: int = 1,
    ) -> None:
        position, request = topk.long(), req_id_per_token.long()
        valid = (position >= 0) & (position < seq_lens.long()[request][:, None])
        valid &= position // dcp_interleave % dcp_size == dcp_rank
        local = position // (dcp_size * dcp_interleave) * dcp_interleave + position % dcp_interleave
        block = local // block_size
        valid &= block < block_table.shape[1]
        blocks = block_table.long()[request].gather(1, torch.where(valid, block, 0))
        out.copy_(torch.where(valid, blocks * block_stride_rows + local % block_size, -1))


def write_cache(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale=False) -> None:
    """`concat_and_cache_mla` for rope of width 0: one latent row to every slot that is not -1."""
    assert k_pe.shape[-1] == 0
    slots = slot_mapping.flatten()
    rows, slots = kv_c_normed[slots >= 0], slots[slots >= 0]
    if kv_cache_dtype.startswith("fp8"):
        rows = (rows.float() / k_scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = rows


def request_of_every_token(self, common_attn_metadata) -> torch.Tensor:
    """As vLLM's Triton kernel: tokens beyond the last request (padding of a CUDA graph) belong to request 0."""
    starts = common_attn_metadata.query_start_loc_cpu
    requests = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff()).int()
    mapped = torch.zeros(common_attn_metadata.num_actual_tokens, dtype=torch.int32)
    mapped[: len(requests)] = requests
    return mapped


def load_kernels(device: torch.device, num_heads: int, kv_dtype: str) -> tuple[Kernel, IndexRows]:
    return Kernel(num_heads, kv_dtype), IndexRows()


@contextmanager
def without_gpu() -> Iterator[None]:
    """Replace, for the block, exactly what needs a GPU."""
    from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonMetadataBuilder
    from vllm.platforms import current_platform
    from vllm.v1.worker import workspace

    from overlay.attention import impl

    properties = mock.Mock(multi_processor_count=48, major=12, minor=1)  # a GB10
    with ExitStack() as stack:

        def replace(owner: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(impl, "load_kernels", load_kernels)
        replace(impl.SparseMLAImpl, "do_kv_cache_update", write_cache)
        replace(SparseMLACommonMetadataBuilder, "_build_req_id_per_token", request_of_every_token)
        replace(torch.accelerator, "empty_cache", lambda: None)
        replace(torch.cuda, "Stream", mock.MagicMock())
        replace(torch.cuda, "get_device_properties", lambda device=None: properties)
        replace(type(current_platform), "device_type", "cpu")  # where models put the buffers that they allocate
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("vllm.") and "PIN_MEMORY" in vars(module):
                replace(module, "PIN_MEMORY", False)
        workspace.reset_workspace_manager()
        workspace.init_workspace_manager(torch.device("cpu"))
        yield
        workspace.reset_workspace_manager()
