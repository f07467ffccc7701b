"""Child process with the overlay in front, on a GPU: what single patches change there. Prints one JSON line.

python -m tests.gpu.patches_child kernels
python -m tests.gpu.patches_child engines CHECKPOINT [{"keyword": value, ...} ...]
python -m tests.gpu.patches_child compiled FOLDER
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

POOL, COLUMNS = 4, 512


def kernels() -> dict[str, Any]:
    import vllm  # noqa: F401 - arms the overlay

    return {"bounds": bounds_in_a_graph(), "buffer": buffer_in_a_graph(), "topk": [topk(n) for n in (16_384, 16_385)]}


def bounds_in_a_graph() -> list[dict[str, Any]]:
    """The expansion captured once, replayed over clean, poisoned and again clean ids of changing lengths."""
    ops = importlib.import_module("vllm.models.glm5next.nvidia.ops.kpool_compress")
    generator = torch.Generator().manual_seed(3)
    ids = torch.zeros(64, COLUMNS, dtype=torch.int64, device="cuda")
    lengths = torch.full((64,), 9000, dtype=torch.int32, device="cuda")
    ops.expand_pools_and_append_tail(ids, lengths, POOL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.expand_pools_and_append_tail(ids, lengths, POOL)
    replays = []
    for poison in (None, 2**31, 1 << 40, -(2**31), 9000 // POOL, None):
        given = torch.randint(-1, 2000, ids.shape, generator=generator)
        if poison is not None:
            given[:, ::3] = poison
        new_lengths = torch.randint(1, 9000, lengths.shape, generator=generator, dtype=torch.int32)
        ids.copy_(given)
        lengths.copy_(new_lengths)
        graph.replay()
        torch.cuda.synchronize()
        replays.append({"poison": poison, "equal": torch.equal(out.cpu(), expected(given, new_lengths))})
    return replays


def expected(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Token indices by the definition: whole pools that exist, then the incomplete last pool."""
    pools = (lengths // POOL)[:, None]
    tokens = ids[:, :, None] * POOL + torch.arange(POOL)
    valid = ((ids >= 0) & (ids < pools))[:, :, None]
    history = torch.where(valid, tokens, -1).flatten(1)
    tail = pools * POOL + torch.arange(POOL - 1)
    return torch.cat([history, torch.where(tail < lengths[:, None], tail, -1)], 1).int()


def buffer_in_a_graph() -> dict[str, bool]:
    """The top-k's buffer is -1 at every replay, whatever the graph's memory held."""
    from overlay.patches.indexer_bounds import INDEXERS

    module = next(importlib.import_module(name) for name in INDEXERS if importlib.util.find_spec(name))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer = module.torch.empty((33, COLUMNS), dtype=torch.int32, device="cuda")
        seen = buffer.clone()
        buffer.fill_(12345)  # what the next replay finds there
    clean = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        clean.append(bool((seen == -1).all()))
    return {"clean": all(clean)}


def topk(in_one_bin: int) -> dict[str, int]:
    """Selected scores that are not among the largest 512, by both of vLLM's decode kernels, over 33 rows of which
    `in_one_bin` scores differ in their last bits only."""
    import vllm._custom_ops  # noqa: F401 - registers the operators

    rows, k = 33, COLUMNS
    scores = 1.0 + torch.rand(rows, in_one_bin, device="cuda", generator=torch.Generator("cuda").manual_seed(5)) * 0.24
    lengths = torch.full((rows, 1), in_one_bin, dtype=torch.int32, device="cuda")
    best = scores.topk(k).values.sort().values
    wrong = {}
    for name in ("top_k_per_row_decode", "persistent_topk"):
        chosen = torch.full((rows, k), -1, dtype=torch.int32, device="cuda")
        if name == "persistent_topk":
            workspace = torch.zeros(1024 * 1024, dtype=torch.uint8, device="cuda")
            torch.ops._C.persistent_topk(scores, lengths, chosen, workspace, k, in_one_bin)
        else:
            torch.ops._C.top_k_per_row_decode(scores, 1, lengths, chosen, rows, scores.stride(0), scores.stride(1), k)
        found = scores.gather(1, chosen.long().clamp_min(0)).sort().values
        wrong[name] = int(((found != best) | (chosen < 0)).sum())
    return {"in_one_bin": in_one_bin, **wrong}


def engines(checkpoint: str, *arguments: str) -> list[dict[str, Any]]:
    """Engines one after the other; of each its backend, its planned KV cache in bytes, and greedy answers."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from unittest import mock

    from vllm import LLM
    from vllm.v1.worker.gpu_worker import Worker

    from overlay import startup
    from tests.gpu.engine_child import clean_up, describe, generate

    planned: list[int] = []
    determine = Worker.determine_available_memory

    def record(worker: Any) -> int:
        planned.append(determine(worker))
        return planned[-1]

    results = []
    with mock.patch.object(Worker, "determine_available_memory", record):
        for given in arguments:
            llm = LLM(model=checkpoint, dtype="bfloat16", enable_flashinfer_autotune=False, seed=0, **json.loads(given))
            result = {**describe(llm), "planned": planned.pop(), "answers": generate(llm, prompt_logprobs=True)}
            overlay = startup.current()
            result["active"] = [e.patch.id for e in overlay.entries if e.state == "active"] if overlay else []
            results.append(result)
            del llm
            clean_up()
    return results


def compiled(folder: str) -> dict[str, Any]:
    """A small model that vLLM does compile: its cache folders before and after, and whether any file was written."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    root = Path(os.environ["VLLM_CACHE_ROOT"]) / "torch_compile_cache"

    def files() -> dict[str, float]:
        return {str(path): path.stat().st_mtime for path in root.rglob("*") if path.is_file()}

    before = files()
    llm = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512, seed=0,
        gpu_memory_utilization=0.1, compilation_config={"mode": 3, "cudagraph_mode": "NONE"},
    )  # fmt: skip
    prompt = {"prompt_token_ids": list(range(5, 60))}
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, detokenize=False), use_tqdm=False)
    after = files()
    # <key>/... of the piecewise cache, torch_aot_compile/<key>/... of the ahead-of-time one
    parts = [Path(path).relative_to(root).parts for path in after]
    keys = {part[1] if part[0] == "torch_aot_compile" else part[0] for part in parts}
    written = [path for path in after if after[path] != before.get(path)]
    return {
        "tokens": list(output.outputs[0].token_ids),
        "keys": sorted(keys),
        "artifacts written": sorted(path for path in written if path.endswith((".py", ".so", ".cubin", "/model"))),
    }


if __name__ == "__main__":
    print("\n" + json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
