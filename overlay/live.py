"""What a running process says of itself, readable from outside and gone with the process.

Each vLLM process keeps a small JSON text in an anonymous memory file (memfd). Whoever may read /proc/PID/fd of that
process can read it: the same user, or root. Nothing is written to a disk, so nothing is left behind by a crash.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from overlay.log import logger

NAME = "vllm-overlay"
_LINK = f"/memfd:{NAME} (deleted)"

_file: int | None = None
_report: Callable[[], Mapping[str, object]] | None = None


def publish(report: Callable[[], Mapping[str, object]]) -> None:
    """Make `report()` this process's answer, and that of every child it forks; `refresh` asks it again."""
    global _report
    if _report is None:
        os.register_at_fork(after_in_child=_reopen)
    _report = report
    _reopen()


def refresh() -> None:
    """Write the answer anew, after a patch has changed its state."""
    if _file is None:
        return
    text = json.dumps({"pid": os.getpid(), **_report()}).encode()
    os.pwrite(_file, text, 0)
    os.ftruncate(_file, len(text))


def _reopen() -> None:
    """Start a file of this process's own: a forked child shares its parent's."""
    global _file
    if _file is not None:
        os.close(_file)
    try:
        _file = os.memfd_create(NAME)
    except OSError as error:  # a sandbox may forbid it: vLLM must not fail to start for want of a status line
        _file = None
        logger.warning("status --live will not see this process: %s", error)
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
    for link in (directory / "fd").iterdir():
        if os.readlink(link) == _LINK:
            return json.loads(link.read_bytes())
    return None
