"""vLLM's real variable table and chunking: the scores of a 231K-token prefill, its last chunk of 4608 queries."""

import importlib
import os
from typing import Any

import torch

from overlay.patches.indexer_workspace import ENVS, NAME
from tests.patches import harness


def largest_scores_mib() -> float:
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    split = getattr(indexer, "split_indexer_prefill_chunks", None)  # 0.27.1; a static method of the builder later
    split = split or indexer.DeepseekV32IndexerMetadataBuilder._split_indexer_prefill_chunks
    pools, queries = 231_000 // 4, 4608
    budget = importlib.import_module(ENVS).VLLM_SPARSE_INDEXER_MAX_LOGITS_MB * 1024 * 1024
    chunks = split(torch.tensor([pools]), torch.tensor([queries]), 1 << 30, budget)
    assert sum(part.stop - part.start for _, part in chunks) == queries
    return max(part.stop - part.start for _, part in chunks) * pools * 4 / 2**20


def measure() -> dict[str, Any]:
    envs = importlib.import_module(ENVS)
    answer = {"default": envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, "scores": largest_scores_mib()}
    os.environ[NAME] = "300"
    answer["set by the user"] = envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
    del os.environ[NAME]
    return answer


def run() -> dict[str, Any]:
    wrapped = measure()
    with harness.without("indexer_workspace"):
        return {"wrapped": wrapped, "stock": measure(), "environment": NAME in os.environ}
