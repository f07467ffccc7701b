"""What the overlay would do for a vLLM started in this environment."""

import argparse
import json

from overlay import config, live, registry
from overlay.errors import OverlayError
from overlay.fingerprint import fingerprint, parts, software
from overlay.hardware import Hardware
from overlay.registry import Entry, State
from overlay.sources import VllmSources
from overlay.table import table

HELP = "installed versions, the configuration read, and each patch's state with its reason"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--live", action="store_true", help="the vLLM processes that are running, and what each says")


def run(options: argparse.Namespace) -> int:
    """Print the states; 1 where a wanted patch cannot be applied, because `import vllm` would refuse there."""
    if options.live:
        return show_processes(list(live.processes()), options.json)
    patches = list(registry.declarations())
    settings = config.load(patches)
    sources, hardware = VllmSources.find(), Hardware()
    if sources is None:
        raise OverlayError("vLLM is not installed in this Python: pip install vllm")
    entries = registry.decide(patches, settings, sources, hardware)
    report = {
        "vllm": sources.version,
        "architecture": hardware.architecture,
        "config": str(settings.file),
        "fingerprint": fingerprint(entries),
        "software_fingerprint": software(entries),
        "fingerprint_of": parts(entries),
        "patches": [describe(entry) for entry in entries],
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"vllm {sources.version} ({sources.root}), {hardware.architecture}")
        print(f"config {settings.file}")
        print(f"fingerprint {report['fingerprint']}, of the software alone {report['software_fingerprint']}\n")
        print(table(("patch", "state", "reason"), ((e.patch.id, e.state, e.reason) for e in entries)))
    return 1 if any(entry.state is State.FAILED for entry in entries) else 0


def show_processes(processes: list[dict[str, object]], as_json: bool) -> int:
    """The running vLLM processes; 1 where one runs without the overlay or with another fingerprint than the rest."""
    fingerprints = {process.get("fingerprint") for process in processes}
    if as_json:
        print(json.dumps({"processes": processes}, indent=2))
    elif not processes:
        print("no vLLM process of this user is running")
    else:
        rows = [
            (p["pid"], p.get("vllm", "-"), p.get("fingerprint", "none"), _by_state(p), p["command"]) for p in processes
        ]
        print(table(("pid", "vllm", "fingerprint", "patches", "command"), rows))
    return 1 if len(fingerprints) > 1 or None in fingerprints else 0


def _by_state(process: dict[str, object]) -> str:
    states = list(process.get("patches", {}).values())
    counts = ((state, states.count(state)) for state in map(str, State))
    return ", ".join(f"{count} {state}" for state, count in counts if count) or "runs without the overlay"


def describe(entry: Entry) -> dict[str, object]:
    """One patch in the shape of `status --json`."""
    return {
        "id": entry.patch.id,
        "state": str(entry.state),
        "reason": entry.reason,
        "targets": [str(target) for target in entry.patch.targets],
        "upstream": list(entry.patch.upstream),
    }
