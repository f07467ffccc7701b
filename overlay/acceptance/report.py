"""The table at the end, and the comparison with an earlier run."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path

from overlay.acceptance.client import UsageError
from overlay.acceptance.pointers import POINTERS
from overlay.table import table


def as_text(report: Mapping[str, object], earlier: Mapping[str, object] | None = None) -> str:
    """Table of gates, speeds, what each failure points to, and the comparison."""
    gates = report["gates"]
    parts = [table(("gate", "state", "seconds", "what was found"), [_row(gate) for gate in gates])]
    failed = [gate for gate in gates if gate["state"] == "failed"]
    told: dict[str, list[str]] = {}
    for gate in failed:
        told.setdefault(gate["symptom"], []).append(gate["name"])
    for symptom, names in told.items():
        parts.append(textwrap.fill(f"{', '.join(names)}: {POINTERS[symptom]}", 110, subsequent_indent="    "))
    if any(gate["trained"] for gate in failed):
        names = " ".join(f"--skip {gate['name']}" for gate in failed if gate["trained"])
        parts.append(f"A model with random weights cannot pass these, and then they say nothing: {names}")
    if earlier is not None:
        parts.append(compare(earlier, report))
    parts.append(verdict(report))
    return "\n\n".join(parts)


def _row(gate: Mapping[str, object]) -> tuple[object, ...]:
    return gate["name"], gate["state"], f"{gate['seconds']:.1f}", gate["detail"]


def verdict(report: Mapping[str, object]) -> str:
    """`accepted: 11 passed, 2 skipped, 1 beyond` or `not accepted: ...`."""
    states = [gate["state"] for gate in report["gates"]]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"{'accepted' if report['passed'] else 'not accepted'}: {counts}"


def load(path: Path) -> dict[str, object]:
    """An earlier report. Raises UsageError for a file that is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if {"name", "state", "measured"} <= report["gates"][0].keys():
            return report
    except OSError as error:
        raise UsageError(f"--compare {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        pass
    raise UsageError(f"--compare {path}: is not a report that `accept --json` wrote")


def compare(earlier: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Gates whose state changed and speeds side by side. Speeds of other plans or boxes are compared as they are."""
    before = {gate["name"]: gate for gate in earlier["gates"]}
    rows = []
    for gate in now["gates"]:
        old = before.get(gate["name"])
        state = old["state"] if old else "absent"
        if state != gate["state"]:
            rows.append((gate["name"], state, gate["state"], ""))
        if old and gate["name"] == "speed":
            rows += _speeds(old["measured"], gate["measured"])
    head = f"compared with {earlier['started']} ({earlier['vllm']}):"
    if earlier["plan"] != now["plan"]:
        head += " (sizes differ, one of the two was --quick)"
    return f"{head}\n" + (table(("what", "then", "now", "ratio"), rows) if rows else "no gate changed its state")


def _speeds(before: Mapping[str, Mapping], now: Mapping[str, Mapping]) -> list[tuple[str, object, object, str]]:
    rows = []
    for kind in now:
        for key, unit in (("tokens_per_second", "tokens/s"), ("first_token_s", "s to first token")):
            then, current = before.get(kind, {}).get(key), now[kind][key]
            ratio = f"{current / then:.2f}" if then else ""
            rows.append((f"{kind}, {unit}", "-" if then is None else then, current, ratio))
    return rows
