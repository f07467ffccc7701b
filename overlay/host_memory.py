"""The host's memory as the driver of an integrated GPU gets it, and the page cache that stands in its way.

Where the GPU shares the host's memory (GB10), the driver takes pages that are free at that moment. It does not reclaim
the page cache, which reading a checkpoint fills, although the kernel counts that cache as available.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import OverlayError

MEMINFO = Path("/proc/meminfo")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
GIB = 1 << 30
MIB = 1 << 20


class MemoryShortage(OverlayError):
    """The driver cannot get the memory that is asked of it; the message says how much it can, and what to do."""


@dataclass(frozen=True)
class HostMemory:
    """One reading of /proc/meminfo, in bytes."""

    total: int
    free: int
    available: int
    page_cache: int

    def __str__(self) -> str:
        return f"MemFree {gib(self.free)}, MemAvailable {gib(self.available)}, page cache {gib(self.page_cache)}"


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def read() -> HostMemory:
    """Raises OSError where there is no /proc/meminfo (only Linux has integrated CUDA GPUs)."""
    fields = {}
    for line in MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return HostMemory(fields["MemTotal"], fields["MemFree"], fields["MemAvailable"], fields["Cached"])


def drop_everything() -> None:
    """Drop the machine's clean page cache. Raises OSError without root, or where /proc/sys is read-only."""
    with DROP_CACHES.open("w") as switch:  # opened first: without the right to write, sync would be for nothing
        os.sync()
        switch.write("1\n")


def drop_files(files: Iterable[Path]) -> None:
    """Drop the cached pages of files that this user may read; no root. Pages that a process has mapped stay."""
    for file in files:
        try:
            handle = os.open(file, os.O_RDONLY)
        except OSError:  # removed or unreadable since it was listed: then its pages are not ours to drop
            continue
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def checkpoint_files(model: str, download_dir: str | None = None) -> list[Path]:
    """Files over 1 MiB of a checkpoint folder, or of a model in the Hugging Face cache; empty where there is none."""
    folder = Path(model)
    if not folder.is_dir():
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
        hub = Path(download_dir or os.environ.get("HF_HUB_CACHE") or home / "hub")
        folder = hub / f"models--{model.replace('/', '--')}" / "blobs"
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size > MIB)


@contextmanager
def dropping(files: list[Path], below: int, every: float = 1.0) -> Iterator[None]:
    """Meanwhile, drop the pages of `files` whenever less than `below` bytes are free; and once at the end."""
    done = threading.Event()

    def guard() -> None:
        while not done.wait(every):
            if read().free < below:
                drop_files(files)

    thread = threading.Thread(target=guard, name="overlay-page-cache", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        drop_files(files)
