"""The servers that are put under load: ours and vLLM's own, at once or in turn, and the memory they hold."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlay import serving
from overlay.hardware import Hardware
from tests.conftest import ROOT, without_overlay
from tests.gpu import jobs, load_cases
from tests.gpu.load_judge import Sample
from tests.gpu.rank_cases import NO_FUSION
from tests.gpu.smi import nvidia_smi

KV_CACHE_GIB = 8
SERVER_GIB = jobs.ENGINE_GIB + KV_CACHE_GIB - 1  # an engine of the other tests has 1 GiB of cache
STOP_S = 25.0


@dataclass(frozen=True)
class Running:
    """One started server. `gpus` as CUDA_VISIBLE_DEVICES names them."""

    side: str
    process: subprocess.Popen
    port: int
    gpus: tuple[str, ...]
    log: Path


Turn = list[tuple[str, tuple[str, ...]]]


def turns(tp: int, gpus: tuple[str, ...]) -> list[Turn]:
    """Sides and their GPUs: both at once where there are enough GPUs, else vLLM's own after ours on the same.

    Never two servers on one GPU: ranks that wait for each other use up whole time slices, and in a container the
    driver names no processes, so that memory is known of a whole GPU only.
    """
    ours, stock = ("ours", gpus[:tp]), ("stock", gpus[-tp:])
    return [[ours, stock]] if len(gpus) >= 2 * tp else [[ours], [stock]]


def flags(tp: int, clients: int, side: str) -> list[str]:
    """`vllm serve` flags: every batch size that the clients can reach, and prompts computed anew every time."""
    # On 12.x vLLM has no backend of its own for bf16 rows; its noise is then that of the rows it has.
    capability = Hardware().capability
    native = side == "stock" and capability is not None and capability[0] == 12
    kv_cache_dtype = "fp8_ds_mla" if native else "bfloat16"
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size <= clients]
    compilation = {"cudagraph_capture_sizes": sizes, "pass_config": NO_FUSION}
    return [
        *("--dtype", "bfloat16", "--kv-cache-dtype", kv_cache_dtype, "--seed", "0"),
        *("--max-model-len", str(load_cases.LONGEST), "--max-num-batched-tokens", "2048"),
        *("--max-num-seqs", str(clients), "--no-enable-prefix-caching", "--no-enable-flashinfer-autotune"),
        *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(KV_CACHE_GIB << 30)),
        *("--tensor-parallel-size", str(tp), "--disable-custom-all-reduce"),
        *("--compilation-config", json.dumps(compilation), "--disable-uvicorn-access-log"),
    ]


def checkpoint(tp: int, folder: Path) -> Path:
    """A tiny model whose heads `tp` ranks can share: 16 a rank where there are several."""
    model = folder / f"load-tiny-{tp}"
    if not model.exists():
        heads = "64" if tp > 1 else "16"
        command = [sys.executable, "-m", "overlay", "tiny", str(model), "--heads", heads, "--seed", "1"]
        subprocess.run(command, cwd=ROOT, env=without_overlay(os.environ), check=True, stdout=subprocess.DEVNULL)
    return model


@contextlib.contextmanager
def servers(turn: Turn, tp: int, clients: int, folder: Path) -> Iterator[list[Running]]:
    """The servers of one turn, started; all their processes have ended afterwards, and their memory is free."""
    model = checkpoint(tp, folder)
    envs = dict(zip(("stock", "ours"), jobs.environments(folder), strict=True))
    with jobs.nothing_left_behind():
        found = [start(side, envs[side], on, model, flags(tp, clients, side), folder) for side, on in turn]
        yield found
        stop(found)


def stop(found: Sequence[Running]) -> None:
    """Ask every server to end, as its user would, and note what it ended with; whoever does not is killed later."""
    for running in found:
        running.process.terminate()
    deadline = time.monotonic() + STOP_S
    for running in found:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(max(0.0, deadline - time.monotonic()))


def start(
    side: str, env: Mapping[str, str], gpus: tuple[str, ...], model: Path, options: Sequence[str], folder: Path
) -> Running:
    port = serving.free_port()
    log = folder / f"{model.name}-{side}.log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--served-model-name", "tiny", *options],
            env={**env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return Running(side, process, port, gpus, log)


def told_apart(running: Running) -> bool:
    """Whether the driver names this server's processes; in a container with process ids of its own it does not."""
    return bool(_held_by(_processes(running)))


def memory(running: Running, at: float, by_process: bool) -> Sample:
    """Host memory that belongs to the server's processes alone, and what they hold of the GPUs.

    Not `by_process`: what their GPUs have given to anybody, which is theirs as long as nobody else uses them.
    """
    pids = _processes(running)
    host = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            host += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    gpu = _held_by(pids) if by_process else [used for (used,) in _numbers("--query-gpu=memory.used", running.gpus)]
    return Sample(round(at, 1), float(sum(gpu)) if gpu else None, round(host / 1024, 1))


def _processes(running: Running) -> list[int]:
    return [running.process.pid, *jobs.descendants(running.process.pid)]


def _held_by(pids: Sequence[int]) -> list[int]:
    """MiB of GPU memory of each entry of the driver's list that is one of `pids`."""
    return [used for pid, used in _numbers("--query-compute-apps=pid,used_memory") if pid in pids]


def _numbers(query: str, gpus: Sequence[str] = ()) -> list[list[int]]:
    """Lines of numbers; one that has "[N/A]" says nothing."""
    lines = [line for line in nvidia_smi(query, gpus) if re.fullmatch(r"[\d ,]+", line)]
    return [[int(number) for number in line.split(",")] for line in lines]
