"""Single patches on this machine's GPUs, with and without: in captured graphs, engines, and vLLM's compile cache.

    python -m tests.gpu.patches [--seconds N] [--at-once N] [--only NAME ...] [--pack FILE]
    python -m tests.gpu.patches --answers FOLDER

Writes docs/measurements/patches-GPU.json and exits 1 where a patch does not do what it says. All of it runs in child
processes side by side; their logs and answers are in build/patches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from overlay import measurement
from tests.attention.models import LLAMA
from tests.conftest import ROOT, without_overlay
from tests.gpu import jobs
from tests.gpu.engine_cases import compare
from tests.gpu.ranks import PROVENANCE, pack, say

WORK = ROOT / "build" / "patches"
OURS, SM90 = "OVERLAY_SPARSE_MLA", "FLASHINFER_MLA_SPARSE_SM90"
ENGINE = {"max_model_len": 12288, "max_num_seqs": 8, "enable_prefix_caching": False}
SMALL = {**ENGINE, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 1 << 30}
# 64 heads and chunks of 8192 tokens: stock sets 65,536 rows or more of 64 heads aside, the forward pass needs 16,384.
PROFILED = {**ENGINE, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.12, "enforce_eager": True,
            "kv_cache_dtype": "bfloat16"}  # fmt: skip
GRAPHS = {**ENGINE, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.06, "kv_cache_dtype": "bfloat16"}
GAIN = (2.5e9, 4.5e9)  # bytes
# The first four prompts, up to 2047 tokens: beyond, the indexer's top-k breaks ties by chance.
PROMPTS = 4
TOLERANCE = {"bfloat16": 0.02, "fp8": 0.1}

Answers = Mapping[str, Any]


def children(work: Path) -> dict[str, tuple[dict[str, str] | None, list[str]]]:
    """Name -> switches (None: without the overlay) and the child's arguments after OUT."""

    def engines(switches: dict[str, str] | None, heads: int, *keywords: dict) -> tuple:
        return switches, ["engines", str(work / f"tiny-{heads}"), *map(json.dumps, keywords)]

    routes = [{**SMALL, "attention_backend": SM90, "kv_cache_dtype": dtype} for dtype in TOLERANCE]
    on, off = "indexer_bounds=auto", "indexer_bounds=false"
    return {
        "profile off": engines({"prefill_profile": "false"}, 64, PROFILED),
        "profile on": engines({"prefill_profile": "true"}, 64, PROFILED),
        "fa3": engines(None, 16, *routes),
        "fa2": engines({"flashinfer_fa2": "true", "sparse_mla": "false"}, 16, *routes),
        "kernels": ({"indexer_bounds": "true"}, ["kernels"]),
        "compile cache": ({}, ["compilations", str(work / "compile-on"), on, on, off, on]),
        "compile cache off": (
            {},
            ["compilations", str(work / "compile-off"), f"compile_cache=false,{on}", f"compile_cache=false,{off}"],
        ),
        "graphs off": engines({"cudagraph_defaults": "false"}, 16, GRAPHS),
        "graphs on": engines({"cudagraph_defaults": "true"}, 16, GRAPHS),
    }


def run(names: list[str], at_once: int, seconds: float, archive: Path | None) -> dict[str, Any]:
    """Run the children, judge them, write and return the measurement."""
    WORK.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=WORK))
    for name in ("compile-on", "compile-off"):
        (work / name / "llama").mkdir(parents=True)
        (work / name / "llama" / "config.json").write_text(json.dumps(LLAMA))
    for heads in (16, 64):
        command = [sys.executable, "-m", "overlay", "tiny", str(work / f"tiny-{heads}"), "--heads", str(heads)]
        subprocess.run(
            [*command, "--seed", "1"], cwd=ROOT, env=without_overlay(os.environ), check=True, stdout=subprocess.DEVNULL
        )
    stock, ours = jobs.environments(work)
    gpus = jobs.gpus()
    todo = []
    for number, (name, (switches, (kind, *rest))) in enumerate(children(work).items()):
        if name not in names:
            continue
        env = stock if switches is None else ours
        overrides = ",".join(f"{patch}={value}" for patch, value in (switches or {}).items())
        todo.append(
            jobs.Job(
                name=name,
                command=("tests.gpu.patches_child", kind, str(work / f"{name}.json"), *rest),
                gpus=(gpus[number % len(gpus)],),
                env={**env, "HF_HUB_OFFLINE": "1", **({"OVERLAY_PATCHES": overrides} if overrides else {})},
                log=work / f"{name.replace(' ', '-')}.log",
                ranks=1,
            )
        )
    (work / PROVENANCE).write_text(json.dumps(measurement.provenance()))
    try:
        ended = jobs.run(todo, at_once, seconds, stagger=2.0, say=say)
    finally:
        if archive:
            pack(work, archive)
    report = report_of(work, names)
    report["jobs"] = {name: {"status": end.status, "seconds": end.seconds} for name, end in ended.items()}
    measurement.keep("patches", report)
    return report


