"""Launching: the two kernels as callables on torch tensors.

A call checks its arguments, computes a plan from their shapes and launches on torch's current stream. It allocates
nothing and never synchronises, so it can be captured into a CUDA graph and replayed with other contents.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from overlay.kernel import contract
from overlay.kernel import plan as planning
from overlay.kernel.build import attention_program, index_rows_program, merge_program
from overlay.kernel.early import EarlyFunction, EarlyStartRefused, starting_early
from overlay.kernel.errors import KernelError
from overlay.kernel.load import allow_shared, cuda_device, cupy_stream, load_function
from overlay.kernel.plan import Part, Plan
from overlay.kernel.variants import LATENT, MERGE_WARP_BYTES, Variant, variants_for
from overlay.log import logger


class SparseMLA:
    """Sparse MLA attention without rope on one device, for one head count and KV dtype."""

    def __init__(
        self, device: torch.device, num_heads: int, kv_dtype: str, functions: Mapping[Variant, Any], merge: Any
    ) -> None:
        """`functions`: every variant of `variants_for`, loaded."""
        self.device = device
        self.num_heads = num_heads
        self.kv_dtype = kv_dtype
        self.sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        self.shared_bytes = {variant: variant.shared_bytes for variant in functions}
        self._functions = functions
        self._merge = merge

    @staticmethod
    def load(device: torch.device, num_heads: int, kv_dtype: str) -> "SparseMLA":
        """Compile or read from the cache, load, and run once; the second call with the same arguments is free.

        Head counts that no variant has are padded; above 64 (32 with fp8) several blocks share the heads.

        Raises:
            ValueError: no heads, or a KV dtype other than "bf16" and "fp8".
            KernelError: no suitable GPU, compiler or driver, or a GPU that computes something else.
        """
        variants_for(num_heads, kv_dtype)
        return _load_attention(cuda_device(torch.device(device)), num_heads, kv_dtype)

    def reserve_shared(self, sizes: Mapping[Variant, int]) -> None:
        """Launch with these bytes of dynamic shared memory instead of what the variants need.

        More of it lets fewer blocks share a multiprocessor: the bench holds other GPUs to the occupancy of sm_12x.
        """
        for variant, size in sizes.items():
            allow_shared(self._functions[variant], size)
            self.shared_bytes[variant] = size

    @property
    def merge_starts_early(self) -> bool:
        """Whether the merge's blocks take their places while the main kernel still runs."""
        return isinstance(self._merge, EarlyFunction)

    def parts(
        self, tokens: int, columns: int, splits: int | None = None, variant: Variant | None = None
    ) -> tuple[Part, ...]:
        """The launches of a call; one where `splits` or `variant` is forced."""
        if splits is None and variant is None:
            return planning.parts(self.num_heads, self.kv_dtype, tokens, columns, self.sm_count)
        return (Part(0, tokens, self.plan(tokens, columns, splits, variant)),)

    def plan(self, tokens: int, columns: int, splits: int | None = None, variant: Variant | None = None) -> Plan:
        """How one launch is cut into blocks; `splits` and `variant` force what is else chosen."""
        return planning.plan(self.num_heads, self.kv_dtype, tokens, columns, self.sm_count, splits, variant)

    def workspace_bytes(self, max_tokens: int, topk_width: int) -> int:
        """Bytes for the partial results of any call of up to `max_tokens` rows of `topk_width` columns."""
        return planning.workspace_bytes(self.num_heads, self.kv_dtype, max_tokens, topk_width, self.sm_count)

    def __call__(
        self,
        q: torch.Tensor,
        kv_rows: torch.Tensor,
        indices: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        workspace: torch.Tensor | None,
        *,
        k_scale: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        splits: int | None = None,
        variant: Variant | None = None,
    ) -> None:
        """Write `out`, and `lse` where it is given.

        Args:
            q: [T, H, 512] bf16, strided in T and H by multiples of 16 bytes.
            kv_rows: [rows, 512] bf16, or e4m3 (float8_e4m3fn or uint8); rows a multiple of 16 bytes apart.
            indices: [T, K] int32, K up to 8192; what is not in [0, rows) contributes nothing and is not read.
            scale: factor of q . k before the softmax.
            out: [T, H, 512] bf16; every element is written, zeros where a token has no valid index.
            workspace: uint8, at least `workspace_bytes`; contents do not matter. None is enough where no part of the
                call is split, as with `splits=1`.
            k_scale: one float32 on the device, the factor of e4m3 rows; 1 if left out.
            lse: [T, H] float32, natural log of the sum of exponentials; -inf where a token has no valid index.
            splits: forces the number of blocks that share an index row, 1 to 72, in one launch for all tokens.
            variant: forces one of `variants_for`, in one launch.

        Raises:
            ValueError: an argument breaks the contract; nothing was launched.
        """
        contract.check_attention(self.device, self.num_heads, self.kv_dtype, q, kv_rows, indices, out, k_scale, lse)
        tokens, columns = indices.shape
        if tokens == 0:
            return
        parts = self.parts(tokens, columns, splits, variant)
        room = max(part.plan.partial_bytes(part.tokens) for part in parts)
        contract.check_workspace(workspace, self.device, room)
        stream = cupy_stream(torch.cuda.current_stream(self.device).cuda_stream)
        for part in parts:
            plan = part.plan
            split = plan.splits > 1
            partial_outputs = workspace.data_ptr() if split else 0
            partial_sums = partial_outputs + plan.output_bytes(part.tokens) if split else 0
            out_pointer, out_strides = _from(out, part), (out.stride(0) * 2, out.stride(1) * 2)
            lse_pointer, lse_stride = (0, 0) if lse is None else (_from(lse, part), lse.stride(0))
            self._functions[plan.variant](
                plan.grid(part.tokens),
                (plan.variant.threads,),
                (
                    _from(q, part),
                    q.stride(0) * 2,
                    q.stride(1) * 2,
                    kv_rows.data_ptr(),
                    np.uint32(kv_rows.stride(0) * kv_rows.element_size()),
                    np.int32(kv_rows.shape[0]),
                    _from(indices, part),
                    indices.stride(0),
                    np.int32(columns),
                    np.int32(plan.split_columns),
                    np.int32(self.num_heads),
                    np.int32(plan.head_blocks),
                    np.float32(scale * math.log2(math.e)),
                    0 if k_scale is None else k_scale.data_ptr(),
                    out_pointer,
                    *out_strides,
                    lse_pointer,
                    lse_stride,
                    partial_outputs,
                    partial_sums,
                ),
                shared_mem=self.shared_bytes[plan.variant],
                stream=stream,
            )
            if not split:
                continue
            self._merge(
                plan.merge_grid(part.tokens),
                (32 * plan.merge_warps,),
                (
                    partial_outputs,
                    partial_sums,
                    np.int32(plan.splits),
                    np.int32(plan.sharers),
                    np.int32(plan.units),
                    np.int32(plan.variant.group_heads),
                    np.int32(self.num_heads),
                    np.int32(plan.head_blocks),
                    np.int32(self.kv_dtype == "fp8"),
                    out_pointer,
                    *out_strides,
                    lse_pointer,
                    lse_stride,
                ),
                shared_mem=plan.merge_warps * MERGE_WARP_BYTES,
                stream=stream,
            )


