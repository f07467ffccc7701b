"""A child that behaves in one chosen way: `python -m tests.reliability.children WAY FILE`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(way: str, file: Path) -> int:
    with file.open("a") as started:
        started.write(f"{way} {os.environ['CUDA_VISIBLE_DEVICES']} {time.monotonic()}\n")
    if way == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if way in ("orphan", "stubborn"):
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        file.with_suffix(".pid").write_text(str(sleeper.pid))
    if way in ("hang", "stubborn"):
        time.sleep(600)
    time.sleep(0.3)
    return int(way == "fail")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
