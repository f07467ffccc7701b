"""Child processes on a GPU: what single patches change there. Each writes one JSON document to OUT.

python -m tests.gpu.patches_child kernels OUT
python -m tests.gpu.patches_child engines OUT CHECKPOINT {"keyword": value, ...} [...]
python -m tests.gpu.patches_child compilations OUT FOLDER SWITCHES [...]
"""

import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from overlay.probe.scores import POOL, K, expanded
from tests.conftest import ROOT

COMPILED_S = 300  # of one engine start of the small model that vLLM compiles


def kernels() -> dict[str, Any]:
    import vllm  # noqa: F401 - arms the overlay

    from tests.patches import harness

    patched = bounds_in_a_graph()
    buffer = buffer_in_a_graph()
    with harness.without("indexer_bounds"):
        stock = bounds_in_a_graph()
    return {"patched": patched, "stock": stock, "buffer": buffer}


def bounds_in_a_graph() -> list[dict[str, Any]]:
    """The expansion captured once, replayed over clean, poisoned and again clean ids of changing lengths."""
    ops = importlib.import_module("vllm.models.glm5next.nvidia.ops.kpool_compress")
    generator = torch.Generator().manual_seed(3)
    ids = torch.zeros(64, K, dtype=torch.int64, device="cuda")
    lengths = torch.full((64,), 9000, dtype=torch.int32, device="cuda")
    ops.expand_pools_and_append_tail(ids, lengths, POOL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.expand_pools_and_append_tail(ids, lengths, POOL)
    replays = []
    for poison in (None, 2**31, 1 << 40, -(2**31), 9000 // POOL, None):
        new_lengths = torch.randint(1, 9000, lengths.shape, generator=generator, dtype=torch.int32)
        given = torch.randint(-1, 2000, ids.shape, generator=generator)
        # Clean is what a top-k writes: pools that exist, and -1.
        given = torch.where(given < (new_lengths // POOL)[:, None], given, -1)
        if poison is not None:
            given[:, ::3] = poison
        ids.copy_(given)
        lengths.copy_(new_lengths)
        graph.replay()
        torch.cuda.synchronize()
        replays.append({"poison": poison, "equal": torch.equal(out.cpu(), expanded(given, new_lengths))})
    return replays


def buffer_in_a_graph() -> list[bool]:
    """Is the top-k's buffer -1 at every replay, whatever the graph's memory held?"""
    from overlay.patches.indexer_bounds import INDEXERS

    module = importlib.import_module(next(name for name in INDEXERS if importlib.util.find_spec(name)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer = module.torch.empty((33, K), dtype=torch.int32, device="cuda")
        seen = buffer.clone()
        buffer.fill_(12345)  # what the next replay finds there
    clean = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        clean.append(bool((seen == -1).all()))
    return clean


def engines(checkpoint: str, *arguments: str) -> list[dict[str, Any]]:
    """Engines one after the other; of each its backend, the planner's figures in bytes, and greedy answers."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.v1.worker.gpu_worker import Worker

    from overlay import startup
    from tests.gpu.engine_child import clean_up, describe, generate

    planned: list[dict[str, int | None]] = []
    determine = Worker.determine_available_memory

    def record(worker: Any) -> int:
        available = determine(worker)
        figures = {name: getattr(worker, name, None) for name in ("total_consumed", "peak_activation_memory")}
        planned.append({"available": available, **figures})
        return available

    results = []
    with mock.patch.object(Worker, "determine_available_memory", record):
        for given in arguments:
            llm = start(checkpoint, json.loads(given))
            result = {**describe(llm), "planned": planned[-1], "answers": generate(llm, prompt_logprobs=True)}
            overlay = startup.current()
            result["active"] = [e.patch.id for e in overlay.entries if e.state == "active"] if overlay else []
            results.append(result)
            del llm
            clean_up()
    return results


def start(checkpoint: str, keywords: dict[str, Any]) -> Any:
    """The engine. vLLM's planner gives up where another process frees memory of the GPU meanwhile: again, then."""
    from vllm import LLM

    from tests.gpu.engine_child import clean_up

    for attempt in (1, 2, 3):
        try:
            return LLM(model=checkpoint, dtype="bfloat16", enable_flashinfer_autotune=False, seed=0, **keywords)
        except AssertionError as error:
            if "Error in memory profiling" not in str(error) or attempt == 3:
                raise
            print(f"attempt {attempt}: {error}", file=sys.stderr, flush=True)
        clean_up()
    raise AssertionError("not reached")


def compilations(folder: str, *switches: str) -> list[dict[str, Any]]:
    """`compiled` once for each of OVERLAY_PATCHES, in processes of their own, with one cache in FOLDER for all."""
    results = []
    for number, overrides in enumerate(switches):
        out = Path(folder) / f"{number}.json"
        env = {**os.environ, "OVERLAY_PATCHES": overrides, "VLLM_CACHE_ROOT": str(Path(folder) / "cache")}
        command = [sys.executable, "-m", "tests.gpu.patches_child", "compiled", str(out), folder]
        subprocess.run(command, cwd=ROOT, env=env, timeout=COMPILED_S, check=True)
        results.append({"switches": overrides, **json.loads(out.read_text())})
    return results


def compiled(folder: str) -> dict[str, Any]:
    """A small model that vLLM compiles: what it loaded from the cache, what it saved there, and under which keys."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.compilation.counter import compilation_counter

    llm = LLM(
        model=str(Path(folder) / "llama"), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        max_model_len=512, gpu_memory_utilization=0.03, kv_cache_memory_bytes=1 << 28,
        enable_flashinfer_autotune=False, compilation_config={"mode": 3, "cudagraph_mode": "NONE"},
    )  # fmt: skip
    prompt = {"prompt_token_ids": list(range(5, 60))}
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, detokenize=False), use_tqdm=False)
    keys = (Path(os.environ["VLLM_CACHE_ROOT"]) / "torch_compile_cache" / "torch_aot_compile").glob("*/rank_0_0/model")
    return {
        "tokens": list(output.outputs[0].token_ids),
        "keys": sorted(path.parent.parent.name for path in keys),
        "loaded": compilation_counter.num_aot_artifacts_loaded,
        "saved": compilation_counter.num_aot_artifacts_saved,
    }


def main(name: str, out: str, *arguments: str) -> None:
    faulthandler.enable()
    Path(out).write_text(json.dumps(globals()[name](*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
