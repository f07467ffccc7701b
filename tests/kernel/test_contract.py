"""Arguments that the kernels do not take, each refused by name before anything is launched."""

import pytest
import torch

from overlay.kernel import contract
from overlay.kernel.launch import IndexRows, SparseMLA
from overlay.kernel.variants import variants_for

CPU = torch.device("cpu")


class NeverCalled:
    def __call__(self, *args, **kwargs):
        raise AssertionError("launched")


@pytest.fixture
def kernel(on_cpu):
    return SparseMLA(CPU, 16, "bf16", dict.fromkeys(variants_for(16, "bf16"), NeverCalled()), NeverCalled())


def arguments(**changed):
    given = dict(
        q=torch.zeros(4, 16, 512, dtype=torch.bfloat16),
        kv_rows=torch.zeros(10, 512, dtype=torch.bfloat16),
        indices=torch.zeros(4, 64, dtype=torch.int32),
        scale=1.0,
        out=torch.zeros(4, 16, 512, dtype=torch.bfloat16),
        workspace=torch.zeros(16 << 20, dtype=torch.uint8),
    )
    given.update(changed)
    return given


def shifted(*shape, by=1):
    """A contiguous bf16 tensor that begins `by` elements after a multiple of 16 bytes."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + by, dtype=torch.bfloat16)[by:].view(shape)


bf16 = torch.bfloat16
REFUSED = {
    "q has dtype torch.float16": dict(q=torch.zeros(4, 16, 512, dtype=torch.float16)),
    r"q has shape \(4, 8, 512\)": dict(q=torch.zeros(4, 8, 512, dtype=bf16)),
    r"q has shape \(4, 16, 576\)": dict(q=torch.zeros(4, 16, 576, dtype=bf16)),
    "q is strided in its last dimension": dict(q=torch.zeros(4, 16, 1024, dtype=bf16)[:, :, ::2]),
    "q begins at .* not a multiple of 16": dict(q=shifted(4, 16, 512)),
    "q: stride 1026 bytes in dimension 1": dict(q=torch.zeros(4, 16, 513, dtype=bf16)[:, :, :512]),
    "kv_rows has dtype torch.uint8": dict(kv_rows=torch.zeros(10, 512, dtype=torch.uint8)),
    "kv_rows: stride 1032 bytes": dict(kv_rows=torch.zeros(10, 516, dtype=bf16)[:, :512]),
    "kv_rows begins at": dict(kv_rows=shifted(10, 512, by=4)),
    "indices has dtype torch.int64": dict(indices=torch.zeros(4, 64, dtype=torch.int64)),
    r"indices has shape \(3, 64\)": dict(indices=torch.zeros(3, 64, dtype=torch.int32)),
    "indices has stride 2": dict(indices=torch.zeros(4, 128, dtype=torch.int32)[:, ::2]),
    "indices has 8193 columns": dict(indices=torch.zeros(4, 8193, dtype=torch.int32)),
    r"out has shape": dict(out=torch.zeros(4, 16, 256, dtype=bf16)),
    "out with strides .* overlaps itself": dict(out=torch.zeros(1, 16, 512, dtype=bf16).expand(4, 16, 512)),
    "out begins at": dict(out=shifted(4, 16, 512, by=2)),
    "lse has dtype torch.float64": dict(lse=torch.zeros(4, 16, dtype=torch.float64)),
    r"lse has shape \(16, 4\)": dict(lse=torch.zeros(16, 4)),
    "k_scale belongs to fp8 rows": dict(k_scale=torch.ones(1)),
    "73 splits": dict(splits=73),
    "0 splits": dict(splits=0),
    "workspace must be a one-dimensional uint8": dict(workspace=torch.zeros(1 << 20), splits=2),
    "workspace must be a .* on cpu": dict(workspace=None, splits=2),
    r"workspace has 1024 bytes; this call needs \d+": dict(workspace=torch.zeros(1024, dtype=torch.uint8), splits=2),
    "workspace must be contiguous": dict(workspace=torch.zeros(9 << 20, dtype=torch.uint8)[1:], splits=2),
    "q is on meta": dict(q=torch.zeros(4, 16, 512, dtype=bf16, device="meta")),
}


@pytest.mark.parametrize("message", REFUSED)
def test_attention_arguments(kernel, message):
    with pytest.raises(ValueError, match=message):
        kernel(**arguments(**REFUSED[message]))


@pytest.mark.parametrize("k_scale", [torch.ones(2), torch.ones(1, dtype=torch.float64)])
def test_k_scale_is_one_float32(on_cpu, k_scale):
    kernel = SparseMLA(CPU, 16, "fp8", dict.fromkeys(variants_for(16, "fp8"), NeverCalled()), NeverCalled())
    rows = torch.zeros(10, 512, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="k_scale must be one float32"):
        kernel(**arguments(kv_rows=rows, k_scale=k_scale))


def test_no_tokens_is_no_launch_and_no_error(kernel):
    kernel(
        **arguments(
            q=torch.zeros(0, 16, 512, dtype=bf16),
            indices=torch.zeros(0, 64, dtype=torch.int32),
            out=torch.zeros(0, 16, 512, dtype=bf16),
            workspace=None,
        )
    )


def test_rows_2_gib_apart_are_refused():
    meta = torch.device("meta")
    tensors = {name: value.to(meta) for name, value in arguments().items() if isinstance(value, torch.Tensor)}
    far = torch.empty_strided((2, 512), (2**30, 1), dtype=bf16, device=meta)
    operands = (tensors["q"], far, tensors["indices"], tensors["out"])
    with pytest.raises(ValueError, match="beyond 32-bit row numbers"):
        contract.check_attention(meta, 16, "bf16", *operands, None, None)


INDEX_REFUSED = {
    "topk has dtype": dict(topk=torch.zeros(4, 64, dtype=torch.int64)),
    r"req_id_per_token has shape \(3,\)": dict(req_id_per_token=torch.zeros(3, dtype=torch.int32)),
    "out has shape": dict(out=torch.zeros(4, 63, dtype=torch.int32)),
    "block_table has stride": dict(block_table=torch.zeros(8, 2, dtype=torch.int32).t()),
    "seq_lens must be contiguous": dict(seq_lens=torch.zeros(4, dtype=torch.int32)[::2]),
    "block size 0": dict(block_size=0),
    "rank 2": dict(dcp_size=2, dcp_rank=2),
    "size 0": dict(dcp_size=0),
    "not a multiple of the interleave size 3": dict(dcp_size=2, dcp_interleave=3),
}


@pytest.mark.parametrize("message", INDEX_REFUSED)
def test_index_arguments(on_cpu, message):
    given = dict(
        topk=torch.zeros(4, 64, dtype=torch.int32),
        req_id_per_token=torch.zeros(4, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32),
        block_table=torch.zeros(2, 8, dtype=torch.int32),
        block_size=64,
        block_stride_rows=64,
        out=torch.zeros(4, 64, dtype=torch.int32),
    )
    given.update(INDEX_REFUSED[message])
    with pytest.raises(ValueError, match=message):
        IndexRows(CPU, NeverCalled())(**given)
