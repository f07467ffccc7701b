"""Real engines on this machine's GPU, vLLM's own backend against ours, in child processes side by side.

    python -m tests.gpu.engine_compare [--at-once N] [--per-process N] [--timeout SECONDS] [--case NAME ...]

Writes docs/measurements/engine-GPU.json and exits 1 where a comparison fails. Answers are kept in build/engine under a
digest of the sources and the machine, so a run that was cut short goes on where it stopped.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overlay import measurement
from tests.conftest import ROOT, without_overlay
from tests.gpu import jobs
from tests.gpu.engine_cases import BY_NAME, CASES, EngineCase, compare, finite, no_numbers, tolerances
from tests.gpu.smi import nvidia_smi

SIDES = ("stock", "ours")
PROVENANCE = "provenance.json"  # of the machine that ran the engines, beside their answers
STAGGER = 8.0  # seconds between two starts: the imports of several engines at once keep each other waiting


# What decides an answer, beside the machine and its packages.
SOURCES = (
    "overlay/**/*.py",
    "cuda/*",
    "sitecustomize.py",
    "patches.toml",
    "tests/gpu/engine_*.py",
    "tests/gpu/jobs.py",
)


def compare_engines(
    names: list[str], work: Path, per_process: int = 3, timeout: float = 1200.0, at_once: int | None = None
) -> dict[str, Any]:
    """Run what `work` has no answer of yet, compare everything, write and return the measurement.

    An empty `work` runs everything; `resumable` names the one where an earlier run of the same may have left answers.
    `at_once`: None for four, or what the GPU holds. `work` says whose answers it has before the first is there, and
    goes on saying so.
    """
    at_once = at_once or min(4, jobs.room())
    work.mkdir(parents=True, exist_ok=True)
    if not (work / PROVENANCE).exists():
        (work / PROVENANCE).write_text(json.dumps(machine()))
    for case in (BY_NAME[name] for name in names):
        write_checkpoint(case, work)
    todo = list(children(missing(names, work), work, per_process))
    jobs.remember(jobs.run(todo, at_once, timeout, stagger=STAGGER), work)
    return report_of(names, work)


def machine() -> dict[str, Any]:
    """Where the engines run: see `overlay.measurement`, and the driver."""
    return {**measurement.provenance(), "driver": next(iter(nvidia_smi("--query-gpu=driver_version")), None)}


def resumable(there: Mapping[str, Any]) -> Path:
    """The folder of all that decides an answer: the sources, and the machine `there` with its packages.

    Commit and date decide nothing that the sources do not: a run may go on after an unrelated commit, or midnight.
    """
    decisive = {key: value for key, value in there.items() if key not in ("commit", "date")}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode())
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()}):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return ROOT / "build" / "engine" / digest.hexdigest()[:12]


def report_of(names: list[str], work: Path) -> dict[str, Any]:
    """Judge the answers in `work`, which may come from another machine, and keep the measurement."""
    provenance = json.loads((work / PROVENANCE).read_text())
    report = {**provenance, "cases": [judge(BY_NAME[name], work) for name in names]}
    measurement.keep("engine", report)
    return report


def judge(case: EngineCase, work: Path) -> dict:
    """One case's verdict: `problems` is empty where our engine answers as vLLM's own does, and the control does not."""
    stock, ours = (result(side, case.name, work) for side in SIDES)
    verdict: dict = {"name": case.name, "rows": case.rows, "tolerance": case.tolerance}
    missing_sides = [r for r in (stock, ours) if "error" in r]
    if missing_sides:
        return verdict | {"problems": [f"{r['side']}: {r['error']}" for r in missing_sides]}
    names = {
        side: sorted({layer["backend"] for layer in r["layers"]}) for side, r in zip(SIDES, (stock, ours), strict=True)
    }
    # On 12.x vLLM's own rows are fp8 in blocks, so that is the noise between the engines.
    tolerance = 0.1 if stock["layers"][0]["kv_cache_dtype"] == "fp8_ds_mla" else case.tolerance
    allowed = tolerances(stock["answers"], stock["again"], tolerance)
    found = compare(stock["answers"], ours["answers"], allowed)
    problems = [
        f"the stock engine is no yardstick: {problem}"
        for answers in (stock["answers"], stock["again"])
        for problem in no_numbers(answers)
    ]
    problems += found.problems
    if names["ours"] != ["OVERLAY_SPARSE_MLA"]:
        problems.append(f"our engine ran on {', '.join(names['ours'])}")
    if "OVERLAY_SPARSE_MLA" in names["stock"]:
        problems.append("the stock engine ran on our backend")
    if "zeroed" in ours:
        control = compare(stock["answers"], ours["zeroed"], allowed)
        verdict["zeroed_largest_logprob_difference"] = finite(control.largest)
        verdict["zeroed_problems"] = len(control.problems)
        if not control.problems:
            problems.append("the control passed although our attention's output was zeroed")
    count = found.tokens + found.prompt_tokens
    return verdict | {
        "tolerance": tolerance,
        "allowed_by_prompt": allowed,
        "largest_by_prompt": [finite(value) for value in found.by_prompt],
        "backends": names,
        "graph_modes": {side: r["graph_mode"] for side, r in zip(SIDES, (stock, ours), strict=True)},
        "kv_cache_dtypes": {
            side: r["layers"][0]["kv_cache_dtype"] for side, r in zip(SIDES, (stock, ours), strict=True)
        },
        "cache": {key: ours["layers"][0][key] for key in ("cache_shape", "cache_strides", "heads")},
        "generated_tokens": found.tokens,
        "prompt_tokens": found.prompt_tokens,
        "ties": found.ties,
        "largest_generated_difference": finite(found.largest_generated),
        "largest_logprob_difference": finite(found.largest),
        "jumps": [(prompt, position, finite(value)) for prompt, position, value in found.jumps],
        "mean_logprob_difference": finite(found.sum / count) if count else None,
        "seconds": {side: r["seconds"] for side, r in zip(SIDES, (stock, ours), strict=True)},
        "problems": problems,
    }


def result(side: str, name: str, work: Path) -> dict:
    path = work / f"{side}-{name}.json"
    if not path.exists():
        ended = [end for job, end in jobs.recall(work).items() if job.startswith(f"{side}: ") and name in cases_of(job)]
        return {"side": side, "error": f"no answer{f': {ended[-1]}' if ended else ''}; see {work}/{side}-*.log"}
    return json.loads(path.read_text())


def missing(names: list[str], work: Path) -> dict[str, list[str]]:
    """Cases without an answer yet; one that failed before is tried again."""
    return {side: [name for name in names if "error" in result(side, name, work)] for side in SIDES}


def write_checkpoint(case: EngineCase, work: Path) -> None:
    folder = work / case.checkpoint
    if folder.exists():
        return
    options = ["--heads", str(case.heads), "--layers", str(case.layers), "--seed", "1"]
    options += ["--nested", "--mtp"] if case.nested else []
    command = [sys.executable, "-m", "overlay", "tiny", str(folder), *options]
    subprocess.run(command, cwd=ROOT, env=without_overlay(os.environ), check=True, stdout=subprocess.DEVNULL)


def children(todo: Mapping[str, list[str]], work: Path, per_process: int) -> Iterator[jobs.Job]:
    """One child for up to `per_process` cases of a side, the longest lists first, all on the first GPU."""
    envs = dict(zip(SIDES, jobs.environments(work), strict=True))
    lists = [
        (side, names[i : i + per_process]) for side, names in todo.items() for i in range(0, len(names), per_process)
    ]
    for side, names in sorted(lists, key=lambda one: -len(one[1])):
        yield jobs.Job(
            name=f"{side}: {', '.join(names)}",
            command=("tests.gpu.engine_child", side, str(work), str(work), *names),
            gpus=jobs.gpus()[:1],
            env=envs[side],
            log=work / f"{side}-{names[0].replace(' ', '-')}.log",
            ranks=1,
        )


def cases_of(job: str) -> list[str]:
    """The cases that the child of this name runs."""
    return job.partition(": ")[2].split(", ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.engine_compare", description=__doc__.splitlines()[0])
    parser.add_argument("--at-once", type=int, help="engines on the GPU at a time (4, or as many as its memory holds)")
    parser.add_argument("--per-process", type=int, default=3, help="engines that one process runs in turn (3)")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for everything (1200)")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--answers", type=Path, help="judge the answers in this folder, and run nothing")
    options = parser.parse_args()
    there = machine()
    if not options.answers and there["gpu"] is None:
        raise SystemExit("no GPU: this compares engines on one")
    names = options.case or [case.name for case in CASES]
    if options.answers:
        report = report_of(names, options.answers)
    else:
        report = compare_engines(names, resumable(there), options.per_process, options.timeout, options.at_once)
    for case in report["cases"]:
        largest = case.get("largest_logprob_difference")
        print(f"{case['name']:16} {'ok' if not case['problems'] else 'FAILED'}  largest difference {largest}")
        for problem in case["problems"]:
            print(f"    {problem}")
    return int(any(case["problems"] for case in report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
