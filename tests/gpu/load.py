"""`vllm serve` with a tiny model under load: clients that ask, give up, and send nonsense; ours beside vLLM's own.

    python -m tests.gpu.load [--tp N] [--clients N] [--seconds N] [--budget SECONDS] [--folder FOLDER]

Writes docs/measurements/load-GPU.json (load-tpN-GPU.json for several ranks) and exits 1 where an answer was lost,
crossed or differs from itself alone by more than vLLM's own does, where memory grows, or where something hangs.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlay import measurement, serving
from overlay.hardware import Hardware
from tests.conftest import ROOT, without_overlay
from tests.gpu import jobs, load_cases, load_client
from tests.gpu.load_cases import Sample, difference
from tests.gpu.rank_cases import NO_FUSION, finite

ROWS = "bf16"
SAMPLE_S, STOP_S = 4.0, 25.0
RESERVED_S = 60.0  # of the budget, for what follows the load
METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclasses.dataclass(frozen=True)
class Running:
    """One started server. `gpus` as CUDA_VISIBLE_DEVICES names them."""

    side: str
    process: subprocess.Popen
    port: int
    gpus: tuple[str, ...]
    log: Path


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
        *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(8 << 30)),
        *("--tensor-parallel-size", str(tp), "--disable-custom-all-reduce"),
        *("--compilation-config", json.dumps(compilation), "--disable-uvicorn-access-log"),
    ]


@contextlib.contextmanager
def servers(tp: int, clients: int, folder: Path) -> Iterator[list[Running]]:
    """Ours, and for one rank vLLM's own on the next GPU (on the same one where there is no other)."""
    model = folder / f"load-tiny-{tp}"
    heads = "64" if tp > 1 else "16"
    command = [sys.executable, "-m", "overlay", "tiny", str(model), "--heads", heads, "--seed", "1"]
    subprocess.run(command, cwd=ROOT, env=without_overlay(os.environ), check=True, stdout=subprocess.DEVNULL)
    stock, ours = jobs.environments(folder)
    gpus = jobs.gpus()
    asked = [("ours", ours, gpus[:tp])] + ([("stock", stock, gpus[-1:])] if tp == 1 else [])
    with jobs.nothing_left_behind():
        found = [start(side, env, on, model, flags(tp, clients, side), folder) for side, env, on in asked]
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


async def healthy(running: Running, session: Any, until: float) -> None:
    """Wait for /health. Raises RuntimeError with the end of the log where it does not come."""
    import aiohttp

    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"http://127.0.0.1:{running.port}/health") as answer:
                if answer.status == 200:
                    return
        status = running.process.poll()
        if status is not None or time.monotonic() > until:
            what = f"ended with {status}" if status is not None else "is not healthy in time"
            raise RuntimeError(f"the {running.side} server {what}:\n{serving.tail(running.log, 40)}")
        await asyncio.sleep(1.0)


