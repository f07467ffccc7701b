"""The packages that vLLM's own requirements do not include: how they are asked for, and the oldest that will do."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """`distributions` are the names on PyPI, of which one is to be installed, in a version that `pin` takes."""

    module: str
    distributions: tuple[str, ...]
    pin: str  # the oldest version first
    why: str  # what that one brought
    note: str = ""

    @property
    def pip(self) -> str:
        return f"pip install '{self.distributions[0]}{self.pin}'{self.note}"

    def installed(self) -> Iterator[tuple[str, str]]:
        """(name, version) of the distributions that this Python has."""
        for name in self.distributions:
            try:
                yield name, importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue

    def problem(self) -> str | None:
        """What is wrong with the package here, and the pip line; None where nothing is."""
        if importlib.util.find_spec(self.module) is None:
            return f"the package {self.module} is not installed: {self.pip}"
        oldest = _release(self.pin)
        for name, version in self.installed():
            if _release(version) < oldest:
                return f"{name} {version} is too old, {'.'.join(map(str, oldest))} {self.why}: {self.pip}"
        return None


WRAPT = Package("wrapt", ("wrapt",), ">=2.5,<3", "brought the removal of wrappers")
CUPY = Package(
    "cupy",
    ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy"),
    ">=14.2,<15",
    "finds the NVRTC that torch brings",
    " (or cupy-cuda13x in its place, never both)",
)
PACKAGES = {package.module: package for package in (WRAPT, CUPY)}


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
