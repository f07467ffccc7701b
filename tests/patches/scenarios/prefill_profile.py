"""vLLM's real MLAAttention.forward_impl on meta tensors: what it allocates when profiling, and when it really runs."""

import importlib
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overlay.attention.choice import BACKEND_NAME
from overlay.patches.prefill_profile import MLA
from tests.patches import harness

LATENT, NOPE, V = 512, 256, 256


class Allocations(TorchDispatchMode):
    """Bytes of every tensor that is made by an `empty` of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__ and isinstance(result, torch.Tensor):
            self.sizes.append(math.prod(result.shape) * result.element_size())
        return result


def layer(module: Any, heads: int, tokens: int, backend: str, prefill_backend: object, ranks: int = 1) -> Any:
    """A layer with the attributes that forward_impl reads; everything that it computes itself is vLLM's."""
    made = object.__new__(module.MLAAttention)
    torch.nn.Module.__init__(made)
    impl = SimpleNamespace(
        is_sparse=True, dcp_world_size=1, supports_quant_query_input=False, reserve_workspace=lambda: None,
        forward_mqa=lambda q, cache, metadata, layer: (torch.empty_like(q[0]), None),
    )  # fmt: skip
    model = SimpleNamespace(max_model_len=262144, hf_text_config=SimpleNamespace(index_topk=2048))
    config = SimpleNamespace(
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens, max_num_seqs=4),
        cache_config=SimpleNamespace(block_size=4352),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
    )
    made.__dict__.update(
        impl=impl, attn_backend=SimpleNamespace(get_name=lambda: backend), prefill_backend=prefill_backend,
        _vllm_config=config, _chunked_prefill_workspace_size=None, num_heads=heads, kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE, qk_rope_head_dim=0, v_head_dim=V, kv_cache_dtype="auto", use_pcp=False,
        q_pad_num_heads=None, hisparse_cache=None, is_aiter_triton_fp4_bmm_enabled=False,
        is_aiter_triton_fp8_bmm_enabled=False, is_amx_bmm_enabled=False, dcp_manager=None,
        W_UK_T=torch.empty(heads, NOPE, LATENT, dtype=torch.bfloat16, device="meta"),
        W_UV=torch.empty(heads, LATENT, V, dtype=torch.bfloat16, device="meta"),
    )  # fmt: skip
    return made


def allocated(made: Any, tokens: int, profiling: bool) -> list[int]:
    """Sizes in bytes of what forward_impl allocates for `tokens` tokens of one prefill."""
    q = torch.empty(tokens, made.num_heads, NOPE, dtype=torch.bfloat16, device="meta")
    latent = torch.empty(tokens, LATENT, dtype=torch.bfloat16, device="meta")
    rope = torch.empty(tokens, 1, 0, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(4, 64, LATENT, dtype=torch.bfloat16, device="meta")
    output = torch.empty(tokens, made.num_heads * V, dtype=torch.bfloat16, device="meta")
    metadata = SimpleNamespace(
        num_actual_tokens=tokens, num_decodes=0, num_prefills=1, num_decode_tokens=0, prefill=None
    )
    with Allocations() as log:
        made.forward_impl(q, latent, rope, cache, None if profiling else metadata, output)
    return log.sizes


def profile(module: Any, **described: Any) -> int:
    return sum(allocated(layer(module, **described), 64, profiling=True))


def measure(module: Any) -> dict[str, int]:
    dense = object()
    return {
        "ours, 64 heads": profile(module, heads=64, tokens=8192, backend=BACKEND_NAME, prefill_backend=None),
        "ours, 32 heads": profile(module, heads=32, tokens=2048, backend=BACKEND_NAME, prefill_backend=None),
        "ours, 32 heads, dcp 2": profile(
            module, heads=32, tokens=2048, backend=BACKEND_NAME, prefill_backend=None, ranks=2
        ),
        "native": profile(module, heads=64, tokens=8192, backend="FLASHINFER_MLA_SPARSE_SM120", prefill_backend=None),
        "with a dense prefill": profile(module, heads=64, tokens=8192, backend=BACKEND_NAME, prefill_backend=dense),
    }


def run() -> dict[str, Any]:
    module = importlib.import_module(MLA)
    wrapped = measure(module)
    forward = {
        f"{heads} heads": sum(allocated(layer(module, heads, tokens, BACKEND_NAME, None), tokens, profiling=False))
        for heads, tokens in ((64, 8192), (32, 2048))
    }
    with harness.without("prefill_profile"):
        stock = measure(module)
    return {"wrapped": wrapped, "stock": stock, "forward": forward}
