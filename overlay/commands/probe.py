"""Drives single parts of vLLM against references of our own, without an engine."""

import argparse
import json
import os
import subprocess
import sys

from overlay.errors import OverlayError
from overlay.hardware import Hardware
from overlay.table import table

HELP = "drive vLLM's own NVFP4 experts on a small layer and compare direction and magnitude with a reference"
CAPABILITY = (12, 1)  # of the GPU that is planned for where there is none
TIMEOUT_S = 900.0


class ProbeError(OverlayError):
    """The probe itself did not come through."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    probes = parser.add_subparsers(dest="probe", metavar="PART", required=True)
    moe = probes.add_parser("moe", help="NVFP4 experts: every backend that this GPU can run")
    moe.add_argument("--json", action="store_true", help="print JSON instead of a table")
    moe.add_argument("--plant", choices=("inverted",), help="store a scale as its reciprocal, to see the probe fail")
    moe.add_argument("--keep", action="store_true", help="keep the run in docs/measurements/probe-moe-GPU.json")


def run(options: argparse.Namespace) -> int:
    """Run the probe in a process with the overlay in front; 1 where a backend is wrong, or nothing was measured."""
    has_gpu = Hardware().capability is not None
    rows = ask(has_gpu, options.plant)
    good = verdict(rows)
    document = {"probe": "moe", "gpu": has_gpu, "plant": options.plant, "ok": good, "rows": rows}
    if options.keep:
        from overlay import measurement

        kept = measurement.keep("probe-moe", {**measurement.provenance(), **document, "gpu": Hardware().name})
        print(f"kept in {kept}", file=sys.stderr)
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print(as_text(rows, has_gpu))
        print("\nall of them compute what they should" if good else "\nWRONG: see the rows above")
    return 0 if good else 1


def ask(has_gpu: bool, plant: str | None) -> list[dict]:
    """The rows of overlay.probe.moe, run where the overlay's patch is in front; without a GPU under the stub driver."""
    from overlay.rehearsal import driver
    from overlay.rehearsal.columns import column_environment

    env = column_environment("overlay", dict(os.environ) if has_gpu else driver.environment(CAPABILITY))
    command = [sys.executable, "-m", "overlay.probe.moe", *(("--plant", plant) if plant else ())]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as slow:
        raise ProbeError(f"the experts were not through within {TIMEOUT_S:.0f} s") from slow
    if done.returncode:
        raise ProbeError(f"the experts could not be driven:\n{done.stderr.strip()[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def verdict(rows: list[dict]) -> bool:
    """Good: nothing measured is wrong, and Marlin and emulation, which every GPU has, were measured."""
    measured = {row["backend"] for row in rows if row["ok"]}
    return {"MARLIN", "EMULATION"} <= measured and not any(row["ok"] is False for row in rows)


def as_text(rows: list[dict], has_gpu: bool) -> str:
    """The measurements as a table, and the backends that are not to be had with the reasons."""
    there = [row for row in rows if row["ok"] is not None]
    lines = [
        (row["checkpoint"], row["flag"], row["backend"] or "-", row["quantity"], *numbers(row), mark(row))
        for row in there
    ]
    headers = ("checkpoint", "--moe-backend", "backend", "quantity", "cosine", "magnitude", "")
    missing = [f"  {row['flag']} ({row['checkpoint']}): {row['reason']}" for row in rows if row["ok"] is None]
    where = "" if has_gpu else "No GPU here: the layers were built for capability 12.1 and no kernel ran.\n\n"
    return f"{where}{table(headers, lines)}" + ("\n\nnot to be had here:\n" + "\n".join(missing) if missing else "")


def numbers(row: dict) -> tuple[str, str]:
    if row["cosine"] is None:
        return "", ""
    return f"{row['cosine']:.5f}", f"{row['magnitude']:.4g}"


def mark(row: dict) -> str:
    return "ok" if row["ok"] else f"WRONG {row['reason']}".rstrip()
