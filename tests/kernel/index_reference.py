"""What the index kernel computes, position by position in plain Python."""

import torch


def index_rows_reference(
    topk, request_of_token, lengths, table, block_size, stride, dcp_size=1, dcp_rank=0, dcp_interleave=1
):
    """Rows [T, K] of request-local positions, -1 where a position names nothing written on this rank."""
    rows = torch.full(topk.shape, -1, dtype=torch.int32)
    requests, width = table.shape
    for token, request in enumerate(request_of_token.tolist()):
        if not 0 <= request < requests:
            continue
        for column, position in enumerate(topk[token].tolist()):
            if not 0 <= position < lengths[request]:
                continue
            group, offset = divmod(position, dcp_interleave)
            if group % dcp_size != dcp_rank:
                continue
            block, within = divmod(group // dcp_size * dcp_interleave + offset, block_size)
            if block < width and table[request, block] >= 0:
                rows[token, column] = table[request, block] * stride + within
    return rows
