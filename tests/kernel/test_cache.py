"""The cache of compiled kernels, with real files, real processes and real faults."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from overlay.kernel import cache
from overlay.kernel.build import Binary, Program, Resources
from overlay.kernel.errors import CompileError

PROGRAM = Program("kernel", "text", 128)
RESOURCES = Resources(registers=200, spill_bytes=0, static_shared_bytes=64)


class Builder:
    """Counts its builds in a file, so that processes can be counted too."""

    def __init__(self, log, seconds=0.0):
        self.log, self.seconds = log, seconds

    def __call__(self, program, arch):
        with open(self.log, "a") as file:
            file.write("built\n")
        time.sleep(self.seconds)
        return Binary(f"{program.text} for {arch}".encode() * 100, RESOURCES)

    @property
    def builds(self):
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def builder(tmp_path):
    return Builder(tmp_path / "log")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def said(monkeypatch):
    """What the cache has warned of."""
    messages = []
    monkeypatch.setattr(cache.logger, "warning", lambda text, *args: messages.append(text % args))
    monkeypatch.setattr(cache, "_said", set())
    return messages


def obtain(builder, directory, program=PROGRAM, arch="sm_121", nvrtc="13.0"):
    return cache.obtain(program, arch, nvrtc, builder, directory)


def files(directory, suffix):
    return sorted(directory.glob(f"*{suffix}"))


def test_second_time_from_the_cache(builder, directory, said):
    first = obtain(builder, directory)
    assert obtain(builder, directory) == first == Binary(b"text for sm_121" * 100, RESOURCES)
    assert builder.builds == 1 and said == []
    assert directory.stat().st_mode & 0o777 == 0o700
    assert not list(directory.glob(".*")), "a temporary file was left"


@pytest.mark.parametrize(
    "other", [dict(program=Program("kernel", "other", 128)), dict(arch="sm_120"), dict(nvrtc="13.1")]
)
def test_another_text_architecture_or_compiler_is_another_entry(builder, directory, other):
    obtain(builder, directory)
    obtain(builder, directory, **other)
    assert builder.builds == 2 and len(files(directory, ".cubin")) == 2


def test_options_are_part_of_the_key(builder, directory, monkeypatch):
    obtain(builder, directory)
    monkeypatch.setattr(cache, "OPTIONS", ("--std=c++20",))
    obtain(builder, directory)
    assert builder.builds == 2


def truncate(cubin, about):
    cubin.write_bytes(cubin.read_bytes()[:-7])


def replace_cubin(cubin, about):
    cubin.write_bytes(b"\x7fELF of somebody else")


def empty_cubin(cubin, about):
    cubin.write_bytes(b"")


def truncate_json(cubin, about):
    about.write_text(about.read_text()[:20])


def foreign_json(cubin, about):
    about.write_text(json.dumps({"sha256": "0" * 64}))


def json_list(cubin, about):
    about.write_text("[]")


@pytest.mark.parametrize(
    "damage", [truncate, replace_cubin, empty_cubin, truncate_json, foreign_json, json_list], ids=lambda f: f.__name__
)
def test_a_damaged_entry_is_built_again(builder, directory, said, damage):
    first = obtain(builder, directory)
    damage(files(directory, ".cubin")[0], files(directory, ".json")[0])
    assert obtain(builder, directory) == first
    assert builder.builds == 2
    assert any("building it again" in message for message in said)
    assert obtain(builder, directory) == first and builder.builds == 2


@pytest.mark.parametrize("missing", [".cubin", ".json"])
def test_half_an_entry_is_built_again(builder, directory, missing):
    obtain(builder, directory)
    files(directory, missing)[0].unlink()
    obtain(builder, directory)
    obtain(builder, directory)
    assert builder.builds == 2


def _obtain_in_process(log, directory, start, results):
    start.wait()
    results.put(obtain(Builder(log, seconds=0.3), directory).cubin)


def test_eight_processes_compile_once(tmp_path, directory):
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    log = tmp_path / "log"
    ranks = [context.Process(target=_obtain_in_process, args=(log, directory, start, results)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    start.set()
    cubins = {results.get(timeout=60) for _ in ranks}
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert cubins == {b"text for sm_121" * 100}
    assert Builder(log).builds == 1


def test_a_rank_that_dies_while_compiling_blocks_nobody(tmp_path, builder, directory):
    context = multiprocessing.get_context("fork")
    slow = context.Process(target=_die_while_building, args=(tmp_path / "ready", directory))
    slow.start()
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(slow.pid, signal.SIGKILL)
    slow.join(30)
    assert obtain(builder, directory).cubin and builder.builds == 1


def _die_while_building(ready, directory):
    def build(program, arch):
        ready.write_text("building")
        time.sleep(60)

    cache.obtain(PROGRAM, "sm_121", "13.0", build, directory)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_can_write_to_is_not_used(builder, directory, said, mode):
    directory.mkdir()
    directory.chmod(mode)
    obtain(builder, directory)
    obtain(builder, directory)
    assert builder.builds == 2 and not any(directory.iterdir())
    assert len(said) == 1 and "other users can write to it" in said[0] and "chmod 700" in said[0]


def test_a_directory_of_another_user_is_not_used(builder, directory, said, monkeypatch):
    directory.mkdir(mode=0o700)
    owner = directory.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # root's files are trusted: make them somebody's
        os.chown(directory, 4321, -1)
    obtain(builder, directory)
    assert not any(directory.iterdir()) and "owns it and can write to it; set XDG_CACHE_HOME" in said[0]


@pytest.mark.parametrize("place", ["/dev/null/cache", "/proc/cache"])
def test_where_no_directory_can_be_made(builder, said, place):
    for _ in range(2):
        assert obtain(builder, Path(place)).resources == RESOURCES
    assert builder.builds == 2
    assert len(said) == 1 and "compiling in memory" in said[0] and place in said[0]


def test_a_full_disk(tmp_path, directory):
    """A real write error: this process may not write files of more than 64 bytes."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_obtain_without_room, args=(tmp_path / "log", directory, results))
    process.start()
    cubins, messages, left = results.get(timeout=60)
    process.join(60)
    assert cubins == [b"text for sm_121" * 100] * 2
    assert len(messages) == 1 and os.strerror(errno.EFBIG) in messages[0] and "every start" in messages[0]
    assert left == []


def _obtain_without_room(log, directory, results):
    messages = []
    cache.logger.warning = lambda text, *args: messages.append(text % args)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
    cubins = [obtain(Builder(log), directory).cubin for _ in range(2)]
    left = [path.name for path in directory.iterdir() if path.suffix != ".lock"]
    results.put((cubins, messages, left))
    results.close()
    results.join_thread()


def test_a_compile_error_passes_through(directory):
    def build(program, arch):
        raise CompileError("no")

    with pytest.raises(CompileError, match="no"):
        obtain(build, directory)
    assert not files(directory, ".cubin")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/somewhere", "HOME": "/home/x"}, "/somewhere"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/x"}, "/home/x/.cache"),
        ({"HOME": "/home/x"}, "/home/x/.cache"),
    ],
)
def test_default_directory(monkeypatch, environment, expected):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache.default_directory()) == f"{expected}/{cache.PROJECT}"
