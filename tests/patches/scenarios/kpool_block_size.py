"""The real block-size choice of 0.30 and 0.31 and the page that their real indexer cache makes of it.

The day-0 images had no alignment for the indexer in the CUDA platform: it is taken away for the comparison.
"""

import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from overlay.patches.kpool_block_size import ALIGNMENT, CUDA
from tests.attention import models
from tests.patches import harness


def choose(model: str, block_size: int | None) -> dict[str, int]:
    """Block size in tokens, the indexer's page in entries, and the linear-attention page in bytes."""
    from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=16384),
        cache_config=CacheConfig(cache_dtype="fp8", **({"block_size": block_size} if block_size else {})),
    )
    backend = importlib.import_module("vllm.v1.attention.backends.mla.flashinfer_mla_sparse")
    nvidia, common = "vllm.models.glm5next.nvidia.attention", "vllm.models.glm5next.common.attention"
    attention = importlib.import_module(nvidia if importlib.util.find_spec(nvidia) else common)
    with set_current_vllm_config(config):
        layer_base = importlib.import_module("vllm.model_executor.layers.attention_layer_base").AttentionLayerBase
        # What the choice asks of the model: the backend of its first attention layer.
        layer = type("Layer", (layer_base,), {
            "get_attn_backend": lambda self: backend.FlashInferMLASparseSM120Backend,
            "get_kv_cache_spec": lambda self, config: None,
            "bind_kv_cache": lambda self, cache: None,
        })()  # fmt: skip
        config.compilation_config.static_forward_context["layer"] = layer
        current_platform.update_block_size_for_backend(config)
        cache = attention.Glm5NextIndexerCache(
            head_dim=132, dtype=torch.uint8, prefix="indexer", cache_config=config.cache_config, index_kpool=4
        )
        spec = cache.get_kv_cache_spec(config)
    return {
        "block": config.cache_config.block_size,
        "page": spec.storage_block_size // 4,
        "mamba": config.cache_config.mamba_page_size_padded or 0,
        "asked": config.cache_config.user_specified_block_size,
    }


def run() -> dict[str, Any] | None:
    """None where this release has no alignment in its platform that could be taken away."""
    cuda = importlib.import_module(CUDA)
    if not hasattr(cuda.CudaPlatformBase, ALIGNMENT):
        return None
    model = models.write(models.full_size(), Path(tempfile.mkdtemp()) / "glm")

    def measure() -> dict[str, Any]:
        return {name: choose(model, size) for name, size in (("auto", None), ("1152", 1152), ("8960", 8960))}

    def as_in_the_day_0_images() -> Any:
        return mock.patch.object(cuda.CudaPlatformBase, ALIGNMENT, lambda vllm_config: None)

    with as_in_the_day_0_images():
        answers = {"wrapped": measure()}
    with harness.without("kpool_block_size"):
        answers["release"] = measure()
        with as_in_the_day_0_images():
            answers["stock"] = measure()
    return answers
