"""The child processes of the GPU tests: how many at a time, in which order, and that none outlives its driver."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlay.hardware import Device
from tests.conftest import ROOT, hear_signals, run_python
from tests.gpu import jobs


@pytest.fixture
def job(tmp_path: Path):
    def make(name: str, way: str = "ok", ranks: int = 1, gpus: tuple[str, ...] = ("0",), **options: bool):
        command = ("tests.reliability.children", way, str(tmp_path / "started"))
        return jobs.Job(name, command, gpus, os.environ, tmp_path / f"{name}.log", ranks, **options)

    return make


def run(todo, at_once=8, seconds=60.0, **options):
    said: list[str] = []
    return jobs.run(todo, at_once, seconds, stagger=0.0, say=said.append, **options), said


def started(tmp_path: Path) -> list[list[str]]:
    return [line.split() for line in (tmp_path / "started").read_text().splitlines()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_job_runs_on_its_gpus_and_its_status_is_kept(job, tmp_path):
    ended, said = run([job("a", gpus=("0", "1")), job("b", "fail", gpus=("3",))])
    assert {name: end.status for name, end in ended.items()} == {"a": 0, "b": 1}
    assert sorted(line[1] for line in started(tmp_path)) == ["0,1", "3"]
    assert any("b: exit 1" in line for line in said)


def test_no_more_ranks_than_there_is_room_for(job, tmp_path):
    run([job(str(i), ranks=2) for i in range(3)], at_once=4)
    times = sorted(float(line[2]) for line in started(tmp_path))
    assert times[2] - times[0] > 0.25  # the third waited for one of the others, which take 0.3 s


@pytest.mark.parametrize(
    ("new", "running", "may"),
    [
        ((2, "01"), [(2, "01")], True),  # one rank of each on each GPU
        ((2, "01"), [(2, "01"), (1, "1")], False),
        ((2, "23"), [(2, "01"), (2, "01")], True),
        ((4, "0123"), [(2, "01"), (1, "3")], True),
        ((4, "0123"), [(1, "3"), (1, "3")], False),
        ((9, "0"), [], True),
        ((9, "0"), [(1, "0")], False),
    ],
)
def test_room_is_counted_on_each_gpu(job, new, running, may):
    def of(ranks, gpus):
        return job("x", ranks=ranks, gpus=tuple(gpus))

    assert jobs.has_room(of(*new), [of(*other) for other in running], at_once=2) == may


def test_a_job_that_is_alone_shares_no_gpu_and_no_time_with_others_on_it(job):
    load, elsewhere, beside = job("load", gpus=("2", "3"), alone=True), job("a"), job("b", gpus=("1", "2"))
    assert jobs.has_room(load, [elsewhere], 8) and jobs.has_room(elsewhere, [load], 8)
    assert not jobs.has_room(load, [beside], 8) and not jobs.has_room(beside, [load], 8)


def test_a_job_larger_than_the_room_runs_alone_rather_than_never(job):
    ended, _ = run([job("large", ranks=9), job("small")], at_once=4)
    assert {end.status for end in ended.values()} == {0}


def test_the_first_jobs_fill_the_caches(job, tmp_path):
    run([job("later"), job("first", first=True)], head_start=30.0)
    times = [float(line[2]) for line in started(tmp_path)]
    assert times[1] - times[0] > 0.25


def test_the_others_wait_no_longer_than_the_head_start(job, tmp_path):
    ended, _ = run([job("first", "hang", first=True), job("later")], seconds=4.0, head_start=0.5)
    assert ended["later"].status == 0 and ended["first"].status is None


def test_what_takes_too_long_is_stopped_and_what_was_not_started_is_named(job, monkeypatch):
    monkeypatch.setattr(jobs, "ASK_S", 1.0)
    ended, said = run([job("hangs", "hang", ranks=4), job("waits", ranks=4)], at_once=4, seconds=1.5)
    assert ended["hangs"].status is None and ended["waits"] == jobs.Ended(None, 0.0)
    assert any("hangs: stopped" in line for line in said)


@pytest.mark.parametrize("way", ["orphan", "stubborn"])
def test_nothing_is_left_behind(job, tmp_path, monkeypatch, way):
    """A grandchild in a session of its own, of a child that has ended or that ignores SIGTERM."""
    monkeypatch.setattr(jobs, "ASK_S", 0.5)
    run([job("x", way)], seconds=2.0)
    assert not alive(int((tmp_path / "started.pid").read_text()))


DRIVERS = {
    "jobs": "jobs.run([job], 1, 600.0)",
    "engine_compare": """
