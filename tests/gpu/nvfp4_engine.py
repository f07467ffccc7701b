"""Real engines on a weight-only NVFP4 checkpoint: stock, and with the overlay, against a BF16 twin of the same weights.

    python -m tests.gpu.nvfp4_engine

Writes docs/measurements/nvfp4-engine-GPU.json and exits 1 where a comparison fails. Four engines, side by side.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overlay import measurement
from tests.conftest import ROOT, with_overlay, without_overlay
from tests.gpu.engine_cases import EngineCase, compare

# The first four prompts, up to 2047 tokens: beyond, the indexer's top-k breaks ties by chance and answers are noisy.
PROMPTS = 4
TOLERANCE = 0.05  # of a log-probability, between 4-bit weights and the same weights in BF16
CASE = EngineCase("nvfp4", "bf16", eager=True)
STAGGER, TIMEOUT_S = 8.0, 900.0


@dataclass(frozen=True)
class Engine:
    """One of the four: which checkpoint, with or without the overlay, and --moe-backend."""

    name: str
    quantised: bool
    overlay: bool
    moe_backend: str


ENGINES = (
    Engine("twin", quantised=False, overlay=False, moe_backend="auto"),
    # Hopper's own choice ignores activation scales; emulation reads them, as the kernels of Blackwell do
    Engine("stock", quantised=True, overlay=False, moe_backend="emulation"),
    Engine("overlay", quantised=True, overlay=True, moe_backend="auto"),
    Engine("refused", quantised=True, overlay=True, moe_backend="emulation"),
)


def compare_engines() -> dict[str, Any]:
    """Run the engines, compare their answers with the twin's, write and return the measurement."""
    with tempfile.TemporaryDirectory(prefix="nvfp4-engine-") as scratch:
        folder = Path(scratch)
        write_checkpoints(folder)
        results = run_engines(folder)
    twin = results["twin"]["answers"][:PROMPTS]
    report = {**measurement.provenance(), "tolerance": TOLERANCE, "prompts": PROMPTS}
    for name in ("stock", "overlay"):
        found = compare(twin, results[name]["answers"][:PROMPTS], [TOLERANCE] * PROMPTS)
        report[name] = {
            **{key: finite(value) for key, value in asdict(found).items()},
            "experts": results[name]["experts"],
            "seconds": results[name]["seconds"],
        }
    report["refused"] = results["refused"].get("error", "")
    measurement.keep("nvfp4-engine", report)
    return report


def finite(value: Any) -> Any:
    """Infinity, which a NaN among the answers counts as, in words: JSON has neither."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def write_checkpoints(folder: Path) -> None:
    form = ["--quant", "modelopt", "--case", "flat_no_groups", "--twin", str(folder / "twin")]
    command = [sys.executable, "-m", "overlay", "tiny", str(folder / "quantised"), "--seed", "1", *form]
    subprocess.run(command, cwd=ROOT, check=True)


def run_engines(folder: Path) -> dict[str, dict[str, Any]]:
    """All engines at once; an engine that fails without an answer fails the comparison with the end of its log."""
    children = {}
    try:
        for engine in ENGINES:
            env = with_overlay(os.environ) if engine.overlay else without_overlay(os.environ)
            command = [sys.executable, "-m", "tests.gpu.nvfp4_engine", engine.name, str(folder)]
            with (folder / f"{engine.name}.log").open("w") as log:
                children[engine.name] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
            time.sleep(STAGGER)  # the imports of several engines at once keep each other waiting
        deadline = time.monotonic() + TIMEOUT_S
        for child in children.values():
            child.wait(max(1.0, deadline - time.monotonic()))
    finally:
        for child in children.values():
            child.kill()
    return {name: answer(folder, name) for name in children}


def answer(folder: Path, name: str) -> dict[str, Any]:
    file = folder / f"{name}.json"
    if not file.exists():
        raise RuntimeError(f"{name} gave no answer:\n{(folder / f'{name}.log').read_text()[-4000:]}")
    result = json.loads(file.read_text())
    if "error" in result and name != "refused":
        raise RuntimeError(f"{name}: {result['error']}\n{(folder / f'{name}.log').read_text()[-4000:]}")
    return result


def run(engine: Engine, folder: Path) -> dict[str, Any]:
    """Build one engine and let it answer. In a child process."""
    from vllm import LLM

    from tests.gpu.engine_child import generate

    checkpoint = folder / ("quantised" if engine.quantised else "twin")
    arguments = CASE.engine_arguments(str(checkpoint), "bfloat16") | {"moe_backend": engine.moe_backend}
    started = time.monotonic()
    llm = LLM(**arguments)
    loaded = time.monotonic()
    answers = generate(llm, prompt_logprobs=True)
    seconds = {"load": round(loaded - started, 1), "generate": round(time.monotonic() - loaded, 1)}
    return {"answers": answers, "experts": llm.apply_model(backends)[0], "seconds": seconds}


def backends(model: Any) -> dict[str, str]:
    """The NVFP4 backend of every layer of experts, by name; of unquantised ones the method."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            backend = getattr(layer.quant_method, "nvfp4_backend", None)
            found[name] = backend.value if backend else type(layer.quant_method).__name__
    return found


def child(name: str, folder: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = next(engine for engine in ENGINES if engine.name == name)
    try:
        result = run(engine, folder)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"{name}.json").write_text(json.dumps(result))


def main() -> int:
    report = compare_engines()
    for name in ("stock", "overlay"):
        print(f"{name:8} largest difference {report[name]['largest']}, {len(report[name]['problems'])} problems")
    print(f"refused  {report['refused'][:300]}")
    good = report["stock"]["problems"] and not report["overlay"]["problems"] and report["refused"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(child(sys.argv[1], Path(sys.argv[2])) if len(sys.argv) == 3 else main())
