"""Packages that travel with the checkout (`python -m overlay bundle`) for images that lack them.

They are put behind everything that the image has: a wrapt or CuPy of its own stays the one in use.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "bundled"

# What is imported -> the folder that holds it, one entry of sys.path each: two CuPy wheels at once break each other.
PACKAGES = {"wrapt": "wrapt", "cupy": "cupy", "cuda.pathfinder": "cuda-pathfinder"}


def tag(python: tuple[int, int] = sys.version_info[:2], machine: str | None = None) -> str:
    """The name under which packages for one Python and processor lie, such as `cp312-aarch64`."""
    return f"cp{python[0]}{python[1]}-{machine or os.uname().machine}"


def extend_path(folder: Path = FOLDER) -> list[str]:
    """Append what this Python lacks and `folder` has for it to sys.path; returns the names of those packages."""
    here = folder / tag()
    added = []
    for package, name in PACKAGES.items():
        place = here / name
        if place.is_dir() and not _installed(package):
            sys.path.append(str(place))
            added.append(package)
    return added


def others(folder: Path = FOLDER) -> list[str]:
    """Tags that `folder` carries packages for and this Python cannot use."""
    return sorted(place.name for place in folder.iterdir() if place.name != tag()) if folder.is_dir() else []


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is not there
        return False
