"""The index kernel on the GPU against a loop in Python."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from overlay.kernel.launch import IndexRows  # noqa: E402
from tests.kernel.index_reference import index_rows_reference  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def inputs(tokens, width, requests, table_width, block_size, longest, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    return (
        draw(-3, longest + 5, (tokens, width)),
        draw(0, requests, (tokens,)),
        draw(0, longest + 1, (requests,)),
        draw(-1, 50, (requests, table_width)),
    )


def run(topk, request_of_token, lengths, table, block_size, stride, **dcp):
    kernel = IndexRows.load(torch.device(DEVICE))
    out = torch.full(topk.shape, 77, dtype=torch.int32, device=DEVICE)
    operands = (tensor.to(DEVICE) for tensor in (topk, request_of_token, lengths, table))
    kernel(*operands, block_size, stride, out, **dcp)
    return out.cpu()


@pytest.mark.parametrize(("block_size", "stride"), [(64, 64), (4352, 9009), (2304, 2304), (1, 3)])
@pytest.mark.parametrize("width", [1, 255, 2176])
def test_against_a_loop(block_size, stride, width):
    longest = 4 * block_size - 1
    operands = inputs(6, width, 4, 3, block_size, longest)
    expected = index_rows_reference(*operands, block_size, stride)
    assert torch.equal(run(*operands, block_size, stride), expected)
    assert block_size == 1 or width == 1 or (expected >= 0).any()


@pytest.mark.parametrize("interleave", [1, 16, 64])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_share_the_positions(size, interleave):
    operands = inputs(5, 700, 3, 6, 64, 4 * 64 * size)
    for rank in range(size):
        dcp = dict(dcp_size=size, dcp_rank=rank, dcp_interleave=interleave)
        expected = index_rows_reference(*operands, 64, 200, **dcp)
        assert torch.equal(run(*operands, 64, 200, **dcp), expected)


def test_stale_requests_of_a_padded_graph():
    topk, request_of_token, lengths, table = inputs(6, 300, 4, 3, 64, 180)
    request_of_token[3:] = torch.tensor([4, -1, 2**31 - 1], dtype=torch.int32)
    topk[4] = 2**31 - 1
    out = run(topk, request_of_token, lengths, table, 64, 64)
    assert (out[3:] == -1).all()
    assert torch.equal(out, index_rows_reference(topk, request_of_token, lengths, table, 64, 64))


def test_strided_rows_and_graph_capture():
    topk, request_of_token, lengths, table = inputs(6, 300, 4, 3, 64, 180)
    wide = torch.zeros(6, 400, dtype=torch.int32, device=DEVICE)[:, 50:350]
    wide.copy_(topk)
    wide_table = torch.full((4, 10), 9, dtype=torch.int32, device=DEVICE)[:, :3]
    wide_table.copy_(table)
    out = torch.full((6, 500), 5, dtype=torch.int32, device=DEVICE)
    kernel = IndexRows.load(torch.device(DEVICE))
    request_of_token, lengths = request_of_token.to(DEVICE), lengths.to(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(wide, request_of_token, lengths, wide_table, 64, 99, out[:, 100:400])
    graph.replay()
    expected = index_rows_reference(topk, request_of_token.cpu(), lengths.cpu(), table, 64, 99)
    assert torch.equal(out[:, 100:400].cpu(), expected)
    assert (out[:, :100] == 5).all() and (out[:, 400:] == 5).all()
    lengths.zero_()
    graph.replay()
    assert (out[:, 100:400] == -1).all()
