"""Real engines on a weight-only NVFP4 checkpoint whose configuration vLLM takes for W4A4, against its BF16 twin.

    python -m tests.gpu.nvfp4_compare [--timeout SECONDS]

Three engines, side by side: stock vLLM on the twin (the same weights, dequantised); stock vLLM on the checkpoint, where
its experts multiply by scales that nobody loaded; and the overlay on the checkpoint. Hopper would not meet the fault by
itself (its default NVFP4 backend ignores activation scales), so the stock engine is given the emulation backend.

Writes docs/measurements/nvfp4-engine-GPU.json and exits 1 where the overlay differs from the twin or stock does not.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from overlay import measurement
from tests.conftest import ROOT, with_overlay, without_overlay
from tests.gpu.engine_cases import EngineCase, compare

TOLERANCE = 0.05  # NVFP4 weights in a W4A16 kernel against the same weights in BF16: other products, other roundings
CASE = "nested_no_groups"  # hf_quant_config.json without config_groups, the form that most public checkpoints have


@dataclasses.dataclass(frozen=True)
class Engine:
    """One engine: the checkpoint it serves and what is asked of it."""

    name: str
    checkpoint: str
    moe_backend: str | None = None
    overlay: bool = False


ENGINES = (
    Engine("twin", "twin"),
    Engine("stock", "quantised", moe_backend="emulation"),
    Engine("overlay", "quantised", overlay=True),
)


def write_checkpoints(work: Path) -> None:
    if (work / "twin").exists():
        return
    command = [sys.executable, "-m", "overlay", "tiny", str(work / "quantised"), "--quant", "modelopt", "--case", CASE]
    subprocess.run([*command, "--twin", str(work / "twin")], cwd=ROOT, check=True)


def run(work: Path, timeout: float) -> dict[str, dict]:
    """Start all engines at once and return what each wrote; an engine that failed has `error`."""
    write_checkpoints(work)
    children = {}
    for engine in ENGINES:
        env = with_overlay(os.environ) if engine.overlay else without_overlay(os.environ)
        with (work / f"{engine.name}.log").open("w") as log:
            children[engine.name] = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.nvfp4_compare", "--engine", engine.name, "--work", str(work)],
                cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
    answers = {}
    for name, child in children.items():
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            child.kill()
        file = work / f"{name}.json"
        answers[name] = json.loads(file.read_text()) if file.exists() else {"error": f"no answer; see {name}.log"}
        answers[name]["log"] = (work / f"{name}.log").read_text(errors="replace")
    return answers


def serve(engine: Engine, work: Path) -> None:
    """Child: one engine in this process, its greedy answers to the prompts as JSON."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from tests.gpu.engine_child import generate

    arguments = EngineCase(engine.name, "bf16", eager=True).engine_arguments(str(work / engine.checkpoint), "auto")
    if engine.moe_backend:
        arguments["moe_backend"] = engine.moe_backend
    llm = LLM(**arguments)
    (work / f"{engine.name}.json").write_text(json.dumps({"answers": generate(llm, prompt_logprobs=True)}))


def judge(answers: dict[str, dict]) -> dict[str, object]:
    """The overlay must agree with the twin, and stock must not: `problems` says what is otherwise."""
    errors = [f"{name}: {said['error']}" for name, said in answers.items() if "error" in said]
    if errors:
        return {"problems": errors}
    twin, stock, ours = (answers[engine.name]["answers"] for engine in ENGINES)
    allowed = [TOLERANCE] * len(twin)
    good, bad = compare(twin, ours, allowed), compare(twin, stock, allowed)
    problems = list(good.problems)
    if not bad.problems:
        problems.append("stock vLLM agrees with the twin: the fault did not appear, so this run shows nothing")
    decisions = [line for line in answers["overlay"]["log"].splitlines() if "NVFP4" in line and "overlay[" in line]
    if not decisions:
        problems.append("the overlay decided nothing about NVFP4 in its log")
    return {
        "case": CASE,
        "tolerance": TOLERANCE,
        "tokens": good.tokens,
        "prompt_tokens": good.prompt_tokens,
        "ties": good.ties,
        "overlay_largest_logprob_difference": good.largest,
        "overlay_largest_by_prompt": good.by_prompt,
        "stock_largest_logprob_difference": bad.largest,
        "stock_problems": len(bad.problems),
        "decisions": [line.partition(": ")[2] for line in decisions],
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.nvfp4_compare", description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, default=400, help="seconds for everything (400)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "nvfp4")
    parser.add_argument("--engine", choices=[engine.name for engine in ENGINES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(next(engine for engine in ENGINES if engine.name == options.engine), options.work)
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    report = {**measurement.provenance(), **judge(run(options.work, options.timeout))}
    measurement.keep("nvfp4-engine", report)
    print(json.dumps(report, indent=1))
    return int(bool(report["problems"]))


if __name__ == "__main__":
    sys.exit(main())
