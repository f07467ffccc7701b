"""integrated_memory: on GB10 the KV cache is sized by pages that the driver can get, and loading leaves them free."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from overlay import host_memory
from overlay.context import Context
from overlay.declare import Option, Patch, Target, Verdict, absent, present
from overlay.host_memory import GIB, MemoryShortage, gib

UTILS = "vllm.utils.mem_utils"
WORKER = "vllm.v1.worker.gpu_worker"
# While a worker profiles: free memory at its first snapshot, which no later snapshot may exceed.
_baseline: list[int] = []


def probe(ctx: Context) -> Verdict:
    if ctx.hardware.capability is not None and not ctx.hardware.integrated:
        return absent(f"{ctx.hardware.name} has memory of its own")
    if "virtual_memory().available" not in ctx.sources.source_of(UTILS, "MemorySnapshot.measure"):
        return absent("this vLLM does not take MemAvailable for the free memory of an integrated GPU")
    return present("vLLM takes MemAvailable for free memory; the driver of an integrated GPU gets MemFree")


def cap_snapshots(module: ModuleType, ctx: Context) -> None:
    """Memory that other processes give back during profiling is not negative consumption of this one."""

    def measure(wrapped: Any, snapshot: Any, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        if _baseline and (excess := snapshot.free_memory - _baseline[-1]) > 0:
            snapshot.free_memory -= excess
            snapshot.cuda_memory += excess
            snapshot.non_torch_memory += excess

    ctx.wrap(module, "MemorySnapshot.measure", measure)


def guard_worker(module: ModuleType, ctx: Context) -> None:
    reserve = int(float(ctx.options["reserve_gib"]) * GIB)

    def integrated(worker: Any) -> bool:
        return module.current_platform.is_integrated_gpu(worker.device.index)

    def files(worker: Any) -> list:
        config = worker.vllm_config
        return host_memory.checkpoint_files(str(config.model_config.model), config.load_config.download_dir)

    def load_model(wrapped: Any, worker: Any, args: tuple, kwargs: dict) -> None:
        if not integrated(worker):
            return wrapped(*args, **kwargs)
        with host_memory.dropping(files(worker), below=2 * reserve):
            return wrapped(*args, **kwargs)

    def determine(wrapped: Any, worker: Any, args: tuple, kwargs: dict) -> int:
        if not integrated(worker):
            return wrapped(*args, **kwargs)
        # Read first: with VLLM_ENABLE_STARTUP_PLAN=1 vLLM replays an earlier boot's size through the same setting.
        asked = bool(worker.cache_config.kv_cache_memory_bytes)
        host_memory.drop_files(files(worker))
        with baseline(module, worker):
            planned = wrapped(*args, **kwargs)
        host_memory.drop_files(files(worker))
        # The profile run's peak is given back by now and will be needed again beside the KV cache.
        peak = int(getattr(worker, "peak_activation_memory", 0))
        return deliverable(ctx, planned, peak, reserve, asked)

    ctx.wrap(module, "Worker.load_model", load_model)
    ctx.wrap(module, "Worker.determine_available_memory", determine)


@contextlib.contextmanager
def baseline(module: ModuleType, worker: Any) -> Iterator[None]:
    """The first snapshot, raised where the host has since given back more than this worker took: what is available now
    and what torch holds were both available then."""
    snapshot = worker.init_snapshot
    now = host_memory.read().available + module.torch.accelerator.memory_reserved(worker.device)
    if (excess := now - snapshot.free_memory) > 0:
        snapshot.free_memory += excess
        snapshot.cuda_memory -= excess
        snapshot.non_torch_memory -= excess
    _baseline.append(snapshot.free_memory)
    try:
        yield
    finally:
        _baseline.pop()


def deliverable(ctx: Context, planned: int, peak: int, reserve: int, asked: bool) -> int:
    """Bytes of KV cache that the driver can get: `planned`, or less with a warning. Raises MemoryShortage."""
    memory = host_memory.read()
    most = memory.free - peak - reserve
    figures = f"{memory}; {gib(peak)} for activations, {gib(reserve)} for the host"
    if planned <= most:
        ctx.log.info("KV cache of %s fits the pages that are free (%s)", gib(planned), figures)
        return planned
    sentence = (
        f"vLLM plans a KV cache of {gib(planned)}, but the driver of an integrated GPU can only get pages that are "
        f"free now: {gib(max(most, 0))} ({figures})"
    )
    advice = "free the page cache first: sudo python -m overlay flush-cache"
    if asked:
        raise MemoryShortage(f"{sentence}. {advice}, or ask for --kv-cache-memory-bytes {max(most, 0)} or less")
    if most <= 0:
        raise MemoryShortage(f"{sentence}. {advice}, or stop what else uses this machine's memory")
    ctx.log.warning("%s; the KV cache gets that much. For more, %s", sentence, advice)
    return most


PATCH = Patch(
    id="integrated_memory",
    title="the KV cache is sized by memory that GB10's driver cannot get",
    why=(
        "On an integrated GPU vLLM takes MemAvailable for free memory. That counts the page cache, which loading a "
        "checkpoint fills, and which the driver does not reclaim: it dies with NV_ERR_NO_MEMORY while tens of GiB are "
        "available. When another process gives memory back meanwhile, vLLM stops with `Error in memory profiling`."
    ),
    how=(
        "While the model loads, and before and after profiling, the pages of the checkpoint's files are dropped (no "
        "root needed). The planned KV cache is held against MemFree less the activations and a reserve for the host: "
        "it fits, or it is cut with a warning that names all figures, or, where the user asked for that size or "
        "nothing is left, refused with a sentence. Snapshots count memory that others give back as theirs."
    ),
    upstream=(),
    until="vLLM sizes the cache of integrated GPUs by free pages",
    targets=(
        Target(UTILS, "MemorySnapshot.measure", ("(self)",)),
        Target(WORKER, "Worker.load_model", ("(self, *, load_dummy_weights=...)",)),
        Target(WORKER, "Worker.determine_available_memory", ("(self)",)),
    ),
    options=(
        Option(
            "reserve_gib",
            float,
            2.0,
            "GiB of free memory left to the host beside weights, KV cache, activations",
            limits=(0.0, 1024.0),
        ),
    ),
    probe=probe,
    apply={UTILS: cap_snapshots, WORKER: guard_worker},
)