def report_of(work: Path, names: list[str]) -> dict[str, Any]:
    """Judge the answers in `work`, which may come from another machine."""
    answers = {name: json.loads(file.read_text()) for name in names if (file := work / f"{name}.json").exists()}
    patches = {}
    for patch, (needed, judge) in JUDGES.items():
        if not set(needed) <= set(names):
            continue
        missing = [name for name in needed if name not in answers]
        patches[patch] = (
            {"problems": [f"no answer of '{name}': see its log" for name in missing]} if missing else judge(answers)
        )
    return {**json.loads((work / PROVENANCE).read_text()), "patches": patches}


def bounds(answers: Answers) -> dict[str, Any]:
    """indexer_bounds: right at every replay of one graph; stock lets garbage through, or the patch is not needed."""
    kernels = answers["kernels"]
    problems = [f"poison {replay['poison']}: not as defined" for replay in kernels["patched"] if not replay["equal"]]
    if all(replay["equal"] for replay in kernels["stock"]):
        problems.append("stock is right as well: the fault is gone")
    if not all(replay["equal"] for replay in kernels["stock"] if replay["poison"] is None):
        problems.append("stock is wrong without poison: the definition is not vLLM's")
    if not all(kernels["buffer"]):
        problems.append("the top-k's buffer is not -1 at every replay")
    return {"problems": problems, **kernels}


def profile(answers: Answers) -> dict[str, Any]:
    """prefill_profile: the planner's figure grows by what is no longer set aside, and the answers stay.

    What other processes on the GPU allocate during the profile run is consumed in vLLM's eyes, so `total_consumed` is
    added back on both sides: what remains is the requested memory less the peak of this engine's own tensors.
    """
    off, on = (answers[name][0] for name in ("profile off", "profile on"))
    figures = [engine["planned"]["available"] + engine["planned"]["total_consumed"] for engine in (off, on)]
    gained = figures[1] - figures[0]
    problems = differences(off, on, "bfloat16")
    if not GAIN[0] < gained < GAIN[1]:
        problems.append(f"the KV cache gains {gained / 2**30:.2f} GiB")
    if "prefill_profile" in off["active"] or "prefill_profile" not in on["active"]:
        problems.append("the switch did not switch")
    problems += [f"served by {name}" for name in (backends(off) | backends(on)) - {OURS}]
    return {"problems": problems, "gained": gained, "off": off["planned"], "on": on["planned"]}


def routes(answers: Answers) -> dict[str, Any]:
    """flashinfer_fa2: vLLM's Hopper backend through FA2 answers as it does through FA3, bf16 and fp8 rows."""
    document: dict[str, Any] = {"problems": []}
    for dtype, stock, ours in zip(TOLERANCE, answers["fa3"], answers["fa2"], strict=True):
        problems = differences(stock, ours, dtype)
        problems += [f"served by {name}" for name in (backends(stock) | backends(ours)) - {SM90}]
        if "flashinfer_fa2" not in ours["active"] or stock["active"]:
            problems.append(f"active: {', '.join(ours['active'])}; in the stock engine: {', '.join(stock['active'])}")
        found = compare(stock["answers"][:PROMPTS], ours["answers"][:PROMPTS], [TOLERANCE[dtype]] * PROMPTS)
        document[dtype] = {
            "largest_logprob_difference": found.largest, "largest_generated_difference": found.largest_generated,
            "jumps": found.jumps, "tokens": found.tokens, "prompt_tokens": found.prompt_tokens, "ties": found.ties,
        }  # fmt: skip
        document["problems"] += [f"{dtype}: {problem}" for problem in problems]
    return document


