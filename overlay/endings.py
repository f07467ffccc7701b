"""Signals that end a process, as exceptions: what it has started (rehearsals, a server) then ends with it."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # told to, or left alone by its terminal


@contextmanager
def as_exceptions() -> Iterator[None]:
    """SystemExit(128 + signal) where SIGTERM or SIGHUP comes; an ignored one (nohup) stays ignored."""
    with _handled(SIGNALS, lambda number, frame: sys.exit(128 + number)):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """For cleaning up: a second signal, or Ctrl-C, must not end this process before its children have ended."""
    with _handled((*SIGNALS, signal.SIGINT), signal.SIG_IGN):
        yield


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable | signal.Handlers) -> Iterator[None]:
    previous = {number: signal.getsignal(number) for number in numbers}
    caught = [number for number in numbers if previous[number] is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, previous[number] or signal.SIG_DFL)  # None: installed by C code
