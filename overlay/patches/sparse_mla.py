"""sparse_mla: vLLM's selector hands rope-free sparse-MLA layers on capability 12.x to the overlay's backend."""

import ast
from types import ModuleType
from typing import Any

from overlay.attention import choice, native
from overlay.context import Context
from overlay.declare import Option, Patch, Target, Verdict, absent, impossible, present
from overlay.errors import PatchError

CUDA = "vllm.platforms.cuda"
REGISTRY = "vllm.v1.attention.backends.registry"
SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"
STOCK = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse"
STOCK_CLASS = "FlashInferMLASparseSM120Backend"


def probe(ctx: Context) -> Verdict:
    """The fault is there where a 12.x GPU meets a vLLM whose own backend for it takes no bf16 rows of 512."""
    try:
        opened = choice.parse_capabilities(str(ctx.options["other_capabilities"]))
    except ValueError as error:
        return impossible(f"other_capabilities: {error}")
    if not ctx.sources.has("vllm.models.glm5next"):
        return absent("this vLLM has no rope-free sparse-MLA model (the first came with 0.30.0)")
    if ctx.hardware.lacks(12) and not any(device.capability in opened for device in ctx.hardware.devices):
        return absent(f"{ctx.hardware.architecture} is not of the 12.x family")
    if "bfloat16" in _literals(ctx, "supported_kv_cache_dtypes"):
        return absent("vLLM's own backend for 12.x takes bfloat16 rows")
    return present("vLLM's own path for 12.x stores fp8_ds_mla rows only")


def _literals(ctx: Context, attribute: str) -> list[object]:
    """The list that vLLM's own backend class assigns to `attribute`; empty where there is no such class."""
    node = ctx.sources.definition(STOCK, f"{STOCK_CLASS}.{attribute}")
    value = getattr(node, "value", None)
    return [ast.literal_eval(item) for item in value.elts] if isinstance(value, ast.List) else []


def register(module: ModuleType, ctx: Context) -> None:
    """`--attention-backend CUSTOM` names our backend, unless another plugin has taken the slot."""
    choice.opened.clear()
    choice.opened.update(choice.parse_capabilities(str(ctx.options["other_capabilities"])))
    slot = module.AttentionBackendEnum.CUSTOM
    if slot.is_overridden():
        ctx.log.warning("--attention-backend CUSTOM is %s, set by another plugin; left alone", slot.get_path())
        return
    module.register_backend(slot, choice.BACKEND_PATH)
    ctx.undo.append(slot.clear_override)


def wrap_selector(module: ModuleType, ctx: Context) -> None:
    """Decide before vLLM's selector does; where the layer is not ours, it decides as if this were not here."""
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            ctx.log.info("sparse_mla: %s", text)

    def select(wrapped: Any, platform: Any, args: tuple, kwargs: dict) -> str:
        selected, config, num_heads = _named(*args, **kwargs)
        capability = platform.get_device_capability()
        layer = _layer(capability, selected, config)
        if layer is None:
            return wrapped(*args, **kwargs)
        decision = choice.choose(
            layer,
            wanted=ctx.wanted,
            native_defect=lambda: native.defect(ctx.sources.root),
            stock_refusal=lambda: _stock_refusal(platform, capability, config, num_heads),
        )
        if decision.ours is None:
            return wrapped(*args, **kwargs)
        reason = decision.reason
        if decision.ours:
            refusals = _our_refusals(capability, config)
            if not refusals:
                say(f"{choice.BACKEND_NAME}: {reason}")
                return choice.BACKEND_PATH
            reason = f"our own backend cannot serve it ({'; '.join(refusals)})"
        try:
            answer = wrapped(*args, **kwargs)
        except ValueError as error:
            error.add_note(f"overlay: {choice.BACKEND_NAME} did not take this layer: {reason}")
            raise
        say(f"{answer.rpartition('.')[2]}: {reason}")
        return answer

    ctx.wrap(module, "CudaPlatformBase.get_attn_backend_cls", select)