def compile_cache(answers: Answers) -> dict[str, Any]:
    """compile_cache: the same patches hit, a toggle compiles anew, going back hits; without it a toggle meets the old.

    The switch that is toggled, indexer_bounds, is of a module that this model does not import.
    """
    chain, control = answers["compile cache"], answers["compile cache off"]
    hits = [bool(step["loaded"]) and not step["saved"] for step in (*chain, *control)]
    misses = [bool(step["saved"]) and not step["loaded"] for step in (*chain, *control)]
    problems = []
    if not (misses[0] and misses[4]):
        problems.append("the first start did not compile and save")
    if not hits[1]:
        problems.append("the same patches do not hit")
    if not misses[2]:
        problems.append("a toggle meets the artifact of other patches")
    if not hits[3]:
        problems.append("going back does not hit")
    if not hits[5]:
        problems.append("without the patch a toggle does not meet the old artifact: the fault is gone")
    if [len(step["keys"]) for step in chain] != [1, 1, 2, 2]:
        problems.append(f"{[len(step['keys']) for step in chain]} keys in the cache")
    if len({tuple(step["tokens"]) for step in (*chain, *control)}) != 1:
        problems.append("the answers differ")
    return {"problems": problems, "with": chain, "without": control}


def graphs(answers: Answers) -> dict[str, Any]:
    """cudagraph_defaults: decode graphs only, and the same answers."""
    off, on = (answers[name][0] for name in ("graphs off", "graphs on"))
    modes = [engine["graph_mode"].rpartition(".")[2] for engine in (off, on)]
    problems = differences(off, on, "bfloat16")
    if modes != ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"]:
        problems.append(f"graph modes {modes}")
    return {"problems": problems, "modes": modes, "off": off["planned"], "on": on["planned"]}


def differences(stock: Mapping[str, Any], ours: Mapping[str, Any], dtype: str) -> list[str]:
    both = [engine["answers"][:PROMPTS] for engine in (stock, ours)]
    return compare(*both, [TOLERANCE[dtype]] * PROMPTS).problems


def backends(engine: Mapping[str, Any]) -> set[str]:
    return {layer["backend"] for layer in engine["layers"]}


JUDGES: dict[str, tuple[tuple[str, ...], Callable[[Answers], dict[str, Any]]]] = {
    "indexer_bounds": (("kernels",), bounds),
    "prefill_profile": (("profile off", "profile on"), profile),
    "flashinfer_fa2": (("fa3", "fa2"), routes),
    "compile_cache": (("compile cache", "compile cache off"), compile_cache),
    "cudagraph_defaults": (("graphs off", "graphs on"), graphs),
}
NAMES = list(children(Path()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.patches", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=900, help="for everything; what runs then is stopped (900)")
    parser.add_argument("--at-once", type=int, default=9, help="children at a time (9)")
    parser.add_argument("--only", action="append", choices=list(JUDGES), help="only these patches")
    parser.add_argument("--pack", type=Path, help="archive of all answers and logs, written at the end")
    parser.add_argument("--answers", type=Path, help="judge the answers in this folder, and run nothing")
    options = parser.parse_args()
    names = [name for patch in options.only or JUDGES for name in JUDGES[patch][0]]
    if options.answers:
        report = report_of(options.answers, names)
        measurement.keep("patches", report)
    elif not jobs.gpus():
        raise SystemExit("no GPU: this runs engines on one")
    else:
        report = run(names, options.at_once, options.seconds, options.pack)
    for patch, verdict in report["patches"].items():
        print(f"{patch:20} {'ok' if not verdict['problems'] else 'FAILED'}")
        for problem in verdict["problems"]:
            print(f"    {problem}")
    return int(any(verdict["problems"] for verdict in report["patches"].values()))


if __name__ == "__main__":
    sys.exit(main())
