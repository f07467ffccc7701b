"""Real engines on this machine's GPU, vLLM's own backend against ours, in child processes side by side.

    python -m tests.gpu.engine_compare [--at-once N] [--per-process N] [--timeout SECONDS] [--case NAME ...]

Writes docs/measurements/engine-GPU.json and exits 1 where a comparison fails. Answers are kept in build/engine under a
digest of the sources, so a run that was cut short goes on where it stopped.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from overlay import measurement
from tests.conftest import ROOT, with_overlay, without_overlay
from tests.gpu.engine_cases import BY_NAME, CASES, EngineCase, compare, tolerances

SIDES = ("stock", "ours")
PROVENANCE = "provenance.json"  # of the machine that ran the engines, beside their answers
STAGGER = 8.0  # seconds between two starts: the imports of several engines at once keep each other waiting


@dataclasses.dataclass
class Child:
    """One running child process and the log that its output goes to."""

    side: str
    cases: list[str]
    process: subprocess.Popen
    log: Path


def compare_engines(names: list[str], at_once: int, per_process: int, timeout: float) -> dict:
    """Run what is not there yet, compare everything, write and return the measurement."""
    work = ROOT / "build" / "engine" / source_digest()
    work.mkdir(parents=True, exist_ok=True)
    for case in (BY_NAME[name] for name in names):
        write_checkpoint(case, work)
    run_children(missing(names, work), work, at_once, per_process, timeout)
    (work / PROVENANCE).write_text(json.dumps(measurement.provenance()))
    return report_of(names, work)


def report_of(names: list[str], work: Path) -> dict:
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
    problems = list(found.problems)
    if names["ours"] != ["OVERLAY_SPARSE_MLA"]:
        problems.append(f"our engine ran on {', '.join(names['ours'])}")
    if "OVERLAY_SPARSE_MLA" in names["stock"]:
        problems.append("the stock engine ran on our backend")
    if "zeroed" in ours:
        control = compare(stock["answers"], ours["zeroed"], allowed)
        verdict["zeroed_largest_logprob_difference"] = control.largest
        verdict["zeroed_problems"] = len(control.problems)
        if not control.problems:
            problems.append("the control passed although our attention's output was zeroed")
    count = found.tokens + found.prompt_tokens
    return verdict | {
        "tolerance": tolerance,
        "allowed_by_prompt": allowed,
        "largest_by_prompt": found.by_prompt,
        "backends": names,
        "graph_modes": {side: r["graph_mode"] for side, r in zip(SIDES, (stock, ours), strict=True)},
        "kv_cache_dtypes": {
            side: r["layers"][0]["kv_cache_dtype"] for side, r in zip(SIDES, (stock, ours), strict=True)
        },
        "cache": {key: ours["layers"][0][key] for key in ("cache_shape", "cache_strides", "heads")},
        "generated_tokens": found.tokens,
        "prompt_tokens": found.prompt_tokens,
        "ties": found.ties,
        "largest_generated_difference": found.largest_generated,
        "largest_logprob_difference": found.largest,
        "jumps": found.jumps,
        "mean_logprob_difference": found.sum / count if count else None,
        "seconds": {side: r["seconds"] for side, r in zip(SIDES, (stock, ours), strict=True)},
        "problems": problems,
    }


def result(side: str, name: str, work: Path) -> dict:
    path = work / f"{side}-{name}.json"
    if not path.exists():
        return {"side": side, "error": f"no answer; see {work}/{side}-*.log"}
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
    subprocess.run([sys.executable, "-m", "overlay", "tiny", str(folder), *options], cwd=ROOT, check=True)


def run_children(todo: dict[str, list[str]], work: Path, at_once: int, per_process: int, timeout: float) -> None:
    """All of `todo` in child processes of up to `per_process` cases, `at_once` of them at a time, until `timeout`."""
    waiting = [
        (side, names[i : i + per_process]) for side, names in todo.items() for i in range(0, len(names), per_process)
    ]
    waiting.sort(key=lambda job: -len(job[1]))
    deadline = time.monotonic() + timeout
    running: list[Child] = []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            if waiting and len(running) < at_once:
                running.append(start(*waiting.pop(0), work))
                time.sleep(STAGGER)
            for child in [child for child in running if child.process.poll() is not None]:
                print(
                    f"{child.side} {', '.join(child.cases)}: exit {child.process.returncode}, {child.log}", flush=True
                )
                running.remove(child)
            time.sleep(0.5)
    finally:
        for child in running:
            print(f"{child.side} {', '.join(child.cases)}: stopped after {timeout} s, {child.log}", flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()


def start(side: str, names: list[str], work: Path) -> Child:
    log = work / f"{side}-{names[0].replace(' ', '-')}.log"
    env = without_overlay(os.environ)
    if side == "ours":
        settings = work / "patches.toml"
        capability = measurement.provenance()["capability"]
        settings.write_text(f'[patches.sparse_mla]\nenabled = "auto"\nother_capabilities = "{capability}"\n')
        env = {**with_overlay(os.environ), "OVERLAY_CONFIG": str(settings)}
    command = [sys.executable, "-m", "tests.gpu.engine_child", side, str(work), str(work), *names]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return Child(side, names, process, log)


def source_digest() -> str:
    """Digest of what decides an answer: the overlay, its kernels, and these files."""
    digest = hashlib.sha256(metadata.version("vllm").encode())
    files = [*(ROOT / "overlay").rglob("*.py"), *(ROOT / "cuda").iterdir(), *Path(__file__).parent.glob("engine_*.py")]
    for path in sorted(path for path in files if path.is_file()):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.engine_compare", description=__doc__.splitlines()[0])
    parser.add_argument("--at-once", type=int, default=4, help="engines on the GPU at a time (4)")
    parser.add_argument("--per-process", type=int, default=3, help="engines that one process runs in turn (3)")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for everything (1200)")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--answers", type=Path, help="judge the answers in this folder, and run nothing")
    options = parser.parse_args()
    if not options.answers and measurement.provenance()["gpu"] is None:
        raise SystemExit("no GPU: this compares engines on one")
    names = options.case or [case.name for case in CASES]
    if options.answers:
        report = report_of(names, options.answers)
    else:
        report = compare_engines(names, options.at_once, options.per_process, options.timeout)
    for case in report["cases"]:
        largest = case.get("largest_logprob_difference")
        print(f"{case['name']:16} {'ok' if not case['problems'] else 'FAILED'}  largest difference {largest}")
        for problem in case["problems"]:
            print(f"    {problem}")
    return int(any(case["problems"] for case in report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
