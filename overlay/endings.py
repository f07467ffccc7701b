"""Signals that end a process, as exceptions: what it has started (rehearsals, a server) then ends with it."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # told to, or left alone by its terminal


@contextmanager
def as_exceptions() -> Iterator[None]:
    """SystemExit(128 + signal) where SIGTERM or SIGHUP comes; an ignored one (nohup) stays ignored."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number in SIGNALS if previous[number] is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, previous[number] or signal.SIG_DFL)  # None: installed by C code
