"""vLLM's real dispatcher: what it resolves to and which operator it calls; 0.30's indexer: which operator it calls."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from overlay.patches.indexer_topk import DISPATCHER, INDEXER_030
from tests.patches import harness

OPERATORS = ("persistent_topk", "top_k_per_row_decode", "cooperative_topk")


def called(run: Any) -> list[dict[str, Any]]:
    """Which of the operators a function calls, with the arguments that are not tensors."""
    log: list[dict[str, Any]] = []

    def recorder(name: str) -> Any:
        def operator(*args: Any) -> None:
            log.append({"name": name, "numbers": [a for a in args if isinstance(a, int)]})

        return operator

    workspace = SimpleNamespace(get_simultaneous=lambda *specs: [torch.empty(1, dtype=torch.uint8) for _ in specs])
    module = importlib.import_module(DISPATCHER)
    with (
        mock.patch.multiple(torch.ops._C, create=True, **{name: recorder(name) for name in OPERATORS}),
        mock.patch.object(module, "current_workspace_manager", lambda: workspace),
    ):
        run()
    return log


def dispatch(backend: str, rows: int, requests: int, k: int = 512) -> dict[str, Any]:
    module = importlib.import_module(DISPATCHER)
    chooser = module.SparseIndexerTopk(backend)
    logits = torch.zeros(rows, 65536)
    lengths = torch.full((requests, rows // requests), 65000, dtype=torch.int32)
    out = torch.empty(rows, k, dtype=torch.int32)
    return {
        "resolved": chooser.resolve_backend(logits, k, rows),
        "called": called(lambda: chooser(logits, lengths, rows // requests, out, k, 260000)),
    }


def measure() -> dict[str, Any]:
    return {
        "auto, 1 row": dispatch("auto", 1, 1),
        "auto, 33 rows": dispatch("auto", 33, 33),
        "auto, 4 drafts": dispatch("auto", 8, 2),
        "persistent": dispatch("persistent", 33, 33),
        "auto, k 256": dispatch("auto", 33, 33, k=256),
    }


def indexer_030() -> list[dict[str, Any]] | None:
    """The operator call of 0.30's own indexer module, as that module looks it up; None in other releases."""
    if importlib.util.find_spec(INDEXER_030) is None:
        return None
    importlib.import_module("vllm.models.glm5next")  # first: the two import each other
    module = importlib.import_module(INDEXER_030)
    logits, lengths = torch.zeros(8, 4096), torch.zeros(2, 4, dtype=torch.int32)
    out, workspace = torch.empty(8, 512, dtype=torch.int32), torch.empty(1, dtype=torch.uint8)
    return called(lambda: module.torch.ops._C.persistent_topk(logits, lengths, out, workspace, 512, 16384))


@contextmanager
def on_another_card() -> Iterator[None]:
    """vLLM's platform sees a GPU of 8.6: the overlay was armed for the 12.1 beside it."""
    from vllm.platforms import current_platform

    forget = type(current_platform).get_device_capability.cache_clear
    before, os.environ["OVERLAY_REHEARSAL_CAPABILITY"] = os.environ["OVERLAY_REHEARSAL_CAPABILITY"], "8.6"
    forget()
    try:
        yield
    finally:
        os.environ["OVERLAY_REHEARSAL_CAPABILITY"] = before
        forget()


def run() -> dict[str, Any]:
    wrapped, wrapped_030 = measure(), indexer_030()
    with on_another_card():
        other, other_030 = measure(), indexer_030()
        harness.entry("indexer_topk").context.wanted = True
        tested = measure()
        harness.entry("indexer_topk").context.wanted = "auto"
    with harness.without("indexer_topk"):
        return {
            "wrapped": wrapped,
            "another card": other,
            "another card, true": tested,
            "0.30 another card": other_030,
            "stock": measure(),
            "0.30 wrapped": wrapped_030,
            "0.30 stock": indexer_030(),
        }