class IndexRows:
    """Translation of request-local token positions to rows of the flat view of the KV cache, on one device."""

    def __init__(self, device: torch.device, function: Any) -> None:
        self.device = device
        self._function = function

    @staticmethod
    def load(device: torch.device) -> "IndexRows":
        """Compile or read from the cache, load, and run once; the second call for a device is free."""
        return _load_index_rows(cuda_device(torch.device(device)))

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
        """Write `out`: the row of every position that names a written token of this rank, else -1.

        Args:
            topk: [T, K] int32 positions within a request; rows may be strided.
            req_id_per_token: [T] int32; outside [0, R) (padding of a CUDA graph) the whole row becomes -1.
            seq_lens: [R] int32, tokens of the request over all ranks; positions at or beyond it become -1.
            block_table: [R, W] int32 block numbers, negative where there is none; rows may be strided.
            block_size: tokens of a block; any number.
            block_stride_rows: rows of the flat view from block to block, at least `block_size` where layers interleave.
            out: [T, K] int32; rows may be strided.
            dcp_size, dcp_rank, dcp_interleave: decode context parallelism. Groups of `dcp_interleave` positions go
                to the ranks in turn, as vLLM's cp_kv_cache_interleave_size has it.

        Raises:
            ValueError: an argument breaks the contract; nothing was launched.
        """
        dcp = (dcp_size, dcp_rank, dcp_interleave)
        contract.check_index_rows(
            self.device, topk, req_id_per_token, seq_lens, block_table, block_size, block_stride_rows, out, dcp
        )
        tokens, columns = topk.shape
        if tokens == 0 or columns == 0:
            return
        self._function(
            (tokens,),
            (256,),
            (
                topk.data_ptr(),
                topk.stride(0),
                req_id_per_token.data_ptr(),
                seq_lens.data_ptr(),
                np.int32(min(seq_lens.shape[0], block_table.shape[0])),
                block_table.data_ptr(),
                block_table.stride(0),
                np.int32(block_table.shape[1]),
                np.uint32(block_size),
                np.int32(block_stride_rows),
                np.uint32(dcp_size),
                np.uint32(dcp_rank),
                np.uint32(dcp_interleave),
                out.data_ptr(),
                out.stride(0),
                np.int32(columns),
            ),
            stream=cupy_stream(torch.cuda.current_stream(self.device).cuda_stream),
        )


