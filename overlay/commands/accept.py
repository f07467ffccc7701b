"""Whether a served model is fit to be relied on."""

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path

from overlay import outputs
from overlay.errors import OverlayError

HELP = "put a served model to the test: needles, long decode, canaries, batches, prefix cache, speed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="the server, such as http://localhost:8000")
    parser.add_argument("--model", help="the name it is served under (default: the first of /v1/models)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare with the JSON of an earlier run")
    parser.add_argument("--quick", action="store_true", help="small sizes: for tiny models and a first look")
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="GATE",
        help="leave out a gate by name or pattern ('needle*', echo); may be repeated, and the report says so",
    )
    parser.add_argument(
        "--patience", type=float, default=900.0, metavar="SECONDS", help="longest wait for a first token (900)"
    )
    parser.add_argument("--seed", type=int, help="repeat the texts of an earlier run (its JSON has the number)")


def run(options: argparse.Namespace) -> int:
    """Print progress on stderr and the table on stdout; 1 where a gate failed or could not run."""
    from overlay.acceptance import gates, report, runner

    if options.json:
        outputs.require_file(options.json, "--json")
    earlier = report.load(options.compare) if options.compare else None
    plan = gates.QUICK if options.quick else gates.FULL
    # Another text each time: what an earlier run left in the prefix cache must not answer for this one.
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    found = asyncio.run(
        runner.accept(options.url, options.model, plan, options.skip, options.patience, seed, say=_progress)
    )
    print(report.as_text(found, earlier))
    if options.json:
        try:
            options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise OverlayError(f"--json {options.json}: {error.strerror}") from None
    return 0 if found["passed"] else 1


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