engine_compare.write_checkpoint = lambda case, work: None
engine_compare.children = lambda todo, work, per_process: [job]
engine_compare.compare_engines(["bf16 eager"], path / "work", at_once=1, timeout=600.0)
""",
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("driver", DRIVERS)
def test_nothing_is_left_behind_when_the_driver_is_ended(tmp_path, driver, number):
    code = f"""
import os
from pathlib import Path
from tests.gpu import engine_compare, jobs
jobs.ASK_S = 0.5
path = Path({str(tmp_path)!r})
command = ("tests.reliability.children", "stubborn", str(path / "started"))
job = jobs.Job("x", command, ("0",), os.environ, path / "log", 1)
{DRIVERS[driver]}
"""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, preexec_fn=hear_signals)
    file = tmp_path / "started.pid"
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert not alive(int(file.read_text()))


def test_what_ended_a_driver_before_ends_it_afterwards_and_nohup_is_respected():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before = signal.getsignal(signal.SIGTERM)
        with jobs.nothing_left_behind():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (jobs.Ended(0, 12.0), "exit 0 after 12 s"),
        (jobs.Ended(-11, 12.0), "died of SIGSEGV after 12 s"),
        (jobs.Ended(-9, 3.0), "died of SIGKILL after 3 s, which is also what the kernel sends where memory runs out"),
        (jobs.Ended(None, 1500.0), "no answer in time: stopped after 1500 s"),
        (jobs.Ended(None, 0.0), "never started, for time"),
    ],
)
def test_how_a_job_ended(ended, said):
    assert str(ended) == said


def test_how_jobs_ended_is_kept_beside_their_answers(tmp_path):
    assert jobs.recall(tmp_path) == {}
    jobs.remember({"a": jobs.Ended(-11, 2.0), "b": jobs.Ended(0, 1.0)}, tmp_path)
    jobs.remember({"a": jobs.Ended(0, 3.0)}, tmp_path)
    assert jobs.recall(tmp_path) == {"a": jobs.Ended(0, 3.0), "b": jobs.Ended(0, 1.0)}


@pytest.mark.parametrize(("gib", "ranks"), [(140.4, 14), (95.6, 9), (31.8, 3), (11.9, 1)])
def test_as_many_engines_as_the_smallest_gpu_holds(monkeypatch, gib, ranks):
    devices = [Device("a GPU", (12, 0), False, int(size * 2**30)) for size in (150.0, gib)]
    monkeypatch.setattr(jobs.Hardware, "devices", devices)
    assert jobs.room() == ranks


def test_a_gpu_of_the_hosts_memory_has_as_much(monkeypatch):
    monkeypatch.setattr(jobs.Hardware, "devices", [Device("NVIDIA GB10", (12, 1), True)])
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert jobs.room(0.25) == int(host / 2**28)


def test_a_gpu_that_is_too_small_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(jobs.Hardware, "devices", [Device("a GPU", (12, 0), False, 8 << 30)])
    with pytest.raises(SystemExit, match=r"a GPU of 8\.0 GiB is too small: one engine of this test may take 10 GiB"):
        jobs.room()


def test_the_memory_of_a_gpu_is_what_nvml_says(fake_driver):
    code = (
        "import json; from overlay.hardware import Hardware; print(json.dumps([d.memory for d in Hardware().devices]))"
    )
    assert run_python(code, fake_driver((12, 0), devices=2, memory=32 << 30, overlay=True)) == [32 << 30] * 2
    assert run_python(code, fake_driver((12, 1), memory=0, overlay=True)) == [None]


def test_processes_of_before_are_spared():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with jobs.nothing_left_behind():
            pass
        assert alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(("named", "expected"), [("2,3", ("2", "3")), ("1", ("1",))])
def test_gpus_that_may_be_used(monkeypatch, named, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    devices = [object()] * len(expected)
    monkeypatch.setattr(jobs, "Hardware", lambda: type("Hardware", (), {"devices": devices}))
    assert jobs.gpus() == expected


def test_children_may_not_use_multicast_and_start_with_an_empty_kernel_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    stock, ours = jobs.environments(tmp_path)
    for env in (stock, ours):
        assert env["NCCL_NVLS_ENABLE"] == "0" and env["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"
        assert env["XDG_CACHE_HOME"] == str(tmp_path / "cache") and env["VLLM_CACHE_ROOT"] == "/somewhere/vllm"
    assert str(ROOT) in ours["PYTHONPATH"].split(os.pathsep)
    assert str(ROOT) not in stock.get("PYTHONPATH", "").split(os.pathsep)
