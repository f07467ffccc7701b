"""flashinfer_fa2: vLLM's Hopper backend for rope-free sparse MLA, on 12.x through FlashInfer's FA2 kernel."""

import importlib.metadata
import os
import re
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from overlay.context import Context
from overlay.declare import Patch, Target, Verdict, absent, impossible, present
from overlay.errors import PatchError

BACKEND = "FlashInferMLASparseSM90Backend"
SM90 = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90"
# FlashInfer's planning and compilation of its FA2 and FA3 kernels; from FlashInfer 0.7 (vLLM 0.31).
FA_COMMON = "flashinfer.mla._batch_mla._backends._fa_common"
MAX_WORKS = 16384  # entries of FlashInfer's work list; before 0.7.2 its planner does not look
FP8_BYTES_TILE_16 = 91_680  # shared memory with 16 rows a tile, as bf16 has here; with the 32 of fp8 it is 117,312
FP8_TILE = "std::is_same_v<DTypeKV, __nv_fp8_e4m3> ? 32 : CTA_TILE_KV;"
CAPPED_TILE = "(std::is_same_v<DTypeKV, __nv_fp8_e4m3> && CTA_TILE_KV > 32) ? 32 : CTA_TILE_KV;"


def probe(ctx: Context) -> Verdict:
    if "capability.major == 9" not in ctx.sources.source_of(SM90, f"{BACKEND}.supports_compute_capability"):
        return absent("this vLLM has no rope-free sparse-MLA backend that is for Hopper only")
    if ctx.hardware.lacks(12):
        return absent(f"{ctx.hardware.architecture} is not of the 12.x family")
    pip = "pip install 'flashinfer-python>=0.6.18'"
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return impossible(f"FlashInfer is not installed: {pip}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < (0, 6, 18):
        return impossible(f"FlashInfer {version} answers batches of 64 to 256 rows with NaN: {pip}")
    return present("vLLM's rope-free sparse-MLA backend refuses 12.x, where its FA2 kernel runs")


def open_backend(module: ModuleType, ctx: Context) -> None:
    def here(capability: Any) -> bool:
        """12.x; with enabled = true every GPU that FA2 runs on, so that the route can be tested elsewhere."""
        return capability is not None and (capability.major == 12 or (ctx.wanted is True and capability.major >= 8))

    def supports(wrapped: Any, backend: Any, args: tuple, kwargs: dict) -> bool:
        capability = args[0] if args else kwargs["capability"]
        return wrapped(*args, **kwargs) or here(capability)

    def state(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> None:
        """Made as vLLM makes it, but its FlashInfer wrapper takes the FA2 kernel: FA3 is for Hopper."""
        import flashinfer.mla
        from vllm.platforms import current_platform

        if not here(current_platform.get_device_capability()):
            return wrapped(*args, **kwargs)
        refuse_too_many_works(*args, **kwargs)
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper
        flashinfer.mla.BatchMLAPagedAttentionWrapper = lambda *a, **k: wrapper(*a, **{**k, "backend": "fa2"})
        try:
            wrapped(*args, **kwargs)
        finally:
            flashinfer.mla.BatchMLAPagedAttentionWrapper = wrapper

    ctx.wrap(module, f"{BACKEND}.supports_compute_capability", supports)
    ctx.wrap(module, "_SM90State.__init__", state)


def refuse_too_many_works(device: Any, num_heads: int, kv_dtype: Any, max_tokens: int, *rest: Any, **more: Any) -> None:
    """One work for each token and 128 heads, and at most one more for each multiprocessor where rows are split."""
    import torch

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    works = max_tokens * -(-num_heads // 128) + processors
    if works > MAX_WORKS:
        raise PatchError(
            f"flashinfer_fa2: {max_tokens} tokens in a batch may need {works} works and FlashInfer's list holds "
            f"{MAX_WORKS}: it would be written past its end. Use --max-num-batched-tokens {MAX_WORKS - processors} or "
            "less, or OVERLAY_PATCHES=flashinfer_fa2=false"
        )


def cap_fp8_tile(module: ModuleType, ctx: Context) -> None:
    def generate(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
        """FlashInfer's own build of its FA2 kernel, with our folder before its headers for fp8 rows."""
        spec = wrapped(*args, **kwargs)
        backend, _, kv_dtype = args[:3]
        if backend == "fa2" and str(kv_dtype) == "torch.float8_e4m3fn":
            spec.name += "_tile16"
            spec.extra_include_dirs = [capped_headers(), *(spec.extra_include_dirs or ())]
        return spec

    def validate(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> None:
        """fp8 rows on 12.x are held against everything that bf16 rows are, and against the capped kernel's memory."""
        fp8 = str(kwargs["kv_data_type"]) == "torch.float8_e4m3fn"
        if kwargs["backend"] != "fa2" or not fp8 or module.get_compute_capability(kwargs["device"])[0] != 12:
            return wrapped(*args, **kwargs)
        limits = getattr(module, "_get_fa_shared_memory_limits", None)
        if limits is not None and limits(kwargs["device"])[1] < FP8_BYTES_TILE_16:
            raise PatchError(f"flashinfer_fa2: fp8 rows need {FP8_BYTES_TILE_16} bytes of shared memory per block")
        return wrapped(*args, **{**kwargs, "kv_data_type": kwargs["q_data_type"], "scale_mode": "default"})

    ctx.wrap(module, "gen_batch_mla_module", generate)
    ctx.wrap(module, "_validate_generated_fa_plan", validate)


def capped_headers() -> Path:
    """A folder with FlashInfer's own mla.cuh, in which fp8 rows take no larger tile than the device's memory gives."""
    from flashinfer.jit import env

    text = (env.FLASHINFER_INCLUDE_DIR / "flashinfer/attention/mla.cuh").read_text()
    if text.count(FP8_TILE) != 1:
        raise PatchError("flashinfer_fa2: this FlashInfer's mla.cuh chooses its fp8 tile in a way that is not known")
    text = re.sub(r'#include "(?:\.\./)', '#include "flashinfer/', text.replace(FP8_TILE, CAPPED_TILE))
    text = re.sub(r'#include "(?!flashinfer/)', '#include "flashinfer/attention/', text)
    folder = env.FLASHINFER_GEN_SRC_DIR / "overlay_mla_tile16"
    header = folder / "flashinfer/attention/mla.cuh"
    header.parent.mkdir(parents=True, exist_ok=True)
    if not header.exists() or header.read_text() != text:
        # All ranks come by at once: a file of its own for each, and whichever is renamed last has the same text.
        descriptor, temporary = tempfile.mkstemp(dir=header.parent, prefix=f".{header.name}.")
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, header)
    return folder


PATCH = Patch(
    id="flashinfer_fa2",
    title="vLLM's Hopper backend for rope-free sparse MLA refuses 12.x",
    why=(
        "FLASHINFER_MLA_SPARSE_SM90 takes bf16 and per-tensor fp8 rows, and refuses every capability but 9.0, although "
        "FlashInfer's FA2 form of its kernel runs on 12.x. FlashInfer before 0.6.18 answers 64 to 256 rows with NaN; "
        "its fp8 tile asks for 117,312 bytes of shared memory where 12.x has 101,376; and before 0.7.2 its planner "
        "writes past the end of its work list beyond 16,384 works."
    ),
    how=(
        "An alternative to the overlay's own backend, chosen by --attention-backend FLASHINFER_MLA_SPARSE_SM90: the "
        "backend is opened for 12.x and its wrapper made with FA2. An older FlashInfer and larger batches are refused "
        "by name. For fp8 rows FlashInfer compiles its own kernel (with nvcc) against a copy of its header whose tile "
        "is capped at 16; from FlashInfer 0.7 (vLLM 0.31), before that FlashInfer itself refuses fp8 here."
    ),
    upstream=("flashinfer-ai/flashinfer#4373", "flashinfer-ai/flashinfer#5170"),
    until="vLLM opens the backend for 12.x",
    targets=(
        Target(SM90, f"{BACKEND}.supports_compute_capability", ("(cls, capability)",)),
        Target(
            SM90,
            "_SM90State.__init__",
            (
                "(self, device, num_heads, kv_dtype, max_tokens, topk_width, kv_lora_rank, qk_rope_head_dim, sm_scale)",
                "(self, device, num_heads, kv_dtype, max_tokens, topk_width, kv_lora_rank, qk_rope_head_dim, sm_scale, "
                "index_topk, index_kpool)",
            ),
        ),
    ),
    probe=probe,
    apply={SM90: open_backend, FA_COMMON: cap_fp8_tile},
    default=False,
)
