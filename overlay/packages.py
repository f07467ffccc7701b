"""The packages that vLLM's own requirements do not include: how they are asked for, and the oldest that will do."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """`distributions` are the names on PyPI, of which one is to be installed."""

    module: str
    distributions: tuple[str, ...]
    minimum: tuple[int, int]
    why: str  # what the oldest version brought
    pip: str

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
        for name, version in self.installed():
            if _release(version) < self.minimum:
                return f"{name} {version} is too old, {'.'.join(map(str, self.minimum))} {self.why}: {self.pip}"
        return None


WRAPT = Package("wrapt", ("wrapt",), (2, 5), "brought the removal of wrappers", "pip install 'wrapt>=2.5,<3'")
CUPY = Package(
    "cupy",
    ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy"),
    (14, 2),
    "finds the NVRTC that torch brings",
    "pip install 'cupy-cuda12x>=14.2,<15' (or cupy-cuda13x in its place, never both)",
)
PACKAGES = {package.module: package for package in (WRAPT, CUPY)}


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
