"""What a process says of itself: whole for every reader, in a file that is its own, whatever else its process does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay import live
from tests.conftest import run_python

# A process that calls itself vLLM's and does `work` for ever, once it has said so.
BUSY = """
import socket
from overlay import live
states = ["armed", "retired"]
def report():
    states.reverse()
    return {{"fingerprint": "f", "patches": {{f"p{{i}}": states[0] * 40 for i in range(15)}}}}
{publish}
print("up", flush=True)
while True:
    {work}
"""
DESCRIPTORS = "[s.close() for s in [socket.socket() for _ in range(30)]]"


@pytest.fixture
def busy(tmp_path: Path) -> Iterator:
    """`busy(publish, work) -> (directory like /proc with that process alone, pid)`."""
    started: list[subprocess.Popen] = []

    def start(publish: str, work: str) -> tuple[Path, int]:
        code = BUSY.format(publish=publish, work=work)
        process = subprocess.Popen(
            ["VLLM::Worker", "-c", code], executable=sys.executable, cwd=live.__file__.rpartition("/overlay/")[0],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "up\n"
        (tmp_path / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        return tmp_path, process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_answer_that_is_given_again_and_again_is_read_whole(busy):
    proc, _ = busy("live.publish(report)", "live.refresh()")
    seen = set()
    for _ in range(1000):
        (said,) = live.processes(proc)
        assert said["fingerprint"] == "f"
        (state,) = set(said["patches"].values())  # none is of the answer before
        seen.add(state)
    assert seen == {"armed" * 40, "retired" * 40}


def test_a_listing_that_misses_the_answer_is_not_believed(busy, monkeypatch):
    """A file that moves to a lower number while descriptors are listed is in none of the listing's places."""
    proc, _ = busy("live.publish(report)", "import time; time.sleep(1)")
    listed, missed = Path.iterdir, []

    def iterdir(self):
        if self.name == "fd" and len(missed) < 2:
            missed.append(self)
            return iter(())
        return listed(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    (said,) = live.processes(proc)
    assert len(missed) == 2 and said["fingerprint"] == "f"


@pytest.mark.parametrize("publish", ["live.publish(report)", ""])
def test_a_process_whose_descriptors_come_and_go_is_not_missed(busy, publish):
    proc, pid = busy(publish, DESCRIPTORS)
    for _ in range(200):
        (said,) = live.processes(proc)
        assert said["command"].startswith("VLLM::Worker")
        assert said["pid"] == pid and ("patches" in said) == bool(publish)


def test_a_half_written_answer_is_never_an_error(tmp_path: Path):
    """One that stays half-written, as of a process that was stopped in the middle of it."""
    file = os.memfd_create(live.NAME)
    try:
        os.write(file, b'{"pid": 1, "patches": {"a')
        directory = tmp_path / "7"
        (directory / "fd").mkdir(parents=True)
        (directory / "cmdline").write_bytes(b"VLLM::EngineCore\0")
        (directory / "fd" / "3").symlink_to(f"/proc/self/fd/{file}")
        real = os.readlink
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "readlink", lambda link: real(real(link)) if Path(link).name == "3" else real(link))
            assert list(live.processes(tmp_path)) == [{"pid": 7, "command": "VLLM::EngineCore"}]
    finally:
        os.close(file)


# Code that makes a daemon closes every descriptor; the files that are opened next get the numbers.
DAEMON = """
import json, os, tempfile
from overlay import live
state = ["before"]
live.publish(lambda: {"state": state[0]})
def said():
    return [p.get("state") for p in live.processes() if p["pid"] == os.getpid()]
def opened(number):
    files = []
    while number not in files:
        files.append(os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR))
        os.write(files[-1], b"precious")
    return files
def untouched(files):
    return all(os.pread(file, 4096, 0) == b"precious" for file in files)
os.closerange(3, 256)
state[0] = "after"
live.refresh()
closed = said()
mine = live._file[0]
os.closerange(3, 256)
files = opened(mine)
live.refresh()
taken = untouched(files), said()
mine = live._file[0]
os.close(mine)
files += opened(mine)
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, json.dumps([untouched(files), said()]).encode())
    os._exit(0)
os.wait()
print(json.dumps([closed, *taken, *json.loads(os.read(read, 4096))]))
"""


def test_a_descriptor_that_other_code_closed_and_took_is_left_alone():
    assert run_python(DAEMON) == [["after"], True, ["after"], True, ["after"]]


def test_where_no_file_can_be_had_it_is_said_once_and_nothing_fails():
    code = """
import json, logging, os
from overlay import live
lines = []
live.logger.warning = lambda text, *args: lines.append(text % args)
def no(name):
    raise PermissionError(1, "Operation not permitted")
os.memfd_create = no
live.publish(lambda: {})
live.refresh()
print(json.dumps(lines))
"""
    (line,) = run_python(code)
    assert "status --live will not see" in line and "Operation not permitted" in line
