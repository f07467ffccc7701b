"""vLLM's real Worker and MemorySnapshot on an integrated GPU whose memory is a script.

torch's memory calls answer from it, psutil answers its MemAvailable, and host_memory reads its /proc/meminfo.
"""

import importlib
import tempfile
import traceback
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from overlay import host_memory
from overlay.host_memory import GIB
from overlay.patches.integrated_memory import UTILS, WORKER
from tests.patches import harness

TOTAL = 120 * GIB


@dataclass
class Machine:
    """Bytes: what torch holds, what the page cache holds, what everybody else does; peak of the profile run."""

    torch: int = 0
    cache: int = 0
    others: int = 10 * GIB
    peak: int = 0

    @property
    def free(self) -> int:
        return TOTAL - self.torch - self.cache - self.others

    def meminfo(self) -> str:
        fields = {
            "MemTotal": TOTAL, "MemFree": self.free, "MemAvailable": self.free + self.cache, "Cached": self.cache,
        }  # fmt: skip
        return "".join(f"{name}: {size // 1024} kB\n" for name, size in fields.items())


class MemInfo:
    """Stands in for the path of /proc/meminfo."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def read_text(self) -> str:
        return self.machine.meminfo()


def worker_of(module: Any, utils: Any, machine: Machine, profile: Any, asked: int | None) -> Any:
    """A Worker between loading and profiling: everything that determine_available_memory reads."""
    worker = object.__new__(module.Worker)
    device = torch.device("cuda:0")
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="/nowhere", enforce_eager=True, multimodal_config=None),
        load_config=SimpleNamespace(download_dir=None),
        compilation_config=SimpleNamespace(
            cudagraph_mode=importlib.import_module("vllm.config.compilation").CUDAGraphMode.NONE,
            cudagraph_mm_encoder=False,
        ),
    )
    worker.__dict__.update(
        device=device, vllm_config=config, model_config=config.model_config, use_v2_model_runner=True,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=asked, gpu_memory_utilization=0.9),
        parallel_config=SimpleNamespace(), randomize_dummy_inputs=False, rank=0, local_rank=0,
        requested_memory=int(0.9 * TOTAL), init_snapshot=utils.MemorySnapshot(device=device),
        model_runner=SimpleNamespace(model_memory_usage=0, profile_run=profile, profile_cudagraph_memory=lambda: 0),
        _scoped_allocator_max_split=lambda **k: nullcontext(),
    )  # fmt: skip
    return worker


def determine(
    cached: int = 0, given_back_while_loading: int = 0, given_back_while_profiling: int = 0, weights: int = 60,
    asked: int | None = None, plan: int | None = None, integrated: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Boot on the script: snapshot, load `weights`, let others give memory back, profile. Sizes in GiB.

    `plan`: the KV cache that an earlier boot's start-up plan asks for, replayed where vLLM replays it.
    """
    module, utils = importlib.import_module(WORKER), importlib.import_module(UTILS)
    machine = Machine()
    accelerator = SimpleNamespace(
        memory_stats=lambda device: {
            "allocated_bytes.all.peak": machine.torch + machine.peak, "allocated_bytes.all.current": machine.torch,
        },
        get_memory_info=lambda device: (machine.free, TOTAL),
        memory_reserved=lambda device: machine.torch, empty_cache=lambda: None,
        reset_peak_memory_stats=lambda device: None, synchronize=lambda *a: None,
    )  # fmt: skip

    def profile(**kwargs: Any) -> None:
        machine.peak = 4 * GIB
        machine.others -= given_back_while_profiling * GIB

    def apply_plan(worker: Any) -> None:
        if plan is not None:
            worker.cache_config.kv_cache_memory_bytes = plan * GIB

    platform = SimpleNamespace(
        is_integrated_gpu=lambda index: integrated, is_cuda_alike=lambda: True, is_xpu=lambda: False,
        is_rocm=lambda: False, device_name="cuda",
    )  # fmt: skip
    with ExitStack() as stack:
        for target, name, value in (
            (torch, "accelerator", accelerator),
            (module, "current_platform", platform),
            (utils, "current_platform", platform),
            (utils.psutil, "virtual_memory", lambda: SimpleNamespace(available=machine.free + machine.cache)),
            (host_memory, "MEMINFO", MemInfo(machine)),
            (module, "set_current_vllm_config", lambda config: nullcontext()),
            (module, "maybe_apply_startup_plan", apply_plan),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        for name in ("maybe_save_startup_plan", "maybe_rocm_profiling_fallback"):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, lambda *a: None))
        worker = worker_of(module, utils, machine, profile, asked and asked * GIB)
        machine.torch, machine.cache = weights * GIB, cached * GIB
        machine.others -= given_back_while_loading * GIB
        try:
            return {"kv": worker.determine_available_memory() / GIB}
        except Exception as error:
            return {"error": type(error).__name__, "said": str(error), "trace": traceback.format_exc()[-800:]}


def measure() -> dict[str, Any]:
    return {
        "no page cache": determine(),
        "page cache": determine(cached=30),
        "no page left": determine(cached=48),
        "asked for too much": determine(cached=30, asked=34),
        "asked for what is there": determine(asked=34),
        "planned too much": determine(cached=30, plan=44),
        "planned what is there": determine(plan=44),
        "given back while loading": determine(weights=2, given_back_while_loading=8),
        "given back while profiling": determine(weights=1, given_back_while_profiling=5),
        "memory of its own": determine(cached=20, integrated=False),
    }


def load() -> dict[str, Any]:
    """Which files' pages are dropped while the real Worker.load_model runs, and after it."""
    module = importlib.import_module(WORKER)
    folder = Path(tempfile.mkdtemp())
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"\0" * (2 << 20))
    (folder / "config.json").write_text("{}")
    dropped: list[list[str]] = []
    machine = Machine(cache=109 * GIB)
    worker = worker_of(module, SimpleNamespace(MemorySnapshot=lambda device: None), machine, None, None)
    worker.vllm_config.model_config.model = str(folder)
    worker.vllm_config.weight_transfer_config = None
    during: list[int] = []

    def slow_load(**kwargs: Any) -> None:
        import time

        deadline = time.monotonic() + 30
        while not dropped and time.monotonic() < deadline:
            time.sleep(0.05)
        during.append(len(dropped))

    worker.model_runner.load_model = slow_load
    worker.__dict__["_maybe_get_memory_pool_context"] = lambda tag: nullcontext()
    with (
        mock.patch.object(module, "current_platform", SimpleNamespace(is_integrated_gpu=lambda index: True)),
        mock.patch.object(module, "set_current_vllm_config", lambda config: nullcontext()),
        mock.patch.object(host_memory, "MEMINFO", MemInfo(machine)),
        mock.patch.object(host_memory, "drop_files", lambda files: dropped.append([file.name for file in files])),
    ):
        worker.load_model()
    return {"during": during[0], "all": len(dropped), "files": dropped[-1]}


def run() -> dict[str, Any]:
    wrapped, loading = measure(), load()
    with harness.without("integrated_memory"):
        return {"wrapped": wrapped, "stock": measure(), "loading": loading}
