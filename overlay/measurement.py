"""Where measurements are kept, and what every one of them says about itself: GPU, versions, commit, date."""

import datetime
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from overlay.config import ROOT
from overlay.hardware import Hardware

DIRECTORY = ROOT / "docs" / "measurements"
_PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "wrapt", "vllm", "flashinfer-python", "triton")


def provenance() -> dict[str, object]:
    """`gpu`, `capability`, `commit`, `date` and `versions` of this machine and checkout."""
    hardware = Hardware()
    return {
        "gpu": hardware.name,
        "capability": "{}.{}".format(*hardware.capability) if hardware.capability else None,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def commit() -> str:
    """The checkout's commit, with `+` where files differ from it. GIT_COMMIT overrides it: copies lack history."""
    if stated := os.environ.get("GIT_COMMIT"):
        return stated
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def keep(name: str, document: Mapping[str, object], directory: Path = DIRECTORY) -> Path:
    """Write `<name>-<gpu>.json` (`bench-nvidia-h200.json`) and return its path."""
    gpu = "-".join(str(document["gpu"] or "no-gpu").lower().split())
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{name}-{gpu}.json"
    file.write_text(json.dumps(document, indent=1) + "\n")
    return file


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
