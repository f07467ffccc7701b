"""What a rehearsal reads off vLLM's objects: pure observation, in plain values that JSON can carry.

Every function takes the real VllmConfig, the models built from it, or the real KV cache plan. Where a release lacks
something (0.30 to 0.33 differ), the field is None and not guessed.
"""

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from overlay.attention import native
from overlay.rehearsal.device import WithoutMemory, live_tensors


def configuration(config: Any) -> dict[str, Any]:
    """What vLLM made of the command line, before any layer is built."""
    model, parallel, scheduler = config.model_config, config.parallel_config, config.scheduler_config
    return {
        "architecture": model.architecture,
        "quantization": model.quantization,
        "dtype": _dtype_name(model.dtype),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "kv_cache_dtype_asked": config.cache_config.cache_dtype,
        "rope_free": getattr(model.hf_text_config, "qk_rope_head_dim", None) == 0,
        "moe_backend_asked": getattr(config.kernel_config, "moe_backend", None),
    }


@contextmanager
def recorded_selections() -> Iterator[list[dict[str, Any]]]:
    """A list that grows by every question to vLLM's attention selector inside the block, with its answer.

    The outermost call is recorded, so the overlay's wrapper is inside. The refusals are the platform's own, asked of
    it in the same place, where the model's configuration is current.
    """
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention import selector

    platform = type(current_platform)
    select = platform.get_attn_backend_cls
    made: list[dict[str, Any]] = []

    def recorded(selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        layer = attn_selector_config
        selection = {
            "chosen": None,
            "asked": getattr(selected_backend, "name", None),
            "heads": num_heads,
            "head_size": layer.head_size,
            "kv_cache_dtype": str(layer.kv_cache_dtype),
            "use_mla": layer.use_mla,
            "use_sparse": layer.use_sparse,
            "refused": _refusals(platform, layer, num_heads),
        }
        made.append(selection)
        path = select(selected_backend, attn_selector_config, num_heads=num_heads)
        selection["chosen"] = resolve_obj_by_qualname(path).get_name()
        return path

    selector._cached_get_attn_backend.cache_clear()  # a cached answer would not be asked for again
    own = vars(platform).get("get_attn_backend_cls")
    platform.get_attn_backend_cls = staticmethod(recorded)
    try:
        yield made
    finally:
        if own is None:
            del platform.get_attn_backend_cls
        else:
            platform.get_attn_backend_cls = own


def _refusals(platform: Any, layer: Any, num_heads: int | None) -> dict[str, list[str]]:
    """Backend name -> why the platform's own selection refuses it for this layer."""
    _, refused = platform.get_valid_backends(platform.get_device_capability(), layer, num_heads)
    return {backend.name: list(dict.fromkeys(reasons)) for backend, (_, reasons) in refused.items()}


def attention_layers(config: Any) -> dict[str, Any]:
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return get_layers_from_vllm_config(config, AttentionLayerBase)


def attention(config: Any, selections: list[dict[str, Any]]) -> dict[str, Any]:
    """Backends by layer, and of the layers that went through the selector: KV dtype really used and block size.

    `auto` means the model's dtype once vLLM has left it standing.
    """
    layers = attention_layers(config)
    backends = {name: layer.get_attn_backend().get_name() for name, layer in layers.items()}
    selected = {selection["chosen"] for selection in selections}
    main = [layers[name] for name, backend in backends.items() if backend in selected]
    dtypes = dict.fromkeys(getattr(layer, "kv_cache_dtype", config.cache_config.cache_dtype) for layer in main)
    model_dtype = _dtype_name(config.model_config.dtype)
    specs = [spec for layer in main if (spec := layer.get_kv_cache_spec(config)) is not None]
    rows = {spec.page_size_bytes // spec.block_size for spec in specs}
    return {
        "attention_backend": _joined(selection["chosen"] for selection in selections),
        "attention_layers": dict(Counter(backends.values())),
        "kv_cache_dtype": _joined(model_dtype if dtype == "auto" else dtype for dtype in dtypes),
        "block_size": config.cache_config.block_size,
        "row_bytes": rows.pop() if len(rows) == 1 else None,
        "prefill_workspace": max((_prefill_workspace(layer) for layer in main), default=0),
    }


def _prefill_workspace(layer: Any) -> int:
    """Bytes that the profile run sets aside in an MLA layer for expanding context in a dense prefill."""
    tokens = getattr(layer, "chunked_prefill_workspace_size", 0)
    return tokens and tokens * layer.num_heads * (layer.qk_nope_head_dim + layer.v_head_dim) * 2


def weights(models: list[Any], device: WithoutMemory, before: int) -> dict[str, Any]:
    """Bytes of rank 0: the parameters that vLLM would load, and what else the built model keeps on the device.

    `before` is what was alive on it before the model was built.
    """
    parameters = device.device_bytes(parameter for model in models for parameter in model.parameters())
    return {"weight_bytes": parameters, "buffer_bytes": device.device_bytes(live_tensors()) - before - parameters}


def experts(models: list[Any]) -> dict[str, Any]:
    """MoE backend and quantisation that the built layers hold, and the linear layers by quantisation method."""
    linear: Counter[str] = Counter()
    moe: list[tuple[str, str]] = []
    for model in models:
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is None:
                continue
            backend = _moe_backend(method)
            if backend is None:
                linear[type(method).__name__] += 1
            else:
                moe.append((backend, type(method).__name__ + _activation(method)))
    return {
        "moe_backend": _joined(backend for backend, _ in moe),
        "moe_quantization": _joined(method for _, method in moe),
        "linear_quantization": dict(linear),
    }


def _moe_backend(method: Any) -> str | None:
    """A MoE method keeps its backend as a member of one of vLLM's *MoeBackend enumerations."""
    for value in vars(method).values():
        if isinstance(value, Enum) and type(value).__name__.lower().endswith("moebackend"):
            return value.name
    return None


def _activation(method: Any) -> str:
    use_a16 = getattr(method, "use_a16", None)
    return "" if use_a16 is None else " (W4A16)" if use_a16 else " (W4A4)"


def indexer_topk(config: Any) -> str | None:
    """The sparse indexer's decode top-k for one row and for a full batch; None where the model has no indexer."""
    import torch

    text = config.model_config.hf_text_config
    topk = getattr(text, "index_topk", None)
    if not topk:
        return None
    try:
        from vllm.model_executor.layers.indexer_topk import get_indexer_topk
    except ImportError:
        return None
    # With k-pooling the indexer selects pools of tokens (glm5next sparse_indexer: topk_tokens // index_kpool).
    selected = topk // max(getattr(text, "index_kpool", 1) or 1, 1)
    topk_module = get_indexer_topk(config.kernel_config.sparse_indexer_topk_backend)
    rows = dict.fromkeys((1, config.scheduler_config.max_num_seqs))
    logits = [torch.empty(count, config.model_config.max_model_len, device="meta") for count in rows]
    return _joined(topk_module.resolve_backend(each, selected, each.shape[0]) for each in logits)


def budget(config: Any, fields: dict[str, Any], memory: int, allowance: int) -> dict[str, Any]:
    """Bytes of one GPU, from its memory to what the KV cache gets; a sum that a reader can redo."""
    utilization = config.cache_config.gpu_memory_utilization
    usable = int(memory * utilization)
    taken = {
        "weights": fields["weight_bytes"],
        "buffers": fields["buffer_bytes"],
        "prefill_workspace": fields["prefill_workspace"],
        "allowance": allowance,
    }
    left = usable - sum(taken.values())
    return {"memory": memory, "utilization": utilization, **taken, "kv_cache": left}


def kv_plan(config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """The planner's answer for the given memory: blocks, groups, and vLLM's own capacity figures."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    tokens, concurrency = get_kv_cache_capacity(config, kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    return {
        "max_model_len": config.model_config.max_model_len,  # auto-fit may have shortened it
        "num_blocks": kv_cache_config.num_blocks,
        "kv_tokens": tokens,
        "max_concurrency": round(concurrency, 3),
        "kv_cache_layout": getattr(config.cache_config, "kv_cache_layout", None),
        "kv_cache_groups": [
            {
                "spec": type(group.kv_cache_spec).__name__,
                "block_size": group.kv_cache_spec.block_size,
                "layers": len(group.layer_names),
            }
            for group in groups
        ],
    }


def graphs(config: Any, model: Any, kv_cache_config: Any) -> dict[str, Any]:
    """CUDA-graph mode after vLLM's own resolution against the weakest attention backend."""
    from vllm import envs
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu.cudagraph_utils import has_compiled_submodule

    weakest, by = AttentionCGSupport.ALWAYS, None
    layers = attention_layers(config)
    specs = {name: group.kv_cache_spec for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    for name, spec in specs.items():
        backend = layers[name].get_attn_backend()
        spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
        support = backend.get_builder_cls().get_cudagraph_support(config, spec)
        if support.value < weakest.value:
            weakest, by = support, backend.__name__
    breakable = bool(getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False))
    speculative = config.speculative_config
    offered = {
        "min_cg_support": weakest,
        "min_cg_attn_backend": by,
        "uniform_decode_query_len": 1 + (speculative.num_speculative_tokens if speculative else 0),
        "use_v2_model_runner": config.use_v2_model_runner,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "kv_cache_config": kv_cache_config,
        "max_num_reqs": config.scheduler_config.max_num_seqs,
        "piecewise_capture_available": breakable or has_compiled_submodule(model),
    }
    resolve = config.compilation_config.resolve_cudagraph_mode_and_sizes
    taken = inspect.signature(resolve).parameters
    mode = resolve(**{name: value for name, value in offered.items() if name in taken})
    return {"cudagraph_mode": mode.name, "breakable_cudagraph": breakable, "cudagraph_weakest_backend": by}


def known_defect(config: Any, backend: str | None, vllm_root: Path) -> str | None:
    """Why the backend that vLLM selects cannot run this model all the same, where the installed files tell; else None.

    vLLM 0.30 selects its path for 12.x and dies at the first row it writes.
    """
    rope = getattr(config.model_config.hf_text_config, "qk_rope_head_dim", None)
    if backend != "FLASHINFER_MLA_SPARSE_SM120" or rope != 0:
        return None
    return native.defect(vllm_root)


def _joined(names: Any) -> str | None:
    """Distinct names in their order, as one text; None for none."""
    return ", ".join(dict.fromkeys(str(name) for name in names)) or None


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
