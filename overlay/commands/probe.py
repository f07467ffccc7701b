"""Drives single parts of vLLM against references of our own, without an engine."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from overlay import children
from overlay.errors import OverlayError
from overlay.hardware import Hardware
from overlay.probe.report import PARTS, Rows, as_text, is_wrong, verdict

HELP = "drive vLLM's own experts, attention backends or top-k on small inputs and compare with a reference"
CAPABILITY = (12, 1)  # of the GPU that is planned for where there is none
TIMEOUT_S = 900.0


class ProbeError(OverlayError):
    """The probe itself did not come through."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    probes = parser.add_subparsers(dest="probe", metavar="PART", required=True)
    for name, part in PARTS.items():
        probe = probes.add_parser(name, help=part.help)
        probe.add_argument("--json", action="store_true", help="print JSON instead of a table")
        probe.add_argument(
            "--keep", action="store_true", help=f"keep the run in docs/measurements/probe-{name}-GPU.json"
        )
        probe.add_argument("--timeout", type=float, default=TIMEOUT_S, help=f"seconds ({TIMEOUT_S:.0f})")
        if name == "moe":
            probe.add_argument(
                "--plant", choices=("inverted",), help="store a scale as its reciprocal, to see the probe fail"
            )
        if name == "attention":
            probe.add_argument("--heads", type=int, choices=(8, 16, 32, 64), default=16, help="heads of a rank (16)")


def run(options: argparse.Namespace) -> int:
    """Run the probe in a process with the overlay in front; 1 where a backend is wrong, or nothing was measured."""
    from overlay import measurement, outputs

    if options.keep:
        outputs.require_folder(measurement.DIRECTORY, "--keep")
    has_gpu = Hardware().capability is not None
    part = PARTS[options.probe]
    arguments = {name: value for name in ("plant", "heads") if (value := getattr(options, name, None)) is not None}
    rows, broken = ask(options.probe, has_gpu, arguments, options.timeout)
    good = not broken and verdict(part, rows)
    document = {"probe": options.probe, "gpu": has_gpu, **arguments, "ok": good, "broken": broken, "rows": rows}
    if options.keep:
        kept = measurement.keep(
            f"probe-{options.probe}", {**measurement.provenance(), **document, "gpu": Hardware().name}
        )
        print(f"kept in {kept}", file=sys.stderr)
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print(as_text(part, rows, has_gpu))
        print(f"\n{conclusion(rows, good, broken)}")
    return 0 if good else 1


def conclusion(rows: Rows, good: bool, broken: str) -> str:
    if broken:
        return f"NOT THROUGH: {broken}"
    if good:
        return "all of them compute what they should"
    return "WRONG: see the rows above" if any(is_wrong(row) for row in rows) else "nothing was measured"


def ask(name: str, has_gpu: bool, arguments: dict[str, object], timeout: float) -> tuple[Rows, str]:
    """The rows of overlay.probe.<name>, run where the overlay is in front; without a GPU under the stub driver.

    With them what stopped it, or "": a kernel that crashes or hangs leaves the rows before it. Raises ProbeError where
    there are none.
    """
    from overlay.rehearsal import driver
    from overlay.rehearsal.columns import column_environment

    env = column_environment("overlay", dict(os.environ) if has_gpu else driver.environment(CAPABILITY))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows"
        given = [text for option, value in arguments.items() for text in (f"--{option}", str(value))]
        command = [sys.executable, "-m", f"overlay.probe.{name}", "--out", str(out), *given]
        broken = finish(command, env, timeout)
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if broken and not rows:
        raise ProbeError(f"{PARTS[name].subject} could not be driven:\n{broken}")
    return rows, broken


def finish(command: list[str], env: dict[str, str], timeout: float) -> str:
    """Run to the end and return what went wrong, or ""."""
    try:
        child = children.finish(command, timeout, env=env, stdout=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as slow:
        said = (slow.stderr or b"").decode(errors="replace")
        return f"not through within {timeout:.0f} s\n{said.strip()[-3000:]}".strip()
    return child.stderr.strip()[-3000:] or f"exit {child.returncode}" if child.returncode else ""
