"""Files and folders that a person names for a result: refused before the work, not after an hour of it."""

import os
from pathlib import Path

from overlay.errors import OverlayError


def require_file(file: Path, option: str) -> None:
    """Raises OverlayError, naming the option, where `file` could not be written."""
    if file.is_dir():
        raise OverlayError(f"{option} {file}: is a folder; name a file in it")
    if not file.parent.is_dir():
        raise OverlayError(f"{option} {file}: there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise OverlayError(f"{option} {file}: cannot be written to")


def require_folder(folder: Path, option: str) -> None:
    """Make `folder`. Raises OverlayError, naming the option, where that fails or nothing can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OverlayError(f"{option} {folder}: cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise OverlayError(f"{option} {folder}: cannot be written to")
