"""What vLLM asks of a backend before it builds a layer: what it takes, how its cache looks, who implements it."""

from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec

from overlay.attention import choice, compat


class SparseMLABackend(AttentionBackend):
    """Sparse MLA without rope: queries and keys of 512, the latent row is key and value.

    The name is its own: vLLM rewrites the cache dtype to fp8_ds_mla for any class that answers to its own sparse
    backends' names. Selection imports this module, so it imports neither CuPy nor the kernel.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(choice.KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return choice.BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type:
        from overlay.attention.impl import SparseMLAImpl

        return SparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type:
        from overlay.attention.metadata import SparseMLAMetadataBuilder

        return SparseMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [choice.LATENT_SIZE]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        """Any multiple of 64: the kernel takes physical rows and knows no blocks, so no block needs splitting."""
        return [MultipleOf(64)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return compat.align_blocks_to_rows(spec)

    @classmethod
    def supports_compute_capability(cls, capability: object) -> bool:
        return choice.in_family((capability.major, capability.minor))

    @classmethod
    def supports_combination(cls, *args: object, **kwargs: object) -> str | None:
        """What no other check of vLLM's asks: the model's rope, and features this backend has no path for."""
        config = get_current_vllm_config()
        text_config = config.model_config.hf_text_config if config.model_config is not None else None
        rope = getattr(text_config, "qk_rope_head_dim", None)
        if rope != 0:
            return f"{choice.BACKEND_NAME} is for models without rope in MLA; qk_rope_head_dim is {rope}"
        if config.attention_config.hisparse_config is not None:
            return f"{choice.BACKEND_NAME} reads the paged cache and has no HiSparse path"
        if config.parallel_config.decode_context_parallel_size > 1 and not compat.indexer_merges_over_dcp():
            return "this vLLM's indexer does not merge its selections over decode context parallel ranks (0.32 does)"
        return None
