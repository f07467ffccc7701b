"""The real Glm5Next model with its KV cache plan, cache tensors and metadata builders, on CPU tensors.

Runs in a child process under the fake driver. vLLM believes in a GPU of capability 12.x; only the tensors are the
host's. What cannot run without a GPU is replaced in `tests.attention.standin` and nowhere else.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from overlay.checkpoint import tiny_config
from tests.attention import models, standin

CPU = torch.device("cpu")


@dataclass
class Engine:
    """One model with `kv_dtype` rows. Set-up happens in the order of vLLM's own executor and worker."""

    folder: Path
    kv_dtype: str = "bfloat16"
    heads: int = 8
    layers: int = 4
    nested: bool = False
    speculative_tokens: int = 0
    max_tokens: int = 96
    max_seqs: int = 8
    max_model_len: int = 16384
    memory: int = 160 << 20
    changes: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.platforms import current_platform

        self.vllm_config = self._config()
        with set_current_vllm_config(self.vllm_config):
            _init_distributed(self.folder)
            self.model = self._build(self.vllm_config.model_config)
            if self.speculative_tokens:
                self.draft = self._build(self.vllm_config.speculative_config.draft_model_config)
            self._finish_weights()
            current_platform.update_block_size_for_backend(self.vllm_config)
            self._plan()

    def _config(self) -> Any:
        from vllm.config import (
            CacheConfig,
            CompilationConfig,
            ModelConfig,
            ParallelConfig,
            SchedulerConfig,
            SpeculativeConfig,
            VllmConfig,
        )

        speculates = self.speculative_tokens > 0
        shape = tiny_config.TinyModel(heads=self.heads, layers=self.layers, nested=self.nested, mtp=speculates)
        config = tiny_config.model_config(shape)
        (config["text_config"] if self.nested else config).update(self.changes)
        path = models.write(config, self.folder / "model")
        model = ModelConfig(
            model=path, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=self.max_model_len, enforce_eager=True
        )
        scheduler = SchedulerConfig(
            max_num_batched_tokens=self.max_tokens,
            max_num_seqs=self.max_seqs,
            max_model_len=self.max_model_len,
            is_encoder_decoder=False,
        )
        parallel = ParallelConfig()
        speculative = None
        if speculates:
            speculative = SpeculativeConfig(
                method="mtp",
                num_speculative_tokens=self.speculative_tokens,
                target_model_config=model,
                target_parallel_config=parallel,
            )
        return VllmConfig(
            model_config=model,
            parallel_config=parallel,
            speculative_config=speculative,
            cache_config=CacheConfig(cache_dtype=self.kv_dtype, gpu_memory_utilization=0.5),
            scheduler_config=scheduler,
            compilation_config=CompilationConfig(mode=0, cudagraph_mode="NONE"),
        )

    def _build(self, model_config: Any) -> torch.nn.Module:
        """A model, or its draft, by vLLM's own class."""
        from vllm.model_executor.model_loader.utils import get_model_architecture
        from vllm.utils.torch_utils import set_default_torch_dtype

        model_class, _ = get_model_architecture(model_config)
        with set_default_torch_dtype(torch.bfloat16), CPU:
            return model_class(vllm_config=self.vllm_config, prefix="")

    def _finish_weights(self) -> None:
        """Seeded weights in the attention layers' up-projection, and what vLLM derives from them after loading."""
        generator = torch.Generator().manual_seed(7)
        for layer in self.attention_layers():
            weight = layer.kv_b_proj.weight
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
            layer.process_weights_after_loading(torch.bfloat16)

    def _plan(self) -> None:
        """KV specs, groups and layout from vLLM's planner; cache tensors bound to the layers; metadata builders."""
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
        from vllm.v1.worker.gpu import attn_utils

        self.specs = attn_utils.get_kv_cache_spec(self.vllm_config)
        backends = {layer.get_attn_backend() for layer in self.cache_layers().values()}
        names = [layout.name for layout in get_supported_kv_cache_layouts(sorted(backends, key=lambda b: b.get_name()))]
        self.layout = resolve_kv_cache_layout(self.vllm_config, [names], self.specs.values())
        planner = _planner()
        specs = [self.specs]
        groups = ()
        if hasattr(planner, "get_global_kv_cache_groups"):
            groups = (planner.get_global_kv_cache_groups(self.vllm_config, specs),)
        (self.kv_config,) = planner.get_kv_cache_configs(self.vllm_config, specs, [self.memory], *groups)
        self.groups, self.graph_support, self.kernel_block_sizes = attn_utils.init_attn_backend(
            self.kv_config, self.vllm_config, CPU
        )
        arguments = (
            {}
            if "attn_groups" not in inspect.signature(attn_utils.init_kv_cache).parameters
            else {"attn_groups": [group for groups in self.groups for group in groups]}
        )
        forward_context = self.vllm_config.compilation_config.static_forward_context
        attn_utils.init_kv_cache(
            forward_context, self.kv_config, CPU, self.kernel_block_sizes, self.vllm_config, **arguments
        )

    def cache_layers(self) -> dict[str, Any]:
        """Every layer that has a KV cache, by name."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        return get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)

    def attention_layers(self) -> list[Any]:
        """The sparse-MLA layers, in order."""
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        context = self.vllm_config.compilation_config.static_forward_context
        return [layer for layer in context.values() if isinstance(layer, MLAAttention)]

    @cached_property
    def group(self) -> Any:
        """The attention group of the sparse-MLA layers."""
        name = self.attention_layers()[0].layer_name
        return next(group for groups in self.groups for group in groups if name in group.layer_names)

    @property
    def builder(self) -> Any:
        return self.group.get_metadata_builder(0)


def _planner() -> Any:
    """Where the planner lives: a module of its own from 0.33."""
    try:
        from vllm.v1.core import kv_cache_planning as planner
    except ImportError:
        from vllm.v1.core import kv_cache_utils as planner
    return planner


def _init_distributed(folder: Path) -> None:
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/rendezvous", backend="gloo"
        )
        parallel_state.initialize_model_parallel()


@contextmanager
def patched_vllm(**options: object) -> Iterator[None]:
    """The patch applied in this process, and what needs a GPU replaced."""
    import vllm.platforms.cuda  # noqa: F401 - the patch changes it and the registry that it imports

    from overlay.context import Context
    from overlay.hardware import Hardware
    from overlay.patches.sparse_mla import PATCH
    from overlay.sources import VllmSources

    defaults = {option.name: option.default for option in PATCH.options}
    context = Context(PATCH.id, {**defaults, **options}, "auto", VllmSources.find(), Hardware())
    for module, function in PATCH.apply.items():
        function(sys.modules[module], context)
    try:
        with standin.without_gpu():
            yield
    finally:
        context.roll_back()
