"""What else computes sparse MLA on this machine. A peer that is not installed, or does not run here, says why."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from overlay.bench.cases import Case, Inputs
from overlay.kernel.variants import LATENT

Call = Callable[[], None]
# The torch peer writes the gathered rows out: 1 KB a column, so it is asked for few tokens.
TORCH_TOKENS = 128
# vLLM's own backend for 12.x: bytes of a row, rows of a page, bytes of its workspace.
SM120_ROW_BYTES, SM120_PAGE, SM120_WORKSPACE = 656, 64, 394 << 20


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
    yield Peer("flashinfer_sm120", _flashinfer_sm120)


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
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if case.kv_dtype == "fp8" else {}
    return lambda: wrapper.run(call.q, no_rope, rows, no_rope_rows, out=call.out, **scales)


def _flashinfer_sm120(case: Case, calls: list[Inputs]) -> list[Call]:
    """The kernel of vLLM's own backend for 12.x, called as FlashInferMLASparseSM120Impl calls it."""
    if torch.cuda.get_device_capability()[0] != 12:
        raise Unavailable("for capability 12.x only")
    if case.kv_dtype != "fp8":
        raise Unavailable("packed rows of e4m3 only")
    try:
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla as kernel
    except ImportError as error:
        raise Unavailable(f"FlashInfer is not importable: {error}") from error
    pages = packed(calls[0].kv).view(-1, 1, SM120_PAGE, SM120_ROW_BYTES)
    workspace = torch.zeros(SM120_WORKSPACE, dtype=torch.int8, device=pages.device)

    def attend(call: Inputs) -> None:
        kernel(
            query=call.q[:, None], kv_cache=pages, workspace_buffer=workspace,
            qk_nope_head_dim=256, kv_lora_rank=LATENT, qk_rope_head_dim=0,
            block_tables=call.indices[:, None], seq_lens=None, max_seq_len=case.columns, out=call.out[:, None],
            bmm1_scale=call.scale, bmm2_scale=1.0, sparse_mla_top_k=case.columns, kv_scale_format="arbitrary_fp32",
        )  # fmt: skip

    return [lambda call=call: attend(call) for call in calls]


def packed(kv: torch.Tensor) -> torch.Tensor:
    """e4m3 rows [n, 512] as fp8_ds_mla rows, uint8 [n, 656]: the codes, four fp32 scales of one, an empty rope part."""
    rows = torch.zeros(kv.shape[0], SM120_ROW_BYTES, dtype=torch.uint8, device=kv.device)
    rows[:, :LATENT] = kv.view(torch.uint8)
    rows[:, LATENT : LATENT + 16] = torch.ones(4, device=kv.device).view(torch.uint8)
    return rows
