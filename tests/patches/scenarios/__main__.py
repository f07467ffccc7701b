"""Child process: the scenarios named on the command line, one after the other in one vLLM.

Prints {"states": {patch: {"state", "reason"}}, "answers": {scenario: its answer}}. A scenario runs where its patch is
on; one that raises answers {"failed": the traceback}, so that the others are still seen.
"""

import importlib
import json
import sys
import traceback

from overlay import startup
from tests.attention import models


def main(names: list[str]) -> None:
    models.import_vllm()  # arms the overlay
    import vllm

    on = {entry.patch.id: entry.on for entry in startup.current().entries}
    answers = {}
    for name in names:
        if not on[name]:
            continue
        try:
            answers[name] = importlib.import_module(f"tests.patches.scenarios.{name}").run()
        except Exception:
            answers[name] = {"failed": traceback.format_exc()}
    entries = startup.current().entries
    states = {entry.patch.id: {"state": str(entry.state), "reason": entry.reason} for entry in entries}
    print(json.dumps({"states": states, "answers": answers, "vllm": vllm.__version__}))


if __name__ == "__main__":
    main(sys.argv[1:])