def _from(tensor: torch.Tensor, part: Part) -> int:
    """Address of the first token of a part: a slice of the tensor would cost host time."""
    return tensor.data_ptr() + part.first * tensor.stride(0) * tensor.element_size()


@cache
def _load_attention(device: torch.device, num_heads: int, kv_dtype: str) -> SparseMLA:
    functions = {
        variant: load_function(device, attention_program(variant)) for variant in variants_for(num_heads, kv_dtype)
    }
    merge = load_function(device, merge_program())
    kernel = SparseMLA(device, num_heads, kv_dtype, functions, starting_early(merge, device))
    try:
        for variant in functions:
            _try_attention(kernel, variant)
    except EarlyStartRefused as refusal:
        logger.warning("sparse-MLA kernel: %s; its merge starts after the main kernel, a microsecond later", refusal)
        kernel = SparseMLA(device, num_heads, kv_dtype, functions, merge)
        for variant in functions:
            _try_attention(kernel, variant)
    return kernel


@cache
def _load_index_rows(device: torch.device) -> IndexRows:
    kernel = IndexRows(device, load_function(device, index_rows_program()))
    one = torch.ones(1, dtype=torch.int32, device=device)
    out = torch.empty(1, 1, dtype=torch.int32, device=device)
    kernel(torch.zeros_like(out), torch.zeros_like(one), one, one.view(1, 1), 3, 5, out)
    if out.item() != 5:
        raise KernelError(f"index_rows computes {out.item()} instead of 5 on {torch.cuda.get_device_name(device)}")
    return kernel


def _try_attention(kernel: SparseMLA, variant: Variant) -> None:
    """Run one variant, and the merge, once: a captured graph must not meet a function that the driver has yet to load.

    A softmax over one row is that row, to the last bit, so this is also a check of the GPU and of the driver.
    """
    device, heads = kernel.device, kernel.num_heads
    row = torch.linspace(-4, 4, LATENT, device=device).to(torch.bfloat16)
    kv_rows = row.view(1, LATENT)
    if kernel.kv_dtype == "fp8":
        kv_rows = kv_rows.to(torch.float8_e4m3fn)
        row = kv_rows.to(torch.bfloat16).view(LATENT)
    q = torch.ones(1, heads, LATENT, dtype=torch.bfloat16, device=device)
    indices = torch.tensor([[-1] * 32 + [0] + [-1] * 31], dtype=torch.int32, device=device)
    plan = kernel.plan(1, 64, splits=2, variant=variant)
    workspace = torch.empty(plan.partial_bytes(1), dtype=torch.uint8, device=device)
    for splits in (1, 2):
        out = torch.empty_like(q)
        kernel(q, kv_rows, indices, 1.0 / LATENT, out, workspace, splits=splits, variant=variant)
        if not torch.equal(out, row.expand_as(out)):
            raise KernelError(
                f"{variant.name} computes a wrong result on {torch.cuda.get_device_name(device)} "
                f"({splits} splits): please report this with the driver's version"
            )
