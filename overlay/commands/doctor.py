"""What is wrong with this machine, or with the start that wrote this log."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from overlay.config import nearest
from overlay.doctor import fingerprint, logs, paste
from overlay.doctor.checks import Surroundings, perform
from overlay.doctor.report import CHECKS, as_text
from overlay.errors import OverlayError

HELP = "named checks of this machine and installation, each with its fix; causes of known lines in a boot log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--check", metavar="NAME", action="append", help="only this check, again after a fix; repeatable"
    )
    parser.add_argument(
        "--log", metavar="FILE", type=Path, help="name cause and cure of the known lines in a boot log (-: from stdin)"
    )
    parser.add_argument(
        "--paste", action="store_true", help="leave out names, hosts, addresses and paths of the person"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 where a required check fails, or where no line of a log is known."""
    text, status = _log(options) if options.log else _checks(options)
    print(text)
    return status


def _checks(options: argparse.Namespace) -> tuple[str, int]:
    names = [check.name for check in CHECKS]
    for name in options.check or ():
        if name not in names:
            raise OverlayError(f"{name!r} is not a check{nearest(name, names)}")
    chosen = [check for check in CHECKS if not options.check or check.name in options.check]
    if not options.check:
        print("checking; torch and CuPy are loaded for it, which takes seconds ...", file=sys.stderr, flush=True)
    around = Surroundings()
    results = perform(chosen, around)
    if options.paste:  # before the table breaks a path over two lines
        results = [replace(result, what=paste.clean(result.what), fix=paste.clean(result.fix)) for result in results]
    status = int(any(result.required and result.status == "fail" for result in results))
    # The fingerprint asks everything; a single check after a fix should answer at once.
    digests = {} if options.check else fingerprint.of(around)
    if options.json:
        report = {"fingerprint": digests, "checks": [result.as_json() for result in results]}
        return json.dumps(report, indent=2), status
    return as_text(results, digests), status


def _log(options: argparse.Namespace) -> tuple[str, int]:
    try:
        raw = sys.stdin.buffer.read() if str(options.log) == "-" else options.log.read_bytes()
    except OSError as problem:
        raise OverlayError(f"{options.log} cannot be read: {problem.strerror}") from problem
    text = raw.decode("utf-8", errors="replace")
    matches = logs.examine(paste.clean(text) if options.paste else text)
    if options.json:
        return json.dumps({"known": [match.as_json() for match in matches]}, indent=2), int(not matches)
    return logs.as_text(matches), int(not matches)
