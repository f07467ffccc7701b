"""One digest for what this process's vLLM runs with: equal on every rank that may serve together, and a cache key."""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from overlay import __version__
from overlay.config import ROOT
from overlay.hardware import Hardware
from overlay.kernel import source
from overlay.registry import Entry, decide_again

DIGITS = 16  # hexadecimal, of SHA-256: what people compare by eye


def parts(entries: Iterable[Entry]) -> dict[str, object]:
    """What the digest is made of. States are those of `import vllm`: what was imported since differs by rank."""
    entries = list(entries)
    return {
        "overlay version": __version__,
        "overlay code": code(),
        "vllm": entries[0].context.vllm_version if entries else "unknown",
        "kernel": source.digest(),
        "patches": {
            entry.patch.id: {"state": str(entry.decided), "options": dict(entry.context.options)} for entry in entries
        },
    }


def parts_without_gpu(entries: Iterable[Entry]) -> dict[str, object]:
    """The same with the states that a machine without a GPU decides on: equal for equal software, whatever the GPU."""
    return parts(decide_again(entries, Hardware.none()))


def fingerprint(entries: Iterable[Entry]) -> str:
    """The first 16 hexadecimal digits of SHA-256 over `parts`."""
    return digest(parts(entries))


def software(entries: Iterable[Entry]) -> str:
    """The first 16 hexadecimal digits of SHA-256 over `parts_without_gpu`."""
    return digest(parts_without_gpu(entries))


def digest(content: dict[str, object]) -> str:
    """The first 16 hexadecimal digits of SHA-256 over a nested dictionary."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGITS]


@cache
def code(root: Path = ROOT) -> str:
    """Digest of the overlay's own Python: names and bytes of `overlay/**/*.py` and `sitecustomize.py` below `root`.

    Hidden files are left out: editors and file systems make them (a dangling `.#name.py`, macOS's `._name.py`). Read
    once a process, at `import vllm`: 5 ms from the page cache.
    """
    total = hashlib.sha256()
    modules = sorted(path for path in (root / "overlay").rglob("*.py") if not path.name.startswith("."))
    for path in [*modules, root / "sitecustomize.py"]:
        content = path.read_bytes()
        total.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:DIGITS]
