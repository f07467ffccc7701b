"""Compiled kernels on disk, shared by the ranks of one user.

Beside `<name>.cubin` lies `<name>.json` with its SHA-256 and its resources; a pair that does not agree is built again.
A lock file per program makes eight ranks that start together compile once. Nothing here may stop an engine: without a
usable directory the kernel is compiled in memory, and one line says why.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from overlay.kernel.build import OPTIONS, Binary, Program, Resources
from overlay.log import logger

PROJECT = "vllm-sparse-mla-overlay"

_said: set[str] = set()


def default_directory() -> Path:
    """`$XDG_CACHE_HOME` or `~/.cache`, then the project's name."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative values ignored.
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))) / PROJECT


def key(program: Program, arch: str, nvrtc: str) -> str:
    """Hexadecimal digest of all that decides the binary."""
    return hashlib.sha256(json.dumps([program.text, OPTIONS, arch, nvrtc]).encode()).hexdigest()[:24]


def obtain(
    program: Program, arch: str, nvrtc: str, build: Callable[[Program, str], Binary], directory: Path | None = None
) -> Binary:
    """The binary of a program from the cache, else from `build`, which is then kept."""
    directory = default_directory() if directory is None else directory
    name = f"{program.name}-{arch}-{key(program, arch, nvrtc)}"
    try:
        prepare(directory)
        found = _read(directory, name)
        if found is not None:
            return found
        with _locked(directory / f"{name}.lock"):
            found = _read(directory, name)  # another rank may have built it while this one waited
            if found is not None:
                return found
            started = time.monotonic()
            binary = build(program, arch)
            _keep(directory, name, binary)
            logger.info("kernel cache: compiled %s for %s in %.1f s", program.name, arch, time.monotonic() - started)
            return binary
    except OSError as error:
        _say_once(f"kernel cache {directory} cannot be used ({error.strerror or error}): compiling in memory")
    return build(program, arch)


def prepare(directory: Path) -> None:
    """Create the directory for this user alone; OSError, with the cure, where it cannot be used or others may write."""
    if not directory.is_absolute():
        raise FileNotFoundError(0, "there is no home directory; set XDG_CACHE_HOME")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    # A binary from here runs in this process with all its rights.
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            0, f"user {status.st_uid} owns it and can write to it; set XDG_CACHE_HOME to a folder of yours"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(
            0, f"other users can write to it (mode {mode:o}); chmod 700 {shlex.quote(str(directory))}"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(directory: Path, name: str) -> Binary | None:
    try:
        cubin = (directory / f"{name}.cubin").read_bytes()
        about = json.loads((directory / f"{name}.json").read_text())
        resources = Resources(**about["resources"])
        digest = about["sha256"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("kernel cache: %s/%s.json is damaged (%s): building it again", directory, name, error)
        return None
    if hashlib.sha256(cubin).hexdigest() != digest:
        logger.warning(
            "kernel cache: %s in %s does not match its digest: building it again", f"{name}.cubin", directory
        )
        return None
    return Binary(cubin, resources)


def _keep(directory: Path, name: str, binary: Binary) -> None:
    about = {"sha256": hashlib.sha256(binary.cubin).hexdigest(), "resources": asdict(binary.resources)}
    try:
        _replace(directory / f"{name}.cubin", binary.cubin)
        _replace(directory / f"{name}.json", json.dumps(about).encode())
    except OSError as error:  # a full disk, most often: what was built is still good
        _say_once(f"kernel cache {directory} takes no file ({error.strerror or error}): compiling at every start")


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)
