"""Signals while NVRTC compiles a kernel: nothing hangs, the cache stays whole, and the next rank gets on."""

import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("cupy_backends")

from tests.conftest import ROOT

COMPILE = """
import sys
from pathlib import Path
from overlay.kernel import build, cache
from overlay.kernel.variants import variants_for

def compiling(program, arch):
    print("compiling", flush=True)
    binary = build.build(program, arch)
    print("compiled", flush=True)
    return binary

program = build.attention_program(variants_for(64, "fp8")[0])
found = cache.obtain(program, "sm_121", build.nvrtc_version(), compiling, Path(sys.argv[1]))
print(len(found.cubin), flush=True)
"""


@pytest.fixture(scope="module")
def start():
    """`start(directory)` -> a process that compiles; one that hangs does not outlive the module."""
    started = []

    def begin(directory):
        command = [sys.executable, "-c", COMPILE, str(directory)]
        pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(subprocess.Popen(command, cwd=ROOT, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def finished(process):
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return said.split()


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The size of the binary that an undisturbed compilation gives."""
    *steps, size = finished(start(tmp_path_factory.mktemp("whole") / "cache"))
    assert steps == ["compiling", "compiled"]
    return size


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_while_compiling(tmp_path, start, whole, number):
    directory = tmp_path / "cache"
    victim = start(directory)
    assert victim.stdout.readline() == "compiling\n"  # it holds the lock
    time.sleep(0.05)  # now it is in the compiler, which takes seconds
    waiting = start(directory)
    victim.send_signal(number)
    victim.communicate(timeout=120)
    # Ended by the signal, or done: an exit() of the compiler's own would be status 4, or hang.
    assert victim.returncode in (-number, 0)
    assert number != signal.SIGKILL or victim.returncode
    assert finished(waiting)[-1] == whole
    assert not list(directory.glob(".*")), "a temporary file was left"
    assert finished(start(directory)) == [whole]  # from the cache: nobody compiles any more
