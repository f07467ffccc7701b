"""Runs the cases of a probe in a process apart, and in a new one after a case that took its process down.

A kernel that writes where it must not leaves its process without a GPU, and one that never ends leaves it waiting: that
costs the case, and not the ones behind it.
"""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def progress(out: Path) -> Path:
    """Where a child says which case it is in."""
    return out.with_suffix(".case")


def begin(out: Path, case: int) -> None:
    """In a child: `case` begins."""
    progress(out).write_text(str(case))


def run(command: list[str], out: Path, cases: int, seconds: float, lost: Callable[[int, str], dict]) -> None:
    """Cases 0 to `cases` - 1 in children `command --first N`, which append their rows to `out`, a JSON object a line.

    A child that ends early, or is in one case for more than `seconds`, has `lost(case, reason)` in place of that case's
    row. Raises SystemExit where a child fails before its first case: so would the next.
    """
    first = 0
    while first < cases:
        progress(out).write_text("")
        reason = child([*command, "--first", str(first)], out, seconds)
        if not reason:
            return
        if not (reached := progress(out).read_text()):
            raise SystemExit(reason)
        with out.open("a") as rows:
            print(json.dumps(lost(int(reached), reason)), file=rows)
        first = int(reached) + 1


def child(command: list[str], out: Path, seconds: float) -> str:
    """Run one child; "" or why it did not come to its end."""
    errors = out.with_suffix(".err")
    with errors.open("w") as said, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said) as process:
        since, case = time.monotonic(), ""
        while process.poll() is None:
            if (now := progress(out).read_text()) != case:
                since, case = time.monotonic(), now
            if case and time.monotonic() - since > seconds:
                process.kill()
                return f"no answer within {seconds:.0f} s"
            time.sleep(0.2)
    last = (errors.read_text(errors="replace").strip().splitlines() or [""])[-1]
    how = f"exit {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
    return f"the process ended with {how}: {last}" if process.returncode else ""
