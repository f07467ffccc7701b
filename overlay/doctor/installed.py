"""Configuration, patches and versions: what is installed against what belongs together."""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata

from overlay.doctor.checks import Outcome, Surroundings, failed, passed, warned
from overlay.errors import OverlayError
from overlay.packages import CUPY, WRAPT
from overlay.registry import State
from overlay.sources import TESTED_FROM, TESTED_TO

# Packages whose pins matter on this hardware: FlashInfer nightlies move NCCL and the cutlass DSL without a word.
PINNED = re.compile(
    r"torch|triton|flashinfer|nvidia-(nccl|cutlass-dsl|cudnn|nvshmem)|cuda-(toolkit|bindings)|apache-tvm|quack"
)
KNOWN_BAD = {
    ("nvidia-nccl-cu13", "2.29.7"): "breaks the fabric between GB10 boxes",
    ("nvidia-cutlass-dsl", "4.5.0"): "gave garbage on sm_12x",
}


def configuration(around: Surroundings) -> Outcome:
    try:
        return passed(f"read {around.config.file}")
    except OverlayError as problem:
        return failed(str(problem), "correct that line")


def vllm(around: Surroundings) -> Outcome:
    if around.sources is None:
        return failed(f"vLLM is not installed in {sys.executable}", "run the doctor with the Python that serves")
    version = around.sources.version
    if not around.sources.tested:
        first, last = (".".join(map(str, release)) for release in (TESTED_FROM, TESTED_TO))
        return warned(
            f"vllm {version} is outside the tested releases {first} to {last}: patches go by signature and probe",
            "look at `python -m overlay status`",
        )
    return passed(f"vllm {version} in {around.sources.root}")


def patches(around: Surroundings) -> Outcome:
    try:
        entries = around.entries
    except OverlayError:
        return failed("the configuration cannot be read", "see the check `config`")
    except LookupError as problem:
        return failed(str(problem), "see the check `vllm`")
    broken = [entry for entry in entries if entry.state is State.FAILED]
    if broken:
        reasons = "; ".join(f"{entry.patch.id}: {entry.reason.splitlines()[0]}" for entry in broken)
        return failed(reasons, "`python -m overlay status` tells more")
    counts = {state: sum(entry.state is state for entry in entries) for state in State}
    return passed(", ".join(f"{count} {state}" for state, count in counts.items() if count))


def versions(around: Surroundings) -> Outcome:
    """wrapt is needed by every patch, CuPy by the kernel."""
    found = {name: version(name) for name in ("torch", "flashinfer-python", "triton", "wrapt")}
    found |= dict(cupy_wheels())
    text = ", ".join(f"{name} {value}" for name, value in found.items() if value)
    text = f"Python {sys.version.split()[0]}, {text}"
    if problem := WRAPT.problem():
        return failed(f"{text}; {problem}", WRAPT.pip)
    if problem := CUPY.problem():
        says = failed if any(CUPY.installed()) else warned  # who uses NVFP4 repair alone needs none
        return says(f"{text}; {problem} (for the sparse-MLA kernel)", CUPY.pip)
    return passed(text)


def cupy(around: Surroundings) -> Outcome:
    """Two CuPy wheels put their files over each other."""
    wheels = [f"{name} {value}" for name, value in cupy_wheels()]
    if len(wheels) > 1:
        return failed(f"{' and '.join(wheels)} are installed at once", "pip uninstall both, then " + CUPY.pip)
    return passed(wheels[0] if wheels else "no CuPy wheel")


def cupy_wheels() -> list[tuple[str, str]]:
    """Name and version of every installed distribution of CuPy."""
    found = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name == "cupy" or name.startswith("cupy-"):
            found[name] = distribution.version
    return sorted(found.items())


@dataclass(frozen=True)
class Pin:
    """What `by` requires of `name`, and the version that is there (None: not installed)."""

    by: str
    name: str
    wanted: str
    found: str | None


def pins(around: Surroundings) -> Outcome:
    """Packages against what vLLM's and torch's own metadata require."""
    if version("vllm") is None:
        return warned("vLLM is not installed here, so nothing is pinned", "see the check `vllm`")
    wrong = broken_pins(("vllm", "torch"))
    bad = [f"{name}=={value} {why}" for (name, value), why in KNOWN_BAD.items() if version(name) == value]
    if wrong or bad:
        texts = [
            f"{pin.by} requires {pin.name}{pin.wanted}, found {f'{pin.name}=={pin.found}' if pin.found else 'none'}"
            for pin in wrong
        ]
        line = " ".join(f"'{pin.name}{pin.wanted}'" for pin in wrong)
        fix = f"pip install {line}" if wrong else "install the version that vLLM's metadata requires"
        return warned("; ".join([*texts, *bad]), fix)
    return passed("torch, FlashInfer, NCCL and cutlass-dsl are the versions that vLLM and torch require")


def broken_pins(packages: Iterable[str]) -> list[Pin]:
    """Requirements of the packages (of PINNED) that what is installed does not meet."""
    return [pin for package in packages for pin in _requirements(package) if not _met(pin)]


def _requirements(package: str) -> Iterator[Pin]:
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and PINNED.match(requirement.name):
            yield Pin(package, requirement.name, str(requirement.specifier), version(requirement.name))


def _met(pin: Pin) -> bool:
    from packaging.specifiers import SpecifierSet

    return pin.found is not None and SpecifierSet(pin.wanted).contains(pin.found, prereleases=True)


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