def _named(selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> tuple[Any, Any, Any]:
    """The selector's arguments in one order, however the caller passed them."""
    return selected_backend, attn_selector_config, num_heads


def _layer(capability: Any, selected: Any, config: Any) -> choice.Layer | None:
    """What is known of the layer, or None for one that no sparse-MLA backend is asked for."""
    if capability is None or not (config.use_mla and config.use_sparse):
        return None
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    model = vllm_config.model_config
    text_config = model.hf_text_config if model is not None else None
    return choice.Layer(
        capability=(capability.major, capability.minor),
        use_mla=config.use_mla,
        use_sparse=config.use_sparse,
        head_size=config.head_size,
        rope_size=getattr(text_config, "qk_rope_head_dim", None),
        kv_cache_dtype=config.kv_cache_dtype or "auto",
        index_topk=getattr(text_config, "index_topk", None),
        dcp=vllm_config.parallel_config.decode_context_parallel_size > 1,
        selected=selected.name if selected is not None else None,
    )


def _stock_refusal(platform: Any, capability: Any, config: Any, num_heads: int | None) -> str | None:
    """Why vLLM finds no backend of its own for this layer, in its own words; None where it finds one."""
    valid, invalid = platform.get_valid_backends(
        device_capability=capability, attn_selector_config=config, num_heads=num_heads
    )
    if valid:
        return None
    return "; ".join(f"{backend.name}: {', '.join(reasons)}" for backend, (_, reasons) in invalid.items())


def _our_refusals(capability: Any, config: Any) -> list[str]:
    """What our own backend cannot do of what was asked (PCP, R-SWA, HiSparse, a block size, ...)."""
    try:
        from overlay.attention.backend import SparseMLABackend
    except Exception as error:
        # vLLM takes an ImportError for a backend that is merely unavailable and would go on to another one.
        raise PatchError(
            f"{choice.BACKEND_NAME} does not fit this vLLM: {type(error).__name__}: {error}\n"
            "  to run without it: OVERLAY_PATCHES=sparse_mla=false"
        ) from error
    return SparseMLABackend.validate_configuration(device_capability=capability, **config._asdict())


PATCH = Patch(
    id="sparse_mla",
    title="no attention path for bf16 or per-tensor fp8 latent rows without rope on 12.x",
    why=(
        "vLLM 0.30 has no working path for rope-free sparse MLA on capability 12.x (`pe_dim must be 64 for "
        "fp8_ds_mla`). From 0.31 it has one: packed fp8_ds_mla rows of 656 bytes only, index_topk 2048 only, no "
        "decode context parallelism, kernels that FlashInfer compiles with nvcc. `--kv-cache-dtype bfloat16` ends in "
        "`No valid attention backend found`; `auto` and `fp8` silently become fp8_ds_mla."
    ),
    how=(
        "Wraps CudaPlatformBase.get_attn_backend_cls and answers with the overlay's backend (overlay/attention) and "
        "kernel (overlay/kernel) where vLLM's own path is missing or cannot store the rows that were asked for. From "
        "0.31 `auto` and `fp8_ds_mla` stay native; `enabled = true` adds `auto`, with bf16 rows. An explicit "
        "--attention-backend always wins; CUSTOM names ours. Rows with rope and other capabilities are never touched."
    ),
    upstream=("vllm-project/vllm#55277", "vllm-project/vllm#57932"),
    until="vLLM's own backend for 12.x takes bfloat16 and per-tensor fp8 rows of 512",
    targets=(
        Target(
            CUDA,
            "CudaPlatformBase.get_attn_backend_cls",
            ("(cls, selected_backend, attn_selector_config, num_heads=...)",),
        ),
        Target(
            CUDA,
            "CudaPlatformBase.get_valid_backends",
            ("(cls, device_capability, attn_selector_config, num_heads=...)",),
        ),
        Target(REGISTRY, "register_backend", ("(backend, class_path=..., is_mamba=...)",)),
        Target(REGISTRY, "AttentionBackendEnum.CUSTOM"),
        Target(SPARSE, "SparseMLACommonMetadata"),
        Target(SPARSE, "SparseMLACommonMetadataBuilder.determine_chunked_prefill_workspace_size", ("(vllm_config)",)),
        Target(
            SPARSE,
            "SparseMLACommonImpl.__init__",
            (
                "(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, "
                "logits_soft_cap, attn_type, kv_sharing_target_layer_name, q_lora_rank, kv_lora_rank, "
                "qk_nope_head_dim, qk_rope_head_dim, qk_head_dim, v_head_dim, kv_b_proj, indexer=..., "
                "topk_indices_buffer=..., index_group_builder=..., q_pad_num_heads=...)",
            ),
        ),
        Target(SPARSE, "SharedTopkIndicesBuffer.init_topk_indices_buffer", ("(self, indexer, topk_indices_buffer)",)),
        Target("vllm.v1.worker.workspace", "WorkspaceManager.get_simultaneous", ("(self, *shapes_and_dtypes)",)),
    ),
    options=(
        Option(
            "other_capabilities",
            str,
            "",
            'compute capabilities besides 12.x that the backend may take, such as "9.0": for tests on other GPUs',
        ),
    ),
    default="auto",
    requires=("wrapt", "cupy"),
    probe=probe,
    apply={REGISTRY: register, CUDA: wrap_selector},
)
