"""What else computes sparse MLA on this machine. A peer that is not installed, or does not run here, says why."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from overlay.bench.cases import Case, Inputs
from overlay.kernel.variants import LATENT

Call = Callable[[], None]
# The torch peer writes the gathered rows out: 1 KB a column, so it is asked for few tokens.
TORCH_TOKENS = 128


@dataclass(frozen=True)
class Peer:
    """`prepare(case, calls)` returns one callable a call, or raises with the reason why it cannot."""

    name: str
    prepare: Callable[[Case, list[Inputs]], list[Call]]


class Unavailable(Exception):
    """This peer does not serve this case, or is not installed."""


def peers() -> Iterator[Peer]:
    yield Peer("torch", _torch)
    yield Peer("vllm_triton", _vllm_triton)
    yield Peer("flashinfer_fa2", lambda case, calls: _flashinfer("fa2", case, calls))
    yield Peer("flashinfer_fa3", lambda case, calls: _flashinfer("fa3", case, calls))


def _torch(case: Case, calls: list[Inputs]) -> list[Call]:
    """Gather, two matrix products and a softmax in bf16."""
    if case.tokens > TORCH_TOKENS:
        raise Unavailable(f"materialises the gathered rows: asked for {TORCH_TOKENS} tokens at most")

    def attend(call: Inputs) -> None:
        masked = call.indices < 0
        rows = call.kv.to(torch.bfloat16)[call.indices.clamp(min=0).long()]
        scores = torch.einsum("thd,tkd->thk", call.q, rows).float() * call.scale
        weights = scores.masked_fill(masked[:, None], float("-inf")).softmax(-1).to(torch.bfloat16)
        call.out.copy_(torch.einsum("thk,tkd->thd", weights, rows))

    return [lambda call=call: attend(call) for call in calls]


def _vllm_triton(case: Case, calls: list[Inputs]) -> list[Call]:
    """vLLM's portable Triton kernel for bf16 rows."""
    if case.kv_dtype != "bf16":
        raise Unavailable("bf16 rows only")
    try:
        from vllm.v1.attention.ops.xpu_mla_sparse import triton_bf16_mla_sparse_interface as kernel
    except ImportError as error:
        raise Unavailable(f"vLLM is not importable: {error}") from error

    def attend(call: Inputs) -> None:
        call.out.copy_(kernel(call.q, call.kv[:, None], call.indices[:, None], call.scale, LATENT, 0)[0])

    return [lambda call=call: attend(call) for call in calls]


def _flashinfer(backend: str, case: Case, calls: list[Inputs]) -> list[Call]:
    """FlashInfer's paged MLA with pages of one row, so that the index rows are the page table; no rope part."""
    if backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        raise Unavailable("FA3 uses instructions of capability 9.0 only")
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError as error:
        raise Unavailable(f"FlashInfer is not importable: {error}") from error
    return [_flashinfer_call(BatchMLAPagedAttentionWrapper, backend, case, call) for call in calls]


def _flashinfer_call(wrapper_class: type, backend: str, case: Case, call: Inputs) -> Call:
    device = call.q.device
    tokens = torch.arange(case.tokens + 1, dtype=torch.int32)
    lengths = torch.full((case.tokens,), case.valid, dtype=torch.int32)
    pages = call.indices[:, : case.valid].flatten()
    wrapper = wrapper_class(
        torch.empty(128 * 2**20, dtype=torch.uint8, device=device),
        use_cuda_graph=True,
        qo_indptr=tokens.to(device),
        kv_indptr=(tokens * case.valid).to(device),
        kv_indices=pages.clone(),
        kv_len_arr=lengths.to(device),
        backend=backend,
    )
    wrapper.plan(
        tokens, tokens * case.valid, pages, lengths, case.heads, LATENT, 0, 1, False, call.scale,
        q_data_type=torch.bfloat16, kv_data_type=call.kv.dtype,
    )  # fmt: skip
    no_rope = call.q.new_empty(case.tokens, case.heads, 0)
    rows, no_rope_rows = call.kv[:, None], call.kv.new_empty(call.kv.shape[0], 1, 0)
    return lambda: wrapper.run(call.q, no_rope, rows, no_rope_rows, out=call.out)
