"""Digests to compare between machines: one for all that should be equal, and one for each part of it."""

import hashlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from overlay.doctor.checks import Surroundings
from overlay.doctor.cuda import build
from overlay.doctor.installed import PINNED, cupy_wheels, version
from overlay.errors import OverlayError
from overlay.fingerprint import fingerprint


def of(around: Surroundings) -> dict[str, str]:
    """`overlay`, `packages`, `libraries`, `machine` and `all`: hexadecimal digits, 16 of `overlay` and else 12."""
    parts = {
        "overlay": _overlay(around),
        "packages": _digest(_packages()),
        "libraries": _digest(_libraries(around)),
        "machine": _digest(_machine(around)),
    }
    return {**parts, "all": _digest(parts)}


def _overlay(around: Surroundings) -> str:
    try:
        return fingerprint(around.entries)
    except (OverlayError, LookupError):
        return "none"


def _packages() -> dict[str, str | None]:
    names = {d.metadata["Name"].lower() for d in metadata.distributions() if d.metadata["Name"]}
    kept = {name: version(name) for name in names if PINNED.match(name) or name in ("vllm", "wrapt", "numpy")}
    return {**kept, **dict(cupy_wheels()), "python": platform.python_version()}


def _libraries(around: Surroundings) -> dict[str, str]:
    """Builds of the CUDA libraries that are really loaded, without their folders."""
    loaded = around.loaded.get("libraries", {})
    files = [] if isinstance(loaded, dict) else loaded
    return {os.path.basename(file): _build(file) for file in files}


def _build(file: str) -> str:
    try:
        return build(Path(file))
    except OSError as problem:
        return str(problem.strerror)


def _machine(around: Surroundings) -> dict[str, object]:
    devices = [[device.name, *device.capability] for device in around.hardware.devices]
    driver = around.loaded.get("driver", {})
    return {"gpus": devices, "driver": driver.get("cuda"), "machine": platform.machine(), "system": sys.platform}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
