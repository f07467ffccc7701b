"""Caches, memory and running engines of this machine."""

import os
from pathlib import Path

from overlay import host_memory, live
from overlay.doctor.checks import Outcome, Surroundings, failed, passed, warned
from overlay.kernel import cache

# Of the memory reported available, how much may be page cache without a word: a tenth of GB10's 121 GiB is a few
# hundred thousand tokens of KV cache.
SHARE = 0.1


def kernel_cache(around: Surroundings) -> Outcome:
    """Can compiled kernels be kept, and can nobody else write to where they are kept?"""
    directory = cache.default_directory()
    if not directory.exists():
        above = next(folder for folder in directory.parents if folder.exists())
        if directory.is_absolute() and os.access(above, os.W_OK | os.X_OK):
            return passed(f"{directory} will be created")
        return warned(f"{directory} cannot be created: every process compiles the kernel anew", "set XDG_CACHE_HOME")
    try:
        cache.prepare(directory)
    except OSError as problem:
        what, _, cure = (problem.strerror or str(problem)).partition("; ")
        return failed(f"{directory} cannot be used: {what}", cure or "set XDG_CACHE_HOME to a folder of yours")
    if not os.access(directory, os.W_OK | os.X_OK):
        return warned(f"{directory} cannot be written to: every process compiles the kernel anew", "set XDG_CACHE_HOME")
    binaries = list(directory.glob("*.cubin"))
    size = sum(file.stat().st_size for file in binaries)
    return passed(f"{directory}: {len(binaries)} compiled kernels, {size / 2**20:.1f} MiB")


def autotune_cache(around: Surroundings) -> Outcome:
    """FlashInfer's persisted tuning results: with several ranks they can deadlock the second start."""
    root = autotune_root()
    files = sorted(root.rglob("autotune_configs*.json")) if root.is_dir() else []
    ranks = {file.stem for file in files if file.stem != "autotune_configs"}
    if len(ranks) > 1:
        return warned(
            f"{root} holds the autotuning results of {len(ranks)} ranks: a start with TP > 1 can deadlock on them",
            f"rm -r {root}, or --no-enable-flashinfer-autotune",
        )
    return passed(f"{root}: results of one rank" if files else "no persisted FlashInfer autotuning results")


def autotune_root() -> Path:
    """As vLLM places it (model_executor/warmup/flashinfer_autotune_cache.py), above the parts FlashInfer names."""
    if chosen := os.environ.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"):
        return Path(chosen).expanduser()
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vllm"
    )
    return Path(root).expanduser() / "flashinfer_autotune_cache"


def memory(around: Surroundings) -> Outcome:
    """On integrated GPUs vLLM counts memory that is available, and the driver needs memory that is free."""
    now = host_memory.read()
    text = str(now)
    if not around.hardware.integrated:
        return passed(f"{text}; the GPU has memory of its own" if around.hardware.devices else text)
    if now.available - now.free > SHARE * now.available:
        return warned(
            f"{text}: the driver of an integrated GPU gets what is free, and not the page cache",
            "`python -m overlay flush-cache`, right before the start",
        )
    return passed(f"{text}, shared with the GPU")


def running(around: Surroundings) -> Outcome:
    """vLLM processes of this user: all with the overlay, and all with the same one?"""
    processes = list(live.processes())
    if not processes:
        return passed("no vLLM process of this user is running")
    without = [str(process["pid"]) for process in processes if "fingerprint" not in process]
    if without:
        return warned(
            f"vLLM runs without the overlay in process {', '.join(without)}",
            "its PYTHONPATH was not set when that process started; restart it",
        )
    fingerprints = sorted({str(process["fingerprint"]) for process in processes})
    if len(fingerprints) > 1:
        return warned(f"processes run different overlays: {', '.join(fingerprints)}", "restart the engine")
    return passed(f"vLLM processes: {len(processes)}, fingerprint {fingerprints[0]}")
