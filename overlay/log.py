"""One logger for the overlay, on stderr, with the process id in front: an engine is many processes and one terminal."""

import logging
import os
import sys

LEVELS = ("debug", "info", "warning", "error")
logger = logging.getLogger("overlay")


class _Stderr(logging.StreamHandler):
    """Writes to whatever sys.stderr is at that moment (test runners and notebooks replace it)."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        record.pid = os.getpid()  # read for each record: a forked worker inherits the handler
        super().emit(record)


def configure(level: str) -> None:
    """Give the logger its handler, once, and the level of `[overlay] log`; OVERLAY_DEBUG=1 wins over it."""
    if not logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("overlay[pid %(pid)d]: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel("DEBUG" if os.environ.get("OVERLAY_DEBUG") == "1" else level.upper())
