"""A start that takes long: is it still working, or does it hang?

"No available shared memory broadcast block found in 60 seconds" is printed in both cases. Workers that use more than
one core are autotuning or compiling; workers that wait for each other use one core at most.
"""

import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from itertools import takewhile

from overlay.doctor.checks import Outcome, Surroundings, passed, warned

BUSY = 150.0  # percent of one core
SAMPLE_SECONDS = 1.0
# A command line of vLLM's: `vllm serve`, `python -m vllm.entrypoints...`, or a process that it has renamed.
OF_VLLM = re.compile(r"(^|[\s/])vllm(\s|$)|\bvllm\.entrypoints\b|^VLLM::")


@dataclass(frozen=True)
class Worker:
    """A vLLM process with the CPU time of itself and its descendants, in percent of one core."""

    pid: int
    name: str
    percent: float


def boot(around: Surroundings) -> Outcome:
    try:
        import psutil  # vLLM requires it
    except ModuleNotFoundError:
        return warned("processes cannot be looked at: psutil is not installed", "use the Python that has vLLM")
    processes = [process for process in psutil.process_iter() if _name(process).startswith("VLLM::")]
    if not processes:
        return passed("no engine is running or starting")
    workers = measure(processes)
    outcomes = [
        judge([worker for worker in workers if worker.pid in members], healthy(server))
        for server, members in engines(processes).items()
    ]
    return next((outcome for outcome in outcomes if outcome.status != "pass"), outcomes[0])


def judge(workers: list[Worker], answers: bool) -> Outcome:
    """`answers`: the API server's /health says that the engine lives."""
    listed = ", ".join(f"{worker.name} {worker.percent:.0f} %" for worker in workers)
    if answers:
        return passed(f"the engine serves ({listed})")
    if any(worker.percent > BUSY for worker in workers):
        return passed(f"not a hang: autotuning or compiling ({listed}); --no-enable-flashinfer-autotune starts sooner")
    return warned(
        f"/health does not answer, and no process uses more than {BUSY:.0f} % of a core ({listed}): loading, or a hang",
        "if it stays so for minutes and nothing is read from disk, it hangs: restart it, and see the check "
        "`autotune_cache`",
    )


def measure(processes: list) -> list[Worker]:
    """CPU use over one second, of each process with its descendants (nvcc and ninja are children of a worker)."""
    groups = {process: [process, *_quiet(lambda p=process: p.children(recursive=True), [])] for process in processes}
    for group in groups.values():
        for member in group:
            _quiet(member.cpu_percent, 0.0)
    time.sleep(SAMPLE_SECONDS)
    return [
        Worker(process.pid, _name(process), sum(_quiet(member.cpu_percent, 0.0) for member in group))
        for process, group in groups.items()
    ]


def engines(processes: list) -> dict:
    """Process ids by engine: the topmost process of vLLM's above them (its API server, most often)."""
    found: dict = {}
    for process in processes:
        above = list(takewhile(lambda parent: OF_VLLM.search(_command(parent)), _quiet(process.parents, [])))
        found.setdefault(above[-1] if above else process, set()).add(process.pid)
    return found


def healthy(server) -> bool:
    """Does this process, or one that it started, listen on a port that answers /health?"""
    family = [server, *_quiet(lambda: server.children(recursive=True), [])]
    ports = {
        connection.laddr.port
        for member in family
        for connection in _quiet(lambda m=member: m.net_connections(kind="inet"), [])
        if connection.status == "LISTEN"
    }
    return any(_answers(port) for port in ports)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _name(process) -> str:
    """The name that vLLM gives its processes stands in the place of their command line."""
    return _command(process).partition(" ")[0]


def _command(process) -> str:
    return " ".join(_quiet(process.cmdline, []))


def _quiet(ask, otherwise):
    """A process's answer, or `otherwise` where it ended meanwhile or belongs to another user."""
    import psutil

    try:
        return ask()
    except psutil.Error:
        return otherwise
