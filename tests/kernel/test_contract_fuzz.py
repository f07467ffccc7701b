"""Any tensors at all: a call is launched within their memory, or refused with a ValueError before anything is."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from overlay.kernel.launch import IndexRows, SparseMLA
from overlay.kernel.variants import LATENT, variants_for
from tests.kernel import emulation
from tests.kernel.index_reference import index_rows_reference

CPU = torch.device("cpu")
FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
INT32 = st.integers(-(2**31), 2**31 - 1)


class Recorder:
    """Stands for a kernel: keeps what it was launched with."""

    def __init__(self):
        self.launches = []

    def __call__(self, grid, block, arguments, **options):
        self.launches.append((grid, block, arguments))


LAYOUTS = ("contiguous", "transposed", "padded", "offset", "expanded", "every second", "elsewhere")


def odd_ones(*names):
    """Which arguments are odd: mostly one, so that nothing else keeps a call from being made."""
    return st.lists(st.sampled_from(names), max_size=2)


@st.composite
def tensors(draw, shape, dtypes, odd):
    """Of this shape and the first of these dtypes; an odd one of about this shape and any dtype, laid out in any way.

    The storage is no larger than it must be.
    """
    if not odd:
        return torch.zeros(shape, dtype=dtypes[0])
    layout, dtype, shape = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(dtypes)), list(shape)
    what = draw(st.sampled_from(("layout", "layout", "shape", "dtype", "dimensions")))
    if what == "shape":
        shape = [max(0, size + draw(st.sampled_from((0, 0, -1, 1, 64)))) for size in shape]
    elif what == "dtype":
        dtype = draw(st.sampled_from((torch.float16, torch.float32, torch.int64, torch.uint8)))
    elif what == "dimensions":
        shape = shape[:-1] if draw(st.booleans()) else [*shape, 1]
    if layout == "elsewhere":
        return torch.empty(shape, dtype=dtype, device="meta")
    if layout == "expanded" and shape:
        return torch.zeros([1, *shape[1:]], dtype=dtype).expand(shape)
    if layout == "every second" and shape:
        return torch.zeros([*shape[:-1], 2 * shape[-1]], dtype=dtype)[..., ::2]
    if layout == "transposed" and len(shape) > 1:
        return torch.zeros([shape[1], shape[0], *shape[2:]], dtype=dtype).transpose(0, 1)
    if layout == "padded" and shape:
        pad = draw(st.sampled_from((1, 4, 8, 16)))
        return torch.zeros([*shape[:-1], shape[-1] + pad], dtype=dtype)[..., : shape[-1]]
    if layout == "offset":
        by, count = draw(st.integers(1, 9)), int(np.prod(shape))
        return torch.zeros(count + by, dtype=dtype)[by:].view(shape)
    return torch.zeros(shape, dtype=dtype)


def end_of(tensor):
    """The address after the tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes()