async def measure(running: Running, clients: int, seconds: float, until: float) -> dict[str, Any]:
    """All figures of one server: alone, under load, idle again, alone again."""
    async with load_client.session() as session:
        await healthy(running, session, until - RESERVED_S)
        server = load_client.Server(f"http://127.0.0.1:{running.port}", "tiny", session)
        for number in range(2):  # the first answers compile what only a first request needs
            await server.whole(number)
        server.alone = await server.ask_alone()
        say(f"{running.side}: {len(server.alone)} answers alone; now {clients} clients")
        seconds = min(seconds, until - RESERVED_S - time.monotonic())
        samples: list[Sample] = []
        watch = asyncio.create_task(sample(running, samples))
        began = time.monotonic()
        try:
            await load_client.load(server, clients, seconds)
        finally:
            watch.cancel()
        took = time.monotonic() - began
        left = await load_client.idle(server, METRICS)
        again = await server.ask_alone()
    figures = server.tally.figures(load_cases.tolerance(ROWS))
    figures["seconds"] = round(took, 1)
    figures["requests_a_second"] = round(sum(figures["requests"].values()) / took, 1)
    figures["left_when_idle"] = left
    figures["alone_again"] = max(difference(a, b)[0] for a, b in zip(server.alone, again, strict=True))
    figures["memory_growth_mib"] = load_cases.growth(samples, took)
    figures["memory_mib"] = [dataclasses.astuple(s) for s in samples[:: max(1, len(samples) // 20)]]
    figures["exit"] = running.process.poll()
    return figures


async def sample(running: Running, samples: list[Sample]) -> None:
    began = time.monotonic()
    while True:
        samples.append(await asyncio.to_thread(memory, running, time.monotonic() - began))
        await asyncio.sleep(SAMPLE_S)


def memory(running: Running, at: float) -> Sample:
    """Host memory that belongs to the server's processes alone, and what they hold of the GPUs."""
    pids = [running.process.pid, *jobs.descendants(running.process.pid)]
    host = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            host += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    held = [line.split(",") for line in nvidia_smi("--query-compute-apps=pid,used_memory")]
    gpu = [float(used) for pid, used in held if int(pid) in pids]
    if not gpu:  # where processes cannot be told apart, what the GPUs have given to anybody
        gpu = [float(used) for (used,) in (line.split(",") for line in nvidia_smi("--query-gpu=memory.used", running))]
    return Sample(round(at, 1), sum(gpu) if gpu else None, round(host / 1024, 1))


def nvidia_smi(query: str, running: Running | None = None) -> list[str]:
    """Lines of numbers; none where there is no driver, or where it does not tell."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    command += ["-i", ",".join(running.gpus)] if running else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return [line for line in done.stdout.splitlines() if re.fullmatch(r"[\d ,]+", line)]


def judge(ours: Mapping[str, Any], stock: Mapping[str, Any] | None) -> list[str]:
    """Everything that is not as it must be; empty where nothing is."""
    problems = [*ours["problems"], *load_cases.refusal_problems(ours, stock)]
    if stock is not None:
        problems += load_cases.noise_problems(ours, stock)
    problems += load_cases.growth_problems(ours["memory_growth_mib"], (stock or {}).get("memory_growth_mib"))
    problems += [f"{name} is {value} when nobody asks" for name, value in ours["left_when_idle"].items() if value]
    if len(ours["left_when_idle"]) != len(METRICS):
        problems.append(f"/metrics has only {', '.join(ours['left_when_idle']) or 'nothing'} of {', '.join(METRICS)}")
    if ours["exit"] is not None:
        problems.append(f"the server ended with status {ours['exit']}")
    allowed = load_cases.FURTHER * max(ours["tolerance"], (stock or ours)["largest_difference"])
    if ours["alone_again"] > allowed:
        problems.append(f"alone, after the load, an answer differs by {ours['alone_again']:.3f} from before")
    for kind in ("answered", "aborted", "cancelled", "malformed"):
        if not ours["requests"].get(kind):
            problems.append(f"no request was {kind}: the load is not what it should be")
    return problems


async def measure_all(found: Sequence[Running], clients: int, seconds: float, until: float) -> dict[str, Any]:
    figures = await asyncio.gather(*(measure(running, clients, seconds, until) for running in found))
    return {running.side: figure for running, figure in zip(found, figures, strict=True)}


def run(tp: int, clients: int, seconds: float, budget: float, folder: Path) -> dict[str, Any]:
    """Serve, load, judge; write and return the measurement."""
    until = time.monotonic() + budget
    with servers(tp, clients, folder) as found:
        sides = asyncio.run(measure_all(found, clients, seconds, until))
    report = {**measurement.provenance(), "tp": tp, "clients": clients, **sides}
    report["problems"] = judge(sides["ours"], sides.get("stock"))
    for side, key in itertools.product(sides.values(), ("largest_difference", "alone_again")):
        side[key] = finite(side[key])
    measurement.keep("load" if tp == 1 else f"load-tp{tp}", report)
    return report


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.load", description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks of the server (1)")
    parser.add_argument("--clients", type=int, default=64, help="clients at a time (64)")
    parser.add_argument("--seconds", type=float, default=240, help="of load (240)")
    parser.add_argument("--budget", type=float, default=1200, help="seconds for everything; the load is cut to fit")
    parser.add_argument("--folder", type=Path, help="for the checkpoint and the logs (a temporary one)")
    options = parser.parse_args()
    if len(jobs.gpus()) < options.tp:
        raise SystemExit(f"{len(jobs.gpus())} GPUs: --tp {options.tp} needs as many")
    with tempfile.TemporaryDirectory(prefix="load-") as scratch:
        folder = options.folder or Path(scratch)
        report = run(options.tp, options.clients, options.seconds, options.budget, folder)
    for side in ("ours", "stock"):
        if side in report:
            print(f"{side:6} {json.dumps({k: v for k, v in report[side].items() if k != 'memory_mib'})}")
    for problem in report["problems"]:
        print(problem)
    return int(bool(report["problems"]))


if __name__ == "__main__":
    sys.exit(main())
