"""The child processes of the GPU tests: how many at a time, in which order, and that none outlives its driver."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.gpu import jobs


@pytest.fixture
def job(tmp_path: Path):
    def make(name: str, way: str = "ok", ranks: int = 1, first: bool = False, gpus: tuple[str, ...] = ("0",)):
        command = ("tests.reliability.children", way, str(tmp_path / "started"))
        return jobs.Job(name, command, gpus, os.environ, tmp_path / f"{name}.log", ranks, first)

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


def test_nothing_is_left_behind_when_the_driver_is_ended(tmp_path):
    code = f"""
import os
from pathlib import Path
from tests.gpu import jobs
jobs.ASK_S = 0.5
path = Path({str(tmp_path)!r})
command = ("tests.reliability.children", "stubborn", str(path / "started"))
jobs.run([jobs.Job("x", command, ("0",), os.environ, path / "log", 1)], 1, 600.0)
"""
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    file = tmp_path / "started.pid"
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(30) == 128 + signal.SIGTERM
    assert not alive(int(file.read_text()))


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
