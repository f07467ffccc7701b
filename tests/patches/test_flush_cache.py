"""flush-cache on real files: their pages leave the page cache without root, and the rest is told."""

import ctypes
import json
import mmap
import os
from pathlib import Path

import pytest

from overlay import cli, host_memory

SIZE = 8 << 20


def resident(file: Path) -> int:
    """Pages of a file that are in memory, by mincore(2)."""
    pages = SIZE // mmap.PAGESIZE
    answer = (ctypes.c_ubyte * pages)()
    with file.open("r+b") as handle, mmap.mmap(handle.fileno(), SIZE) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(SIZE), answer) == 0
        del view
    return sum(page & 1 for page in answer)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(SIZE))
    with file.open("rb") as handle:
        os.fsync(handle.fileno())  # dirty pages stay whatever is asked
        handle.read()
    (tmp_path / "config.json").write_text("{}")
    if resident(file) < SIZE // mmap.PAGESIZE // 2:
        pytest.skip("this file system keeps no pages of what was just read")
    return tmp_path


def test_a_checkpoints_pages_are_dropped(checkpoint, capsys):
    assert cli.main(["flush-cache", "--model", str(checkpoint), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"before", "after"}
    assert resident(checkpoint / "model.safetensors") == 0


def test_the_table_names_the_figures(checkpoint, capsys):
    assert cli.main(["flush-cache", "--model", str(checkpoint)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("MemFree", "MemAvailable", "page cache"))


def test_without_the_right_to_write_the_way_out_is_told(monkeypatch, capsys):
    monkeypatch.setattr(host_memory, "DROP_CACHES", Path("/proc/version"))  # nobody may write it, root included
    assert cli.main(["flush-cache"]) == 2
    said = capsys.readouterr().err
    assert "As root on the host" in said
    assert "--model" in said


def test_a_model_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert cli.main(["flush-cache", "--model", "org/name"]) == 2
    assert "org/name" in capsys.readouterr().err


def test_the_hugging_face_cache_is_searched(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    blobs = tmp_path / "hub/models--org--name/blobs"
    blobs.mkdir(parents=True)
    (blobs / "weights").write_bytes(b"\0" * (host_memory.MIB + 1))
    (blobs / "small").write_bytes(b"\0")
    assert [file.name for file in host_memory.checkpoint_files("org/name")] == ["weights"]


def test_watch_drops_when_little_is_free_until_interrupted(checkpoint, monkeypatch, capsys):
    naps = iter([None, None, KeyboardInterrupt()])

    def sleep(seconds: float) -> None:
        if (nap := next(naps)) is not None:
            raise nap

    monkeypatch.setattr("time.sleep", sleep)
    assert cli.main(["flush-cache", "--model", str(checkpoint), "--watch", "5", "--below", "1e6", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_reading_meminfo(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8 kB\nMemFree: 2 kB\nMemAvailable: 5 kB\nCached: 3 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    assert host_memory.read() == host_memory.HostMemory(8192, 2048, 5120, 3072)
