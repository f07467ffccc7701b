"""Child processes that share the GPUs of one machine: started as room allows, stopped in time, none left behind."""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from overlay import endings, measurement
from overlay.hardware import Hardware
from tests.conftest import ROOT, with_overlay, without_overlay

PR_SET_CHILD_SUBREAPER = 36
ENGINE_GIB = 10.0  # that one process of a tiny engine may take: 14 of them shared an H200 of 140 GiB
ASK_S = 15.0  # from SIGTERM to SIGKILL
ENDED = "jobs.json"  # how the children ended, beside their answers
# What ends a driver from outside: a time limit, a terminal that is closed. Ctrl-C raises by itself.
# NVLink multicast is off: cards of 12.x have none, and a fault in it takes every GPU of a host with it.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """`python -m COMMAND` on some GPUs; `ranks` of its processes compute there."""

    name: str
    command: tuple[str, ...]
    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    env: Mapping[str, str]
    log: Path
    ranks: int
    first: bool = False  # of those that the others wait for: they fill the caches that all share
    alone: bool = False  # no other job runs on its GPUs meanwhile

    def share(self, gpu: str) -> float:
        """How many of its ranks compute on `gpu`."""
        return self.ranks / len(self.gpus) if gpu in self.gpus else 0.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended: its exit status, None where it was stopped or never started, and its seconds."""

    status: int | None
    seconds: float

    def __str__(self) -> str:
        if self.status is None:
            return (
                f"no answer in time: stopped after {self.seconds:.0f} s" if self.seconds else "never started, for time"
            )
        if self.status >= 0:
            return f"exit {self.status} after {self.seconds:.0f} s"
        by = signal.Signals(-self.status).name
        killer = ", which is also what the kernel sends where memory runs out" if by == "SIGKILL" else ""
        return f"died of {by} after {self.seconds:.0f} s{killer}"


def remember(ended: Mapping[str, Ended], work: Path) -> None:
    """Keep how jobs ended beside their answers; what an earlier run left of others stays."""
    (work / ENDED).write_text(
        json.dumps({name: dataclasses.astuple(end) for name, end in (recall(work) | ended).items()})
    )


def recall(work: Path) -> dict[str, Ended]:
    """What `remember` kept; empty where the run was cut off before, or is older than that file."""
    file = work / ENDED
    return {name: Ended(*end) for name, end in json.loads(file.read_text()).items()} if file.exists() else {}


def gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = len(Hardware().devices)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")[:count]) if named else tuple(map(str, range(count)))


def room(gib: float = ENGINE_GIB) -> int:
    """How many processes of `gib` GiB the smallest visible GPU holds. Raises SystemExit where it holds none.

    A GPU without memory of its own (GB10) has the host's.
    """
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    there = min((device.memory or host for device in Hardware().devices), default=0) / 2**30
    if there < gib:
        raise SystemExit(f"a GPU of {there:.1f} GiB is too small: one engine of this test may take {gib:.0f} GiB")
    return int(there / gib)


def environments(work: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Of children without and with the overlay. Its kernel cache starts empty; every other cache stays as it is."""
    base = {**os.environ, **NO_MULTICAST}
    caches = Path(base.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    base.setdefault("VLLM_CACHE_ROOT", str(caches / "vllm"))
    base["XDG_CACHE_HOME"] = str(work / "cache")
    settings = work / "patches.toml"
    capability = measurement.provenance()["capability"]
    settings.write_text(f'[patches.sparse_mla]\nenabled = "auto"\nother_capabilities = "{capability}"\n')
    return without_overlay(base), {**with_overlay(base), "OVERLAY_CONFIG": str(settings)}


def run(
    jobs: Sequence[Job],
    at_once: int,
    seconds: float,
    *,
    head_start: float = 0.0,
    stagger: float = 1.0,
    say: Callable[[str], None] = print,
) -> dict[str, Ended]:
    """Run all jobs in the order given, up to `at_once` ranks on a GPU at a time, and stop what runs after `seconds`.

    Jobs that are not `first` wait until one of the first has ended well, `head_start` seconds at most. When this
    returns or raises, none of their processes runs, whatever process group they moved to.
    """
    started = time.monotonic()
    waiting = sorted(jobs, key=lambda job: not job.first)
    running: dict[Job, tuple[subprocess.Popen, float]] = {}
    ended: dict[str, Ended] = {}
    last = -stagger

    def passed() -> float:
        return time.monotonic() - started

    def collect() -> None:
        for job in [job for job, (process, _) in running.items() if process.poll() is not None]:
            process, since = running.pop(job)
            ended[job.name] = Ended(process.returncode, round(passed() - since, 1))
            say(f"{passed():5.0f} s  {job.name}: exit {process.returncode} after {passed() - since:.0f} s")

    def may_start(job: Job) -> bool:
        warm = job.first or any(end.status == 0 for end in ended.values()) or passed() >= head_start
        return warm and passed() - last >= stagger and has_room(job, running, at_once)

    with nothing_left_behind():
        try:
            while (waiting or running) and passed() < seconds:
                collect()
                if waiting and may_start(waiting[0]):
                    job, last = waiting.pop(0), passed()
                    running[job] = (_start(job), last)
                    say(f"{last:5.0f} s  {job.name}: started on GPU {','.join(job.gpus)}")
                time.sleep(0.2)
        finally:
            for job, (process, since) in running.items():
                say(f"{passed():5.0f} s  {job.name}: stopped after {passed() - since:.0f} s, see {job.log}")
                ended[job.name] = Ended(None, round(passed() - since, 1))
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            deadline = time.monotonic() + ASK_S
            for process, _ in running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
    return ended | {job.name: Ended(None, 0.0) for job in waiting}


def has_room(job: Job, running: Iterable[Job], at_once: int) -> bool:
    """Whether `job` may join those that run: none of the two alone, or `at_once` ranks on each of its GPUs.

    A job larger than that runs where nothing else does, rather than never.
    """
    others = [other for other in running if set(other.gpus) & set(job.gpus)]
    if job.alone or any(other.alone for other in others):
        return not others
    busiest = max(sum(each.share(gpu) for each in (job, *others)) for gpu in job.gpus)
    return busiest <= at_once or not others


def _start(job: Job) -> subprocess.Popen:
    env = {**job.env, "CUDA_VISIBLE_DEVICES": ",".join(job.gpus)}
    with job.log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *job.command],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """End every process that was started inside and still runs, at the end or at SIGTERM or SIGHUP: SystemExit then.

    What a child leaves behind becomes a child of this process (a "subreaper"), so no process group hides it. SIGHUP
    stays ignored under nohup.
    """
    before = set(descendants(os.getpid()))
    _subreaper(1)
    with endings.as_exceptions():
        try:
            yield
        finally:
            with endings.undisturbed():
                while left := set(descendants(os.getpid())) - before:
                    for pid in left:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    time.sleep(0.05)
                _subreaper(0)


def _subreaper(on: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, on, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(pid: int) -> list[int]:
    """Every process below `pid` that is not a zombie."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        if state != "Z":
            children.setdefault(int(parent), []).append(int(file.parent.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, ())]
        found += new
    return found
