"""Real engines on NVFP4 checkpoints with missing or bad scales, stock and with the overlay, against what they hold.

    python -m tests.gpu.nvfp4_engine

Writes docs/measurements/nvfp4-engine-GPU.json and exits 1 where a comparison fails. All engines run side by side.
"""

import faulthandler
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from overlay import measurement
from tests.conftest import ROOT, with_overlay, without_overlay
from tests.gpu import jobs
from tests.gpu.engine_cases import EngineCase, compare, prompts

# The first four prompts, up to 2047 tokens: beyond, the indexer's top-k breaks ties by chance and answers are noisy.
PROMPTS = 4
TOLERANCE = 0.05  # of a log-probability, between 4-bit weights and the same weights in BF16
CASE = EngineCase("nvfp4", "bf16", eager=True)
STAGGER, TIMEOUT_S = 3.0, 420.0

# Folder -> arguments of `overlay tiny`; a BF16 twin holds the same weights, dequantised.
CHECKPOINTS = {
    "weight-only": ("--case", "flat_no_groups", "--twin", "weight-only twin"),
    "complete": ("--case", "genuine_w4a4"),
    "one scale 1e30": ("--case", "genuine_w4a4", "--fault", "one_huge"),
    "linears": ("--case", "mixed_groups_experts_null", "--fault", "linear_missing", "--twin", "linears twin"),
}


@dataclass(frozen=True)
class Engine:
    """One engine. `as_blackwell`: vLLM's own choice for quantised activations is a kernel that quantises them."""

    name: str
    checkpoint: str
    overlay: bool = False
    flags: tuple[tuple[str, str], ...] = ()
    as_blackwell: bool = False


EMULATION = (("moe_backend", "emulation"),)
# Hopper's own choice, Humming, ignores activation scales; emulation reads them, as the kernels of Blackwell do.
LINEAR_EMULATION = (("linear_backend", "emulation"),)
ENGINES = (
    Engine("twin", "weight-only twin"),
    Engine("stock", "weight-only", flags=EMULATION),
    Engine("overlay", "weight-only", overlay=True),
    Engine("re-routed", "weight-only", overlay=True, as_blackwell=True),
    Engine("refused", "weight-only", overlay=True, flags=EMULATION),
    Engine("complete", "complete", flags=EMULATION),
    Engine("one bad, stock", "one scale 1e30", flags=EMULATION),
    Engine("one bad, repaired", "one scale 1e30", overlay=True, flags=EMULATION),
    Engine("linears, twin", "linears twin"),
    Engine("linears, stock", "linears", flags=LINEAR_EMULATION),
    Engine("linears, re-routed", "linears", overlay=True, flags=LINEAR_EMULATION),
)
# Engine -> the one it is compared with. The stock ones must differ, the others agree.
REFERENCES = {
    "stock": "twin",
    "overlay": "twin",
    "re-routed": "twin",
    "one bad, stock": "complete",
    "one bad, repaired": "complete",
    "linears, stock": "linears, twin",
    "linears, re-routed": "linears, twin",
}


