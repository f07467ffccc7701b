"""A vLLM whose `__init__` is empty and whose other files are the installed ones, a few of them replaced.

Start-up reads vLLM as text and hooks modules that it does not import, so faults of an installation can be made in a
copy of a single file, and a process that imports it starts in a fraction of a second.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from overlay.sources import VllmSources

ROOT = Path(__file__).resolve().parents[2]


def make(directory: Path, changed: Mapping[str, str] | None = None) -> Path:
    """Lay it out in `directory`, which is returned; `changed` maps files (`platforms/cuda.py`) to their text."""
    installed = VllmSources.find().root
    files = {"__init__.py": "", **(changed or {})}
    _link(installed, directory / "vllm", files)
    return directory


def _link(source: Path, target: Path, files: Mapping[str, str]) -> None:
    target.mkdir(parents=True)
    below = {name.split("/", 1)[0] for name in files if "/" in name}
    for entry in source.iterdir():
        if entry.name in below:
            inner = {name.split("/", 1)[1]: text for name, text in files.items() if name.startswith(f"{entry.name}/")}
            _link(entry, target / entry.name, inner)
        elif entry.name not in files:
            (target / entry.name).symlink_to(entry)
    for name, text in files.items():
        if "/" not in name:
            (target / name).write_text(text)


def environment(*paths: Path | str, **settings: str) -> dict[str, str]:
    """This process's environment with PYTHONPATH replaced and the overlay's variables set as given."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OVERLAY_", "PYTHON"))}
    return {**clean, "PYTHONPATH": os.pathsep.join(map(str, paths)), **settings}


PYTHON = sys.executable
