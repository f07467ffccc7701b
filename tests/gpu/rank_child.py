"""Child process: one engine of one or more ranks; what it answers, or why it does not start, as a JSON file.

    python -m tests.gpu.rank_child CASE FOLDER

Reads FOLDER/CHECKPOINT, writes FOLDER/CASE.json.
"""

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.conftest import without_overlay
from tests.gpu.rank_cases import RankCase, cases


def report(worker: Any) -> dict[str, Any]:
    """Runs in each worker: its overlay, and how its sparse-MLA layers are served."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    from overlay.patches.process_proof import answer

    overlay = answer(worker)
    layers = [
        {
            "backend": layer.attn_backend.get_name(),
            "kv_cache_dtype": layer.kv_cache_dtype,
            "cache_shape": list(layer.kv_cache.shape),
            "heads": layer.num_heads,
            "dcp": max(1, getattr(layer.impl, "dcp_world_size", 1)),
        }
        for layer in worker.get_model().modules()
        if isinstance(layer, MLAAttention)
    ]
    return {"pid": os.getpid(), "fingerprint": overlay and overlay["fingerprint"], "layers": layers}


def lose_a_share(worker: Any) -> None:
    """Runs in each worker: the first rank of each group says that none of its rows was selected."""
    from overlay.attention.impl import SparseMLAImpl

    forward = SparseMLAImpl.forward_mqa

    def lossy(self: Any, *args: Any, **kwargs: Any) -> tuple:
        out, lse = forward(self, *args, **kwargs)
        return out, lse.fill_(-float("inf")) if self.dcp_rank == 0 else lse

    SparseMLAImpl.forward_mqa = lossy


@contextlib.contextmanager
def last_rank_differs(case: RankCase) -> Iterator[None]:
    """Start the last worker as a node would that was set up otherwise; workers are spawned, so each reads its own."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    make = WorkerProc.make_worker_process
    one_at_a_time = threading.Lock()  # vLLM starts them from several threads, and they share the environment

    def start(*args: Any, **kwargs: Any) -> Any:
        with one_at_a_time:
            env = os.environ.copy()
            if kwargs["rank"] == case.tp - 1:
                env = without_overlay(env) if case.odd == "none" else {**env, "OVERLAY_PATCHES": "sparse_mla=false"}
            with mock.patch.dict(os.environ, env, clear=True):
                return make(*args, **kwargs)

    with mock.patch.object(WorkerProc, "make_worker_process", staticmethod(start)):
        yield


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other engine computes on these GPUs: ranks that wait for each other use up whole time slices."""
    with contextlib.ExitStack() as files:
        for gpu in sorted(os.environ["CUDA_VISIBLE_DEVICES"].split(",")):
            file = files.enter_context((folder / f"gpu-{gpu}.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(case: RankCase, folder: Path) -> dict[str, Any]:
    from vllm import LLM

    from tests.gpu.engine_child import generate, kv_cache_dtype

    side = "stock" if case.stock else "ours"
    rows = "auto" if case.odd else kv_cache_dtype(case.engine, side)
    started = time.monotonic()
    with last_rank_differs(case) if case.odd else contextlib.nullcontext():
        llm = LLM(**case.engine_arguments(str(folder / case.checkpoint), rows))
    loaded = time.monotonic()
    with alone(folder):
        free = time.monotonic()
        result = {"ranks": llm.collective_rpc(report), "answers": generate(llm, prompt_logprobs=True)}
        generated = time.monotonic()
        if case.control:
            llm.collective_rpc(lose_a_share)
            result["control"] = generate(llm, prompt_logprobs=True)
    result["seconds"] = {"load": round(loaded - started, 1), "generate": round(generated - free, 1)}
    return result


def main(name: str, folder: Path) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    case = next(case for case in cases(4) if case.name == name)
    if case.odd:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    try:
        result = run(case, folder)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    (folder / f"{name}.json").write_text(json.dumps(result))
    return int("error" in result and case.refusal is None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
