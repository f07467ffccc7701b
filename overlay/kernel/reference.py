"""What the kernel computes, in fp64 and plain torch: the independent reference of tests and benchmarks."""

import torch


def sparse_mla_reference(
    q: torch.Tensor,
    kv_rows: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    k_scale: float | torch.Tensor = 1.0,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every token over the rows that its index row names.

    Args:
        q: [T, H, D], any floating dtype.
        kv_rows: [rows, D]; float8_e4m3fn, or uint8 with the same codes, is multiplied by `k_scale`.
        indices: [T, K] integers; those outside [0, rows) contribute nothing.
        scale: factor of q . k before the softmax.
        k_scale: factor of the rows; 1 for bf16.
        chunk: tokens computed at a time, which bounds the memory: chunk * K * D fp64 numbers.

    Returns:
        out [T, H, D] and lse [T, H], both fp64; zeros and -inf for a token without a valid index.
    """
    tokens, heads, width = q.shape
    codes = kv_rows.view(torch.float8_e4m3fn) if kv_rows.dtype == torch.uint8 else kv_rows
    out = torch.zeros(tokens, heads, width, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for first in range(0, tokens, chunk):
        part = slice(first, first + chunk)
        index = indices[part].long()
        valid = (index >= 0) & (index < codes.shape[0])
        if not valid.any():
            continue
        rows = codes[torch.where(valid, index, index[valid][0])].double() * k_scale
        # A row that is not valid stands for nothing; the one read in its place is any that is.
        scores = torch.einsum("thd,tkd->thk", q[part].double(), rows) * scale
        scores = scores.masked_fill(~valid[:, None, :], -torch.inf)
        lse[part] = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse[part].masked_fill(~valid.any(dim=-1, keepdim=True), 0.0)[..., None])
        out[part] = torch.einsum("thk,tkd->thd", weights, rows)
    return out, lse
