"""The indexer's top-k on this GPU, every kernel that vLLM has for it, against torch's.

    python -m overlay.probe.indexer --out FILE     `python -m overlay probe indexer` runs and reads it

Three steps turn scores into index rows: a top-k for decode batches, chosen by --sparse-indexer-topk-backend, another
for prefill, and the expansion of pools to tokens. Each is called as `sparse_attn_indexer_kpool` calls it. A row is one
JSON object, a line of FILE. Without a GPU, vLLM's plain torch variant is all that runs.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from overlay.probe import device, scores
from overlay.probe.scores import Case, K

# Values of --sparse-indexer-topk-backend. `auto` is what every engine uses that was not told otherwise.
# FlashInfer's comes last: it is compiled at its first use, for minutes.
FLAGS = ("auto", "cooperative", "persistent", "per_row", "deep_select", "flashinfer")
EXPANSION = "vllm.models.glm5next.nvidia.ops.kpool_compress"
# Ids past every row's pools, and such that multiplying by the pool's size wraps around to.
GARBAGE = (2**31, 1 << 40, -(2**31), 5000)


@dataclass(frozen=True)
class Row:
    """One case, or with `ok` None the reason why a kernel is not to be had. `required`: engines use it unasked."""

    step: str
    kernel: str
    case: str = ""
    rows: int = 0
    wrong: int | None = None  # entries of rows * 512
    ok: bool | None = None
    required: bool = True
    reason: str = ""


def measure(where: str, flags: tuple[str, ...] = FLAGS) -> Iterator[Row]:
    """All rows, on the device `where`; NaN, which a kernel may not survive, comes last of each kernel's cases."""
    device.start(where)
    if where != "cpu":
        yield from expansion(where)
        yield from selections("prefill", "top_k_per_row_prefill", prefill, where, required=True)
    for flag in flags:
        yield from selections("decode", flag, decoder(flag), where, required=flag == "auto")


Select = Callable[[Case], tuple[torch.Tensor, str]]


def selections(step: str, name: str, select: Select, where: str, required: bool) -> Iterator[Row]:
    """Every case by one kernel; after the first exception it is asked no more."""
    for rows in scores.ROWS:
        for case in scores.cases(rows, where):
            try:
                chosen, kernel = select(case)
                wrong = scores.wrong(case, chosen)
            except Exception as why:  # RuntimeError is also how vLLM refuses a flag
                refused = "was requested, but" in str(why) or isinstance(why, ImportError)
                reason = f"{type(why).__name__}: {str(why).strip()[:300]}"
                yield Row(step, name, case.name, rows, ok=None if refused else False, required=required, reason=reason)
                if where != "cpu":
                    torch.cuda.synchronize()  # raises where the error has taken the GPU's context along
                return
            shown = name if name == kernel else f"{name}: {kernel}"
            yield Row(step, shown, case.name, rows, wrong, wrong == 0, required)


def decoder(flag: str) -> Select:
    """vLLM's own dispatcher with this flag."""

    def select(case: Case) -> tuple[torch.Tensor, str]:
        dispatcher = importlib.import_module("vllm.model_executor.layers.indexer_topk").SparseIndexerTopk(flag)
        rows, width = case.scores.shape
        chosen = torch.full((rows, K), -1, dtype=torch.int32, device=case.scores.device)
        with torch.inference_mode():
            dispatcher(case.scores, case.lengths[:, None], 1, chosen, K, width)
        return chosen, dispatcher.resolve_backend(case.scores, K, rows)

    return select


def prefill(case: Case) -> tuple[torch.Tensor, str]:
    import vllm._custom_ops  # noqa: F401 - registers the operators

    rows = len(case.lengths)
    chosen = torch.full((rows, K), -1, dtype=torch.int32, device=case.scores.device)
    torch.ops._C.top_k_per_row_prefill(
        case.scores, torch.zeros_like(case.lengths), case.lengths, chosen, rows, *case.scores.stride(), K
    )
    return chosen, "top_k_per_row_prefill"


def expansion(where: str) -> Iterator[Row]:
    """Pool ids to tokens: those of a top-k with holes, and garbage such as unwritten memory holds."""
    name = "expand_pools_and_append_tail"
    random = torch.Generator(where).manual_seed(3)
    for rows in scores.ROWS:
        lengths = torch.randint(1, 9000, (rows,), generator=random, device=where, dtype=torch.int32)
        clean = torch.rand(rows, 9000 // scores.POOL, generator=random, device=where).argsort(1)[:, :K]
        clean = torch.where(clean < (lengths // scores.POOL)[:, None], clean, -1)
        poisoned = clean.clone()
        for start, garbage in enumerate(GARBAGE):
            poisoned[:, start::7] = garbage
        for case, ids in (("pools in range and holes", clean), ("garbage ids", poisoned)):
            try:
                ops: Any = importlib.import_module(EXPANSION)
                found = ops.expand_pools_and_append_tail(ids, lengths, scores.POOL)
            except Exception as why:
                missing = isinstance(why, ModuleNotFoundError)
                yield Row("expansion", name, case, rows, ok=None if missing else False,
                          reason=f"{type(why).__name__}: {why}")  # fmt: skip
                continue
            wrong = int((found != scores.expanded(ids, lengths)).sum())
            yield Row("expansion", name, case, rows, wrong, wrong == 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import vllm  # noqa: F401 - arms the overlay

    rows = measure("cuda:0") if device.has_gpu() else measure("cpu", ("torch",))
    with options.out.open("w") as out:
        for row in rows:
            print(json.dumps(asdict(row)), file=out, flush=True)


if __name__ == "__main__":
    main()
