"""Memory that a sparse MLA layer asks for in the profile run and never again. CPU only: python profile_memory.py

`MLAAttention.forward_impl` runs on meta tensors, as a layer without a dense prefill, which is what it is with
FLASHINFER_MLA_SPARSE_SM120.
"""

import math
from importlib.metadata import version
from types import SimpleNamespace

HEADS, LATENT, NOPE, VALUE, TOKENS = 32, 512, 256, 256, 2048  # GLM-5.3-Flash at TP 2


def sparse_layer():
    """The attributes that forward_impl reads; everything it computes is its own."""
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    def meta(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    layer = object.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    layer.__dict__.update(
        impl=SimpleNamespace(
            is_sparse=True,
            dcp_world_size=1,
            supports_quant_query_input=False,
            reserve_workspace=lambda: None,
            forward_mqa=lambda q, cache, metadata, layer: (torch.empty_like(q[0]), None),
        ),
        prefill_backend=None,  # what MLAAttention.__init__ sets for supports_dense_mha_prefill = False
        _vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=262_144),
            scheduler_config=SimpleNamespace(max_num_seqs=16),
            cache_config=SimpleNamespace(block_size=4352),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
            ),
        ),
        _chunked_prefill_workspace_size=None,
        num_heads=HEADS,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=0,
        v_head_dim=VALUE,
        kv_cache_dtype="auto",
        use_pcp=False,
        q_pad_num_heads=None,
        hisparse_cache=None,
        dcp_manager=None,
        is_aiter_triton_fp4_bmm_enabled=False,
        is_aiter_triton_fp8_bmm_enabled=False,
        is_amx_bmm_enabled=False,
        W_UK_T=meta(HEADS, NOPE, LATENT),
        W_UV=meta(HEADS, LATENT, VALUE),
    )
    return layer


def largest(profiling: bool) -> int:
    """Bytes of the largest tensor that forward_impl makes for one prefill of 2048 tokens."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = [0]

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and not function.is_view:
                sizes.append(math.prod(made.shape) * made.element_size())
            return made

    def meta(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    metadata = SimpleNamespace(
        num_actual_tokens=TOKENS, num_decodes=0, num_prefills=1, num_decode_tokens=0, prefill=None
    )
    layer, q, output = sparse_layer(), meta(TOKENS, HEADS, NOPE), meta(TOKENS, HEADS * VALUE)
    latent, rope, cache = meta(TOKENS, LATENT), meta(TOKENS, 1, 0), meta(4, 64, LATENT)
    with Allocations():
        layer.forward_impl(q, latent, rope, cache, None if profiling else metadata, output)
    return max(sizes)


def reproduce() -> dict[str, object]:
    """Largest tensor in the profile run and in a real prefill, in bytes."""
    profile, real = largest(True), largest(False)
    return {"profile": profile, "real": real, "wrong": [profile] if profile > real else []}


if __name__ == "__main__":
    result = reproduce()
    print(f"vllm {version('vllm')}: {HEADS} heads, {TOKENS} tokens, no dense prefill")
    print(f"largest tensor in the profile run: {result['profile'] / 2**20:,.0f} MiB")
    print(f"largest tensor in a real prefill:  {result['real'] / 2**20:,.0f} MiB")
