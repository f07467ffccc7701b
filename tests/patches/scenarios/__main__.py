"""Child process: the scenarios named on the command line, one after the other in one vLLM.

Prints {"states": {patch: {"state", "reason"}}, "answers": {scenario: its answer}}. A scenario runs where its patch is
on; one that raises answers {"failed": the traceback}, so that the others are still seen.
"""

import gc
import importlib
import json
import sys
import time
import traceback

from overlay import startup


def main(names: list[str]) -> None:
    import vllm  # arms the overlay

    on = {entry.patch.id: entry.on for entry in startup.current().entries}
    answers = {}
    for name in names:
        if not on[name]:
            continue
        gc.freeze()  # vLLM collects in every profile run; half a second each over all that was imported
        began = time.process_time()
        try:
            answers[name] = importlib.import_module(f"tests.patches.scenarios.{name}").run()
        except Exception:
            answers[name] = {"failed": traceback.format_exc()}
        print(f"{name}: {time.process_time() - began:.1f} s", file=sys.stderr)
    entries = startup.current().entries
    states = {entry.patch.id: {"state": str(entry.state), "reason": entry.reason} for entry in entries}
    print(json.dumps({"states": states, "answers": answers, "vllm": vllm.__version__}))


if __name__ == "__main__":
    main(sys.argv[1:])
