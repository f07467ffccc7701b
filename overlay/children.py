"""Child processes that end with everything they have started: compilers, or what a profiler runs."""

import contextlib
import os
import signal
import subprocess
from typing import Any


def finish(command: list[str], timeout: float, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end, `how` as for `subprocess.Popen`; what it says on stderr is kept.

    Raises:
        subprocess.TimeoutExpired: not through within `timeout` seconds; its `stderr` has what was said until then.
    """
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True, **how) as child:
        try:
            out, said = child.communicate(timeout=timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, child.returncode, out, said)
