"""What the experts of a checkpoint would multiply by: stock vLLM beside the overlay, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from overlay.errors import OverlayError
from overlay.rehearsal import driver
from overlay.rehearsal.columns import COLUMNS, column_environment
from overlay.table import table

CHILD = "overlay.nvfp4.cpu_load"
TIMEOUT_S = 600.0


class ShowError(OverlayError):
    """vLLM could not load the checkpoint; the message ends with what it said."""


def compare(checkpoint: Path, capability: tuple[int, int] = (12, 1)) -> dict[str, dict[str, Any]]:
    """`{"stock": ..., "overlay": ...}`, each with `experts` (as of cpu_load.experts) and `log`, the overlay's lines.

    Two processes under the stub driver load the checkpoint at once, each for the price of importing vLLM. Raises
    ShowError, and DriverError where the stub driver cannot be built.
    """
    env = driver.environment(capability)
    command = [sys.executable, "-m", CHILD, str(checkpoint.resolve())]
    children = {
        name: subprocess.Popen(
            command, env=column_environment(name, env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in COLUMNS
    }
    try:
        said = {name: child.communicate(timeout=TIMEOUT_S) for name, child in children.items()}
    except subprocess.TimeoutExpired as slow:
        raise ShowError(f"{checkpoint}: not loaded within {TIMEOUT_S:.0f} s") from slow
    finally:
        for child in children.values():
            child.kill()
    for name, child in children.items():
        if child.returncode:
            raise ShowError(f"{checkpoint}: {name} vLLM could not load it:\n{said[name][1].strip()[-2000:]}")
    return {name: json.loads(output.splitlines()[-1]) for name, (output, _) in said.items()}


def as_text(outcomes: dict[str, dict[str, Any]]) -> str:
    """A table of the layers, stock beside the overlay, and the overlay's reasons."""
    layers = outcomes["stock"]["experts"]
    rows = [
        (name, column, layer.get("backend", layer["method"]), span(layer, "g1_alphas"), span(layer, "a1_gscale"))
        for name in layers
        for column in outcomes
        for layer in [outcomes[column]["experts"][name]]
    ]
    reasons = "\n".join(line.partition(": ")[2] for line in outcomes["overlay"]["log"])
    return f"{table(('experts', 'vLLM', 'backend', 'alphas', 'activations times'), rows)}\n\n{reasons}".rstrip()


def span(layer: dict[str, Any], key: str) -> str:
    """Smallest to largest of a layer's numbers; `not quantised` where it has none."""
    numbers = layer.get(key)
    if not numbers:
        return "not quantised"
    found = sorted(set(numbers), key=lambda n: (n != n, n))
    return f"{found[0]:.3g}" if len(found) == 1 else f"{found[0]:.3g} to {found[-1]:.3g}"