@FUZZ
@given(st.data())
def test_attention_is_launched_within_its_operands_or_refused(on_cpu, data):
    heads = data.draw(st.sampled_from((1, 8, 16, 24, 64, 72)))
    kv_dtype = data.draw(st.sampled_from(("bf16", "fp8")))
    odd = data.draw(odd_ones("q", "kv_rows", "indices", "out", "lse", "k_scale", "columns", "splits", "workspace"))
    tokens, columns = data.draw(st.integers(0, 5)), 8193 if "columns" in odd else data.draw(st.integers(0, 300))
    rows = (torch.bfloat16,) if kv_dtype == "bf16" else (torch.float8_e4m3fn, torch.uint8)
    q = data.draw(tensors((tokens, heads, LATENT), (torch.bfloat16,), "q" in odd))
    kv_rows = data.draw(tensors((data.draw(st.integers(0, 9)), LATENT), rows, "kv_rows" in odd))
    indices = data.draw(tensors((tokens, columns), (torch.int32,), "indices" in odd))
    out = data.draw(tensors((tokens, heads, LATENT), (torch.bfloat16,), "out" in odd))
    lse = data.draw(st.none() | tensors((tokens, heads), (torch.float32,), "lse" in odd))
    k_scale = None
    if kv_dtype == "fp8" or "k_scale" in odd:
        k_scale = data.draw(st.none() | tensors((1,), (torch.float32,), "k_scale" in odd))
    splits = data.draw(st.none() | (st.integers(-1, 34) if "splits" in odd else st.integers(1, 8)))
    room = data.draw(st.none() | st.integers(0, 1 << 16)) if "workspace" in odd else 16 << 20
    workspace = None if room is None else torch.empty(room, dtype=torch.uint8)
    main, merge = Recorder(), Recorder()
    kernel = SparseMLA(CPU, heads, kv_dtype, dict.fromkeys(variants_for(heads, kv_dtype), main), merge)
    try:
        kernel(q, kv_rows, indices, 1.0, out, workspace, k_scale=k_scale, lse=lse, splits=splits)
    except ValueError as refusal:
        assert str(refusal) and not main.launches and not merge.launches
        return
    assert q.shape == out.shape and q.shape[1:] == (heads, LATENT) and indices.shape[0] == q.shape[0]
    if q.shape[0] == 0:
        assert not main.launches
        return
    ((grid, _, given_arguments),) = main.launches  # so few tokens are one launch
    cut = kernel.plan(q.shape[0], indices.shape[1], splits)
    assert grid == cut.grid(q.shape[0]) and bool(merge.launches) == (cut.splits > 1)
    for tensor, row_bytes in ((q, 1024), (out, 1024), (kv_rows, LATENT * kv_rows.element_size())):
        strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        last = sum(s * (n - 1) for s, n in zip(strides, tensor.shape[:-1], strict=True))
        assert tensor.device == CPU and tensor.data_ptr() % 16 == 0
        assert tensor.numel() == 0 or tensor.data_ptr() + last + row_bytes <= end_of(tensor)
        assert all(stride % 16 == 0 for stride, n in zip(strides, tensor.shape[:-1], strict=True) if n > 1)
    assert indices.numel() == 0 or indices.data_ptr() + 4 * (
        indices.stride(0) * (indices.shape[0] - 1) + indices.shape[1]
    ) <= end_of(indices)
    assert indices.shape[1] < 2 or indices.stride(1) == 1
    if cut.splits > 1:
        needed = q.shape[0] * cut.splits * cut.head_blocks * (cut.variant.group_heads * (LATENT * 2 + 8) + 16)
        assert workspace.numel() >= needed == cut.partial_bytes(q.shape[0])
    assert given_arguments[0] == q.data_ptr() and given_arguments[3] == kv_rows.data_ptr()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_index_rows_are_translated_as_by_a_loop(on_cpu, library, data):
    """Positions, requests, lengths and block numbers of any value: rows within the request's blocks, or -1."""
    size = data.draw(st.sampled_from((1, 1, 2, 4)))
    interleave = data.draw(st.sampled_from((1, 4, 16)))
    block_size = interleave * data.draw(st.integers(1, 12))
    stride = data.draw(st.integers(0, 4) | st.integers(0, 2**20))
    tokens, requests = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 4))
    width, blocks = data.draw(st.integers(0, 9) | st.just(300)), data.draw(st.integers(0, 5))
    near = st.integers(-3, 3 * block_size * size + 3)

    def drawn(values, *shape):
        count = int(np.prod(shape))
        flat = data.draw(st.lists(values, min_size=min(count, 12), max_size=min(count, 12)))
        return torch.tensor((flat * (count // max(1, len(flat)) + 1))[:count], dtype=torch.int32).view(shape)

    topk, lengths = drawn(near | INT32, tokens, width), drawn(near | INT32, requests)
    request_of_token = drawn(st.integers(-1, 4) | INT32, tokens)
    table = drawn(st.integers(-1, 40) | st.integers(-(2**31), -1), requests, blocks)
    assume(stride * 41 + block_size < 2**31)
    kernel = IndexRows(CPU, emulation.EmulatedFunction(library, "index_rows", "index_rows"))
    out = torch.full((tokens, width + 2), 77, dtype=torch.int32)
    dcp = dict(dcp_size=size, dcp_rank=data.draw(st.integers(0, size - 1)), dcp_interleave=interleave)
    kernel(topk, request_of_token, lengths, table, block_size, stride, out[:, 1 : width + 1], **dcp)
    expected = index_rows_reference(topk, request_of_token, lengths, table, block_size, stride, **dcp)
    assert torch.equal(out[:, 1 : width + 1], expected)
    assert (out[:, 0] == 77).all() and (out[:, -1] == 77).all()


@FUZZ
@given(st.data())
def test_index_kernel_is_launched_on_what_it_takes_or_refused(on_cpu, data):
    tokens, requests, width = (data.draw(st.integers(0, 5)) for _ in range(3))
    odd = data.draw(odd_ones("topk", "out", "requests", "lengths", "table", "sizes", "dcp"))
    topk, out = (data.draw(tensors((tokens, width), (torch.int32,), name in odd)) for name in ("topk", "out"))
    request_of_token = data.draw(tensors((tokens,), (torch.int32,), "requests" in odd))
    lengths = data.draw(tensors((requests,), (torch.int32,), "lengths" in odd))
    table = data.draw(tensors((requests, 3), (torch.int32,), "table" in odd))
    strange = st.sampled_from((-(2**40), -1, 0, 2**31 - 1, 2**31))
    sizes = [data.draw(strange if "sizes" in odd else st.integers(1, 300)) for _ in range(2)]
    dcp = {"dcp_size": 1, "dcp_rank": 0, "dcp_interleave": 1}
    if "dcp" in odd:
        dcp = {name: data.draw(st.integers(-1, 4)) for name in dcp}
    function = Recorder()
    try:
        IndexRows(CPU, function)(topk, request_of_token, lengths, table, *sizes, out, **dcp)
    except ValueError as refusal:
        assert str(refusal) and not function.launches
        return
    assert 1 <= sizes[0] < 2**31 and 0 <= sizes[1] < 2**31 and 0 <= dcp["dcp_rank"] < dcp["dcp_size"]
    assert request_of_token.shape == topk.shape[:1] and {t.device for t in (topk, out, table, lengths)} == {CPU}
    for tensor in (request_of_token, lengths):
        assert tensor.numel() < 2 or tensor.stride() == (1,)
    for tensor in (topk, out, table):
        assert tensor.shape[1] < 2 or tensor.stride(1) == 1
    assert topk.shape == out.shape and {t.dtype for t in (topk, out, table, lengths)} == {torch.int32}
    assert len(function.launches) == (topk.numel() > 0)
    for _, _, arguments in function.launches:
        assert arguments[4] <= min(lengths.shape[0], table.shape[0]), "the kernel bounds requests by this"


@pytest.mark.parametrize("sm_count", [1, 2, 20])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_few_multiprocessors_are_enough(emulated, kv_dtype, sm_count):
    """Smaller than any card: the plan still covers every column once."""
    from overlay.kernel.reference import sparse_mla_reference

    kernel = emulated(16, kv_dtype)
    kernel.sm_count = sm_count
    generator = torch.Generator().manual_seed(sm_count)
    q = torch.randn(2, 16, LATENT, generator=generator).to(torch.bfloat16)
    rows = torch.randn(99, LATENT, generator=generator).to(
        torch.bfloat16 if kv_dtype == "bf16" else torch.float8_e4m3fn
    )
    indices = torch.randint(-9, 99, (2, 190), generator=generator, dtype=torch.int32)
    out, lse = torch.full_like(q, torch.nan), torch.full((2, 16), torch.nan)
    workspace = torch.empty(max(16, kernel.workspace_bytes(2, 190)), dtype=torch.uint8)
    kernel(q, rows, indices, LATENT**-0.5, out, workspace, lse=lse)
    expected, expected_lse = sparse_mla_reference(q, rows, indices, LATENT**-0.5)
    assert ((out.double() - expected).norm() / expected.norm()).item() <= 3e-3
    assert (lse - expected_lse).abs().max() <= 1e-5
