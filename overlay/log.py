"""The overlay's loggers, on stderr, with the process id in front: an engine is many processes and one terminal.

A logging configuration (VLLM_LOGGING_CONFIG_PATH, --log-config-file) may give "overlay" a level and handlers like any
other logger. It cannot switch it off by not naming it: what is said here is that a patch failed.
"""

import logging
import os
import sys

LEVELS = ("debug", "info", "warning", "error")


class _Logger(logging.Logger):
    """A logger that `disable_existing_loggers`, on unless a configuration says otherwise, does not disable."""

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, value: object) -> None:
        """dictConfig and fileConfig set it on every logger that they do not name; their word on this one is dropped."""

    @property
    def propagate(self) -> bool:
        """A configuration that names a level alone takes the handlers away: what is left then is the root's."""
        return self._propagate or not self.handlers

    @propagate.setter
    def propagate(self, value: bool) -> None:
        self._propagate = value


def named(name: str) -> logging.Logger:
    """The logger "overlay", or one below it, as logging.getLogger(name) knows it from then on."""
    found = logging.getLogger(name)
    if not isinstance(found, _Logger):
        found._propagate = found.propagate
        found.__class__ = _Logger  # the same object: who has it already, and the handlers it has, stay
    return found


logger = named("overlay")


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
