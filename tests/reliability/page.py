"""The figures of docs/reliability.md, from docs/measurements; `python -m tests.reliability.page` writes them there."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overlay.measurement import DIRECTORY
from tests.conftest import ROOT
from tests.gpu.rank_cases import by_reason

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- figures: python -m tests.reliability.page -->\n", "<!-- end of figures -->\n"
NOT_RUN = {
    "random-launches": "Launches at random: not run on a GPU yet.",
    "load": "Load on one GPU: not run yet.",
    "load-tp4": "Load on four ranks: not run yet.",
    "ranks": "Several ranks: not run yet.",
}


def measurements(name: str, directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """All files of one measurement, one a GPU; `load` is not `load-tp4`."""
    found = [(file, json.loads(file.read_text())) for file in sorted(directory.glob(f"{name}-*.json"))]
    return [(file, said) for file, said in found if file.stem == f"{name}-{_slug(said['gpu'])}"]


def _slug(gpu: str | None) -> str:
    return "-".join(str(gpu or "no-gpu").lower().split())


def figures(directory: Path = DIRECTORY) -> str:
    """The whole section: what was run, where, and what came out, failures included."""
    parts = []
    for name, tell in (
        ("faults", faults),
        ("random-launches", launches),
        ("load", load),
        ("load-tp4", load),
        ("ranks", ranks),
        ("refusals", cases),
    ):
        found = measurements(name, directory)
        parts += ["\n".join([_source(file, said), "", *tell(said)]) for file, said in found]
        parts += [] if found or name not in NOT_RUN else [NOT_RUN[name]]
    return "\n\n".join(parts) + "\n"


def _source(file: Path, said: Mapping[str, Any]) -> str:
    where = f"{said.get('gpus', 1)} x {said['gpu']}" if said["gpu"] else "without a GPU"
    title = file.stem.replace("-", " ").replace(_slug(said["gpu"]).replace("-", " "), "").strip()
    measured = f"commit {said['commit']}, {said['date']}, vLLM {said['versions'].get('vllm', '?')}"
    return f"### {title}, {where}\n\n[{file.name}](measurements/{file.name}), {measured}."


def faults(said: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (subject, counts.get("passed", 0), counts.get("failed", 0), ", ".join(f"`{file}`" for file in counts["files"]))
        for subject, counts in said["subjects"].items()
    ]
    yield _table(("subject", "tests passed", "failed", "where"), rows)
    tried = said["inputs_tried"]
    yield f"\nInputs tried by fuzzing: {sum(tried.values()):,} in {len(tried)} tests."


def launches(said: Mapping[str, Any]) -> Iterator[str]:
    made = f"{said['launches']:,} of {said['wanted']:,} launches in {said['seconds']:,.0f} s"
    yield f"{made}, {said['failed']} outside the bounds; {said['elements_compared']:,} elements compared with fp64."
    yield from (f"- {failure}" for failure in said["failures"])


def load(said: Mapping[str, Any]) -> Iterator[str]:
    sides = [side for side in ("ours", "stock") if side in said]
    rows = [(name, *(value(said[side]) for side in sides)) for name, value in _LOAD_ROWS]
    alone = f" {said['without_stock']}: judged by the tolerance alone." if "without_stock" in said else ""
    yield f"{said['clients']} clients, tensor parallel {said['tp']}.{alone}"
    yield ""
    yield _table(("", *sides), rows)
    yield ""
    yield "No problem was found." if not said["problems"] else "What was not as it must be:\n"
    yield from (f"- {problem}" for problem in said["problems"])


def _requests(kind: str):
    return lambda side: f"{side['requests'].get(kind, 0):,}"


def _growth(kind: str):
    return lambda side: f"{side['memory_growth_mib'][kind]} MiB"


def _share(key: str):
    return lambda side: f"{side[key]:,} of {side['compared_answers']:,}"


# Other requests fill the batch, so an answer's last bits change, and after a near tie its tokens: with vLLM's own, too.
_BEYOND = (
    ("further than the tolerance from themselves alone", "beyond_tolerance"),
    ("of other tokens", "parted_answers"),
)
_LOAD_ROWS = (
    ("seconds of load", lambda side: side["seconds"]),
    ("requests a second", lambda side: side["requests_a_second"]),
    *((f"{kind}", _requests(kind)) for kind in ("answered", "aborted", "cancelled", "malformed")),
    *((f"{kind}", _requests(kind)) for kind in ("lost", "crossed", "hung", "dropped")),
    ("tokens compared with the answer alone", lambda side: f"{side['compared_tokens']:,}"),
    *((f"answers {name}", _share(key)) for name, key in _BEYOND),
    ("largest difference from itself alone", lambda side: _short(side["largest_difference"])),
    ("alone again, after the load", lambda side: _short(side["alone_again"])),
    ("GPU memory after the warm-up", _growth("gpu")),
    ("host memory after the warm-up", _growth("host")),
)


def cases(said: Mapping[str, Any]) -> Iterator[str]:
    """The engines of one run that were ours, each with what became of it."""
    rows = []
    for case in said["cases"]:
        if case["name"].startswith("stock"):
            continue
        outcome = "; ".join(case["problems"]) or "ok"
        refused = " ".join(case.get("refused", "").split())
        refused = refused if len(refused) <= 190 else f"{refused[:190]} ..."
        differs = refused or _short(case.get("largest_generated_difference", ""))
        rows.append((case["name"], case.get("against", ""), case.get("generated_tokens", ""), differs, outcome))
    yield _table(
        ("engine", "against", "tokens compared", "their log-probabilities differ by, or error", "outcome"), rows
    )


def ranks(said: Mapping[str, Any]) -> Iterator[str]:
    yield from cases(said)
    for case in said["cases"]:
        if "stock_largest_by_prompt" in case:
            ours, stock = (", ".join(f"{float(value):.3f}" for value in case[key]) for key in _BY_PROMPT)
            yield f"\n{case['name']}: largest difference of each prompt {ours}; of vLLM's own on as many ranks {stock}."
    if compiled := said["compiled"]:
        times = "each once" if set(compiled.values()) == {1} else f"{sum(compiled.values())} times"
        yield f"\n{len(compiled)} kernels compiled, {times}; {said['processes_with_kernels']} ranks ran our engines."
    yield from (f"- {problem}" for problem in said["problems"])
    for reason, names in by_reason(said["not_run"]).items():
        yield f"\nNot run, {reason}: {', '.join(names)}."


_BY_PROMPT = ("largest_by_prompt", "stock_largest_by_prompt")


def _short(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _table(headers: tuple[str, ...], rows: list[tuple]) -> str:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (headers, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(headers), *lines[1:]])


def page(text: str, directory: Path = DIRECTORY) -> str:
    """`text` with its figures made anew."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + "\n" + figures(directory) + "\n" + END + rest.split(END)[1]


def main() -> int:
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
