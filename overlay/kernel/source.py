"""The kernel's source, as one text and as a digest."""

import hashlib
from functools import cache
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parents[2] / "cuda"


@cache
def digest() -> str:
    """SHA-256 over all files of `cuda/`, names included."""
    total = hashlib.sha256()
    for path in sorted(DIRECTORY.glob("*.cu*")):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()
