"""Engines of two and four ranks on this machine's GPUs, against one rank; all in child processes, side by side.

    python -m tests.gpu.ranks [--gpus 2|4] [--load] [--seconds N] [--case NAME ...] [--answers FOLDER [--name NAME]]

Writes docs/measurements/ranks-GPU.json and exits 1 where anything is not as it must be. With --load, `tests.gpu.load`
and `tests.gpu.random_launches` run at the same time and write files of their own.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overlay import measurement
from tests.conftest import ROOT, without_overlay
from tests.gpu import jobs
from tests.gpu.rank_cases import CUTEDSL, RankCase, by_reason, cases, judge, left_out, not_run

WORK = ROOT / "build" / "ranks"
PROVENANCE = "provenance.json"  # of the machine that ran the engines, beside their answers
STOP_S = 40.0  # before the end, by when the load tests want to have written their reports
LOAD_S, LOAD_TP4_S = 700.0, 900.0  # that the load tests may take, one after the other: start, load, and once more
HEAD_START_S = 170.0  # an engine's first start on a machine compiles for two to three minutes
COMPILED = re.compile(r"overlay\[pid (\d+)\]: kernel cache: compiled (\S+)")


def job_of(case: RankCase, number: int, gpus: tuple[str, ...], work: Path, env: Mapping[str, str]) -> jobs.Job:
    """The child of one case, on as many GPUs as it has ranks: all of them in turn, however many cases there are."""
    first = number * case.tp % (len(gpus) - len(gpus) % case.tp)
    return jobs.Job(
        name=case.name,
        command=("tests.gpu.rank_child", case.name, str(work)),
        gpus=gpus[first : first + case.tp],
        env=env,
        log=work / f"{case.name.replace(' ', '-')}.log",
        ranks=case.tp,
        first=case.name in ("tp1 64 bf16", "tp2 64 bf16 graphs", "tp4 64 bf16 graphs"),
    )


def load_jobs(gpus: tuple[str, ...], work: Path, env: Mapping[str, str], seconds: float) -> list[jobs.Job]:
    """Load on one GPU beside vLLM's own backend on another, then load on four; launches at random.

    A load test has its GPUs to itself. In a container the driver names no processes, so that GPU memory can be read of
    the whole card only, and engines that come and go there would be taken for a leak.
    """
    left = seconds - STOP_S

    def job(name: str, module: str, on: tuple[str, ...], alone: bool, *options: str) -> jobs.Job:
        common = ("--folder", str(work), *options) if alone else options
        return jobs.Job(name, (module, *common), on, env, work / f"{name}.log", len(on), first=True, alone=alone)

    budget = min(left, LOAD_S)
    options = ("--clients", "64", "--seconds", "240", "--budget", str(budget))
    found = [job("load", "tests.gpu.load", gpus[-2:], True, *options)]
    found.append(job("random-launches", "tests.gpu.random_launches", gpus[:1], False, "--seconds", str(budget)))
    if len(gpus) >= 4:
        options = ("--tp", "4", "--clients", "128", "--seconds", "120", "--budget", str(min(left - budget, LOAD_TP4_S)))
        found.append(job("load-tp4", "tests.gpu.load", gpus[:4], True, *options))
    return found


def run(
    names: list[str] | None,
    load: bool,
    seconds: float,
    ranks_a_gpu: int | None = None,
    archive: Path | None = None,
    head_start: float = HEAD_START_S,
    asked: int = 2,
) -> dict[str, Any]:
    """Run the cases (all that this machine can), judge them, write and return the measurement.

    `ranks_a_gpu`: None for as many as the smallest GPU holds. `asked`: of GPUs, see `left_out`. Raises SystemExit where
    a GPU is too small for one engine.
    """
    ranks_a_gpu = ranks_a_gpu or jobs.room()
    gpus = jobs.gpus()[:4]
    hint = without_cutedsl()
    machine = {**measurement.provenance(), "gpus": len(gpus), "cutedsl": hint is None, "cutedsl_hint": hint}
    skipped = not_run(len(gpus), machine["cutedsl"], names)
    chosen = [case for case in cases(4) if case.name not in skipped]
    WORK.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=WORK))
    (work / PROVENANCE).write_text(json.dumps(machine))
    for heads in sorted({case.heads for case in chosen}):
        write_checkpoint(heads, work)
    stock, ours = jobs.environments(work)
    numbers: Counter[int] = Counter()
    todo = load_jobs(gpus, work, ours, seconds) if load else []
    for case in chosen:
        todo.append(job_of(case, numbers[case.tp], gpus, work, stock if case.stock else ours))
        numbers[case.tp] += 1
    try:
        ended = jobs.run(todo, ranks_a_gpu, seconds, head_start=head_start, say=say)
        jobs.remember(ended, work)
    finally:
        if archive:
            pack(work, archive)
    report = report_of(names, work, asked)
    for job in todo:
        report["jobs"][job.name]["gpus"] = list(job.gpus)
    report["problems"] += [
        f"{job.name}: {ended[job.name]}, see {job.log}" for job in todo if ended[job.name].status != 0
    ]
    measurement.keep("ranks", report)
    return report


def without_cutedsl() -> str | None:
    """Why `import cutlass` fails and the way out; None where it does not.

    The package puts its modules on the path with a .pth file, which Python reads in site-packages only.
    """
    if find_spec("cutlass") is not None:
        return None
    package = find_spec("nvidia_cutlass_dsl")
    if package is None:
        return "pip install nvidia-cutlass-dsl, which this vLLM requires"
    (folder, *_) = package.submodule_search_locations
    return f"its .pth file is not read where it lies: put {Path(folder) / 'dsl_packages'} on PYTHONPATH"


def report_of(names: list[str] | None, work: Path, asked: int = 2) -> dict[str, Any]:
    """Judge the answers in `work`, which may come from another machine; None: to all that it could run."""
    provenance = json.loads((work / PROVENANCE).read_text())
    hint = provenance.pop("cutedsl_hint", None)
    skipped = not_run(provenance["gpus"], provenance["cutedsl"], names)
    chosen = [case for case in cases(4) if case.name not in skipped]
    ended = jobs.recall(work)
    results = {}
    for case in chosen:
        file = work / f"{case.name}.json"
        results[case.name] = json.loads(file.read_text()) if file.exists() else {"error": no_answer(case.name, ended)}
    verdicts = [judge(case, results) for case in chosen]
    compiled = compilations(work)
    problems = [f"{name} was compiled {count} times" for name, count in compiled.items() if count != 1]
    served = sum(len(v.get("ranks", ())) for v in verdicts if not v["name"].startswith("stock"))
    if served and not compiled:
        problems.append("no start-up log says that a kernel was compiled")
    for reason, those in left_out(skipped, asked, names).items():
        way_out = f" ({hint})" if hint and reason == CUTEDSL else ""
        problems.append(f"not run {reason}{way_out}: {', '.join(those)}")
    return {
        **provenance,
        "not_run": skipped,
        "compiled": compiled,
        "processes_with_kernels": served,
        "cases": verdicts,
        "jobs": {name: {"status": end.status, "seconds": end.seconds} for name, end in ended.items()},
        "problems": problems,
    }


def no_answer(name: str, ended: Mapping[str, jobs.Ended]) -> str:
    """What a case without an answer failed by: a crash is not a lack of time."""
    return f"no answer: {ended[name]}" if name in ended else "no answer, and how its process ended was not kept"


def compilations(work: Path) -> dict[str, int]:
    """How often each kernel was compiled, over the start-up logs of all processes: the cache is shared."""
    found: Counter[str] = Counter()
    for log in sorted(work.glob("*.log")):
        found.update(name for _, name in COMPILED.findall(log.read_text(errors="replace")))
    return dict(sorted(found.items()))


def write_checkpoint(heads: int, work: Path) -> None:
    folder = work / RankCase("", 1, heads=heads).checkpoint
    command = [sys.executable, "-m", "overlay", "tiny", str(folder), "--heads", str(heads), "--seed", "1"]
    subprocess.run(command, cwd=ROOT, env=without_overlay(os.environ), check=True, stdout=subprocess.DEVNULL)


def pack(work: Path, file: Path) -> None:
    """Answers and logs in one archive: `--answers` judges them again, on any machine."""
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted([*work.glob("*.json"), *work.glob("*.log")]):
            archive.add(path, path.name)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2, help="how many must be there (2); four are used where they are")
    parser.add_argument("--load", action="store_true", help="load tests and random launches at the same time")
    parser.add_argument(
        "--seconds", type=float, help="for everything; what runs then is stopped (1500, with --load 3000)"
    )
    parser.add_argument("--ranks-a-gpu", type=int, help="engine processes that share a GPU (as its memory allows)")
    parser.add_argument(
        "--head-start",
        type=float,
        default=HEAD_START_S,
        help="how long the first engines compile before the others start (170)",
    )
    parser.add_argument("--case", action="append", choices=[case.name for case in cases(4)], help="only these")
    parser.add_argument("--pack", type=Path, help="archive of all answers and logs, written at the end")
    parser.add_argument("--answers", type=Path, help="judge the answers in this folder, and run nothing")
    parser.add_argument("--name", default="ranks", help="of the measurement that --answers writes (ranks)")
    options = parser.parse_args()
    if options.answers:
        report = report_of(options.case, options.answers, options.gpus)
        measurement.keep(options.name, report)
    elif len(jobs.gpus()) < max(2, options.gpus):
        raise SystemExit(f"{len(jobs.gpus())} GPUs here; this compares engines of several ranks, on {options.gpus}")
    else:
        seconds = options.seconds or (3000.0 if options.load else 1500.0)
        report = run(
            options.case, options.load, seconds, options.ranks_a_gpu, options.pack, options.head_start, options.gpus
        )
    return tell(report)


def tell(report: Mapping[str, Any]) -> int:
    """Print the verdicts; 1 where there are problems."""
    for case in report["cases"]:
        largest = case.get("largest_logprob_difference", "")
        print(f"{case['name']:26} {'ok' if not case['problems'] else 'FAILED':7} {largest}")
        for problem in case["problems"]:
            print(f"    {problem}")
    for problem in report["problems"]:
        print(problem)
    for reason, names in by_reason(report["not_run"]).items():
        print(f"not run, {reason}: {', '.join(names)}")
    return int(bool(report["problems"]) or any(case["problems"] for case in report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
