"""What the kernels accept, checked before a launch: CuPy passes anything on, and the GPU reads what it is given.

Every check raises ValueError and names the argument. None synchronises or reads a tensor's contents.
"""

import torch

from overlay.kernel.variants import LATENT, MAX_COLUMNS

ALIGNMENT = 16  # bytes of the kernel's copies
ROW_TYPES = {"bf16": (torch.bfloat16,), "fp8": (torch.float8_e4m3fn, torch.uint8)}
INT32_MAX = 2**31 - 1


def check_tensor(name: str, tensor: torch.Tensor, device: torch.device, dtypes: tuple, shape: tuple) -> None:
    """Device, dtype and shape; None in `shape` stands for any size."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; the kernel was loaded for {device}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}, not {' or '.join(str(dtype) for dtype in dtypes)}")
    if tensor.dim() != len(shape) or any(
        want not in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not [{wanted}]")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Rows of the last dimension begin at multiples of 16 bytes and are contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"{name} is strided in its last dimension ({tensor.stride(-1)}); its rows must be contiguous")
    if tensor.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} begins at {tensor.data_ptr():#x}, which is not a multiple of {ALIGNMENT} bytes")
    for dimension in range(tensor.dim() - 1):
        stride = tensor.stride(dimension) * tensor.element_size()
        if stride % ALIGNMENT and tensor.shape[dimension] > 1:
            raise ValueError(f"{name}: stride {stride} bytes in dimension {dimension} is no multiple of {ALIGNMENT}")


def check_attention(
    device: torch.device,
    num_heads: int,
    kv_dtype: str,
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    k_scale: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """The arguments of the attention kernel, shapes as in its docstring."""
    check_tensor("q", q, device, (torch.bfloat16,), (None, num_heads, LATENT))
    tokens = q.shape[0]
    check_tensor("kv_rows", kv_rows, device, ROW_TYPES[kv_dtype], (None, LATENT))
    check_tensor("indices", indices, device, (torch.int32,), (tokens, None))
    check_tensor("out", out, device, (torch.bfloat16,), (tokens, num_heads, LATENT))
    for name, tensor in (("q", q), ("kv_rows", kv_rows), ("out", out)):
        check_rows(name, tensor)
    if kv_rows.shape[0] > INT32_MAX or kv_rows.stride(0) * kv_rows.element_size() > INT32_MAX:
        raise ValueError(f"kv_rows {tuple(kv_rows.shape)} with stride {kv_rows.stride(0)} is beyond 32-bit row numbers")
    if indices.shape[1] > MAX_COLUMNS:
        raise ValueError(f"indices has {indices.shape[1]} columns; the kernel takes up to {MAX_COLUMNS}")
    check_contiguous_columns("indices", indices)
    if any(out.stride(d) == 0 and out.shape[d] > 1 for d in range(2)):
        raise ValueError(f"out with strides {out.stride()} overlaps itself")
    if k_scale is not None:
        if kv_dtype != "fp8":
            raise ValueError("k_scale belongs to fp8 rows; this kernel reads bf16")
        if k_scale.device != device or k_scale.dtype != torch.float32 or k_scale.numel() != 1:
            raise ValueError(f"k_scale must be one float32 on {device}, not {k_scale.dtype} {tuple(k_scale.shape)}")
    if lse is not None:
        check_tensor("lse", lse, device, (torch.float32,), (tokens, num_heads))
        check_contiguous_columns("lse", lse)


def check_contiguous_columns(name: str, tensor: torch.Tensor) -> None:
    """Strided in rows only."""
    if tensor.stride(1) != 1 and tensor.shape[1] > 1:
        raise ValueError(f"{name} has stride {tensor.stride(1)} from column to column; its rows must be contiguous")


def check_workspace(workspace: torch.Tensor | None, device: torch.device, needed: int) -> None:
    """A contiguous uint8 tensor of at least `needed` bytes."""
    if needed == 0:
        return
    if workspace is None or workspace.device != device or workspace.dtype != torch.uint8 or workspace.dim() != 1:
        raise ValueError(f"workspace must be a one-dimensional uint8 tensor on {device}")
    if workspace.stride(0) != 1 or workspace.data_ptr() % ALIGNMENT:
        raise ValueError(f"workspace must be contiguous and begin at a multiple of {ALIGNMENT} bytes")
    if workspace.numel() < needed:
        raise ValueError(f"workspace has {workspace.numel()} bytes; this call needs {needed} (see workspace_bytes)")


def check_index_rows(
    device: torch.device,
    topk: torch.Tensor,
    req_id_per_token: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    block_stride_rows: int,
    out: torch.Tensor,
    dcp: tuple[int, int, int],
) -> None:
    """The arguments of the index kernel; `dcp` is (size, rank, interleave)."""
    int32 = (torch.int32,)
    check_tensor("topk", topk, device, int32, (None, None))
    check_tensor("req_id_per_token", req_id_per_token, device, int32, (topk.shape[0],))
    check_tensor("seq_lens", seq_lens, device, int32, (None,))
    check_tensor("block_table", block_table, device, int32, (None, None))
    check_tensor("out", out, device, int32, tuple(topk.shape))
    for name, tensor in (("topk", topk), ("block_table", block_table), ("out", out)):
        check_contiguous_columns(name, tensor)
    for name, tensor in (("req_id_per_token", req_id_per_token), ("seq_lens", seq_lens)):
        if tensor.numel() > 1 and tensor.stride(0) != 1:
            raise ValueError(f"{name} must be contiguous")
    if not 1 <= block_size <= INT32_MAX or not 0 <= block_stride_rows <= INT32_MAX:
        raise ValueError(f"block size {block_size} and block stride {block_stride_rows} rows must be positive")
    size, rank, interleave = dcp
    if size < 1 or not 0 <= rank < size or interleave < 1:
        raise ValueError(f"context parallelism of size {size}, rank {rank}, interleave {interleave} does not exist")
    if size > 1 and block_size % interleave:
        raise ValueError(f"block size {block_size} is not a multiple of the interleave size {interleave}")
