"""The kernel's source, as one text and as a digest.

CuPy and this project's own cache know a program by its text. A file that the text includes would not be part of that
key, and an edited header would be answered with the old binary: so the files of `cuda/` are flattened into one text.
"""

import hashlib
import re
from functools import cache
from pathlib import Path

from overlay.kernel.errors import KernelError
from overlay.kernel.variants import VARIANTS

DIRECTORY = Path(__file__).resolve().parents[2] / "cuda"
INCLUDE = re.compile(r'\s*#\s*include\s*[<"]([^>"]*)[>"]')


@cache
def digest() -> str:
    """SHA-256 over all files of `cuda/`, names included, and over the variants made of them."""
    total = hashlib.sha256()
    for path in sorted(DIRECTORY.glob("*.cu*")):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    total.update("\n".join(variant.entry for variant in VARIANTS).encode())
    return total.hexdigest()


@cache
def flatten(name: str) -> str:
    """One self-contained text of `cuda/<name>`: every file once, where it is first included, lines still attributed.

    Raises:
        KernelError: a file is missing, or includes something from outside `cuda/`.
    """
    return "\n".join(_lines(name, seen=set())) + "\n"


def _lines(name: str, seen: set[str]) -> list[str]:
    if name in seen:
        return []
    seen.add(name)
    path = DIRECTORY / name
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(f"{path}: {error.strerror}; the checkout is incomplete") from None
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(text.splitlines(), start=1):
        included = INCLUDE.match(line)
        if included is None:
            lines.append("" if line.strip() == "#pragma once" else line)
        elif "/" in included[1] or not (DIRECTORY / included[1]).is_file():
            raise KernelError(f"{name}:{number} includes {included[1]}: only files of {DIRECTORY} may be included")
        else:
            lines += [*_lines(included[1], seen), f'#line {number + 1} "{name}"']
    return lines