def compare_engines(extra: Mapping[str, tuple[str, ...]] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the engines, compare their answers, keep the measurement; return it.

    `extra`, commands (`python -m ...`) by name, run beside the engines; what they wrote is returned too.
    """
    extra = extra or {}
    with tempfile.TemporaryDirectory(prefix="nvfp4-engine-") as scratch:
        folder = Path(scratch)
        write_checkpoints(folder)
        results = run_engines(folder, extra)
        said = {name: log_of(folder, name).read_text() for name in extra}
    return keep(results), said


def keep(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    report: dict[str, Any] = {**measurement.provenance(), "tolerance": TOLERANCE, "prompts": PROMPTS, "engines": {}}
    for name, result in results.items():
        reference = REFERENCES.get(name)
        own = {key: value for key, value in result.items() if key != "answers"}
        report["engines"][name] = own | (judge(result, results[reference]) if reference else {})
    measurement.keep("nvfp4-engine", report)
    return report


def judge(result: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """`problems`: where the engine does not answer as its reference; `largest`: difference of a log-probability."""
    failed = [r["error"] for r in (result, reference) if "error" in r]
    if failed:
        return {"problems": failed, "largest": None}
    found = compare(reference["answers"], result["answers"], [TOLERANCE] * PROMPTS)
    over = [f"prompt {n}: differs by up to {d:.4f}" for n, d in enumerate(found.by_prompt) if not d <= TOLERANCE]
    return {key: finite(value) for key, value in asdict(found).items() if key != "jumps"} | {
        "problems": found.problems + over
    }


def is_good(report: Mapping[str, Any]) -> bool:
    """Every stock engine answered, and otherwise than its reference; all others as theirs; the flag was refused."""
    engines = report["engines"]
    for name in REFERENCES:
        differs = bool(engines[name]["problems"])
        if "error" in engines[name] or differs != ("stock" in name):
            return False
    return "--moe-backend emulation" in engines["refused"].get("error", "")


def finite(value: Any) -> Any:
    """Infinity, which a NaN among the answers counts as, in words: JSON has neither."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def write_checkpoints(folder: Path) -> None:
    children = []
    for name, (*options, last) in CHECKPOINTS.items():
        form = [*options, str(folder / last) if "--twin" in options else last]
        command = [sys.executable, "-m", "overlay", "tiny", str(folder / name), "--seed", "1", "--quant", "modelopt"]
        children.append(subprocess.Popen([*command, *form], cwd=ROOT))
    statuses = [child.wait() for child in children]
    if any(statuses):
        raise RuntimeError(f"the checkpoints could not be written: exit {statuses}")


def log_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def run_engines(folder: Path, extra: Mapping[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """All engines at once, spread over the GPUs there are; one that gives no answer counts as an error."""
    gpus = jobs.gpus() or ("0",)
    commands = {engine.name: ("tests.gpu.nvfp4_engine", engine.name, str(folder)) for engine in ENGINES}
    with_it = {engine.name for engine in ENGINES if engine.overlay}
    todo = [
        jobs.Job(
            name,
            command,
            gpus=(gpus[number % len(gpus)],),
            env=with_overlay(os.environ) if name in with_it else without_overlay(os.environ),
            log=log_of(folder, name),
            ranks=1,
        )
        for number, (name, command) in enumerate({**commands, **extra}.items())
    ]
    jobs.run(todo, at_once=len(todo), seconds=TIMEOUT_S, stagger=STAGGER)
    return {name: answer(folder, name) for name in commands}


def answer(folder: Path, name: str) -> dict[str, Any]:
    file = folder / f"{name}.json"
    if not file.exists():
        return {"error": f"no answer:\n{log_of(folder, name).read_text()[-3000:]}"}
    return json.loads(file.read_text())


def run(engine: Engine, folder: Path) -> dict[str, Any]:
    """Build one engine and let it answer. In a child process."""
    import logging

    from vllm import LLM

    from overlay.nvfp4.cpu_load import Lines
    from tests.gpu.engine_child import generate

    said = Lines()
    logging.getLogger("overlay.nvfp4_moe_scales").addHandler(said)
    arguments = CASE.engine_arguments(str(folder / engine.checkpoint), "bfloat16") | dict(engine.flags)
    started = time.monotonic()
    with quantising_activations() if engine.as_blackwell else nullcontext():
        llm = LLM(**arguments)
    loaded = time.monotonic()
    answers = generate(llm, prompt_logprobs=True, asked=prompts()[:PROMPTS])
    seconds = {"load": round(loaded - started, 1), "generate": round(time.monotonic() - loaded, 1)}
    return {"answers": answers, **llm.apply_model(describe)[0], "log": said.lines, "seconds": seconds}


@contextmanager
def quantising_activations() -> Iterator[None]:
    """vLLM's own choice for NVFP4 experts with quantised activations is emulation, the one such kernel of any GPU.

    A GPU with FP4 tensor cores has others, and vLLM prefers those; Hopper's preference takes no activation scales. What
    is chosen for 16-bit activations stays vLLM's own choice for this GPU.
    """
    from vllm.model_executor.layers.quantization import modelopt

    select = modelopt.select_nvfp4_moe_backend

    def chosen(config: Any, weight_key: Any, activation_key: Any) -> Any:
        flag = config.moe_backend if activation_key is None else "emulation"
        with mock.patch.object(config, "moe_backend", flag):
            return select(config=config, weight_key=weight_key, activation_key=activation_key)

    with mock.patch.object(modelopt, "select_nvfp4_moe_backend", chosen):
        yield


def describe(model: Any) -> dict[str, dict[str, str]]:
    """By name: the backends of the layers of experts, and the kernels of the quantised linear layers."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    found: dict[str, dict[str, str]] = {"experts": {}, "linears": {}}
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            backend = getattr(layer.quant_method, "nvfp4_backend", None)
            found["experts"][name] = backend.value if backend else type(layer.quant_method).__name__
        elif isinstance(layer, LinearBase) and hasattr(layer.quant_method, "kernel"):
            found["linears"][name] = type(layer.quant_method.kernel).__name__
    return found


def child(name: str, folder: Path) -> None:
    faulthandler.dump_traceback_later(TIMEOUT_S + 60, exit=True)  # should whoever started this be gone by then
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = next(engine for engine in ENGINES if engine.name == name)
    try:
        result = run(engine, folder)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"{name}.json").write_text(json.dumps(result))


def main() -> int:
    report, _ = compare_engines()
    for name in REFERENCES:
        found = report["engines"][name]
        print(f"{name:20} largest difference {found['largest']}, {len(found['problems'])} problems")
    print(f"refused: {report['engines']['refused'].get('error', 'no')[:300]}")
    return 0 if is_good(report) else 1


if __name__ == "__main__":
    sys.exit(child(sys.argv[1], Path(sys.argv[2])) if len(sys.argv) == 3 else main())
