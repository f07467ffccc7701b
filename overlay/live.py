"""What a running process says of itself, readable from outside and gone with the process.

Each vLLM process keeps a small JSON text in an anonymous memory file (memfd). Whoever may read /proc/PID/fd of that
process can read it: the same user, or root. Nothing is written to a disk, so nothing is left behind by a crash.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from overlay.log import logger

NAME = "vllm-overlay"
_LINK = f"/memfd:{NAME} (deleted)"
_LOOKS = 200  # at a process whose descriptors come and go, or which is writing its answer at that moment
_EMPTY_LOOKS = 3  # descriptors are listed one by one: a file that takes a lower number meanwhile is in no such listing

_file: tuple[int, tuple[int, int]] | None = None  # descriptor; device and inode of what it was opened for
_report: Callable[[], Mapping[str, object]] | None = None
_lock = threading.Lock()


def publish(report: Callable[[], Mapping[str, object]]) -> None:
    """Make `report()` this process's answer, and that of every child it forks; `refresh` asks it again."""
    global _report
    if _report is None:
        os.register_at_fork(after_in_child=_in_child)
    _report = report
    refresh()


def refresh() -> None:
    """Give the answer anew, after a patch has changed its state: in a file of its own, which is never written again.

    A reader thus meets an answer whole, or the beginning of one, which is no JSON, beside the one before.
    """
    global _file, _report
    report = _report
    if report is None:
        return
    with _lock:
        try:
            new = _write(json.dumps({"pid": os.getpid(), **report()}).encode())
        except OSError as error:  # a sandbox may forbid it: vLLM must not fail to start for want of a status line
            logger.warning("status --live will not see what becomes of this process: %s", error)
            _report = None
            return
        old, _file = _file, new
        _close(old)


def _write(text: bytes) -> tuple[int, tuple[int, int]]:
    file = os.memfd_create(NAME)
    try:
        os.write(file, text)
        return file, _identity(file)
    except OSError:
        os.close(file)
        raise


def _close(file: tuple[int, tuple[int, int]] | None) -> None:
    """Close what is still ours: code that daemonises closes every descriptor, and the next file gets the number."""
    if file is None:
        return
    with contextlib.suppress(OSError):  # closed, and the number not taken again
        if _identity(file[0]) == file[1]:
            os.close(file[0])


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _in_child() -> None:
    """Start a file of the child's own: it inherits its parent's, whose answer is not its own."""
    global _file, _lock
    _lock = threading.Lock()  # a thread that does not live in the child may have held it
    inherited, _file = _file, None
    _close(inherited)
    refresh()


def processes(proc: Path = Path("/proc")) -> Iterator[dict[str, object]]:
    """The answers of all running processes that may be asked, with the `command` under which `ps` shows each.

    A process that calls itself vLLM's (`VLLM::...`) and answers nothing is given as `{"pid", "command"}` alone: it runs
    without the overlay.
    """
    for directory in sorted((d for d in proc.iterdir() if d.name.isdigit()), key=lambda d: int(d.name)):
        try:
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            said = _answer(directory)
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
        if said is not None:
            yield {**said, "command": command}
        elif command.startswith("VLLM::"):
            yield {"pid": int(directory.name), "command": command}


def _answer(directory: Path) -> dict[str, object] | None:
    """What the process below /proc says; None where it has no such file."""
    empty = 0
    for _ in range(_LOOKS):
        changed = False
        for link in (directory / "fd").iterdir():
            try:
                if os.readlink(link) == _LINK:
                    return json.loads(link.read_bytes())
            except (OSError, ValueError):  # closed since it was listed, or its answer is being written
                changed = True
        empty = 0 if changed else empty + 1
        if empty == _EMPTY_LOOKS:
            return None
    return None
