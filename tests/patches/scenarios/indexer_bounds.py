"""vLLM's real expansion kernel (interpreted) and real indexer function, stock and with the patch."""

import importlib
import importlib.util
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from overlay.patches.indexer_bounds import INDEXERS
from tests.patches import harness

POOL, TOPK, HEAD = 4, 2048, 128
GARBAGE = 1_000_000  # a pool id past every sequence here
STALE = 1  # a pool id that an earlier step left behind, in range of every sequence here


def case_of_the_kernel(ops: ModuleType) -> list[list[int]]:
    ids = torch.tensor([[0, 2, GARBAGE, -1], [5, -7, 0, 2147483]])
    return ops.expand_pools_and_append_tail(ids, torch.tensor([13, 9], dtype=torch.int32), POOL).tolist()


def random_case(ops: ModuleType) -> list[list[int]]:
    """12 rows of 512 ids, a third of them garbage on either side, lengths from 0 up; the seed is shared."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(0, 9000, (12,), generator=generator, dtype=torch.int32)
    lengths[:6] = torch.arange(6)
    ids = torch.randint(-1000, 4000, (12, TOPK // POOL), generator=generator)
    return ops.expand_pools_and_append_tail(ids, lengths, POOL).tolist()


def written_ids(pools: int) -> list[int]:
    """What the stand-in for the top-k kernel writes: half of the row, the newest pools first."""
    return list(range(pools - 1, pools - 1 - TOPK // POOL // 2, -1))


def indexer() -> ModuleType:
    return importlib.import_module(next(name for name in INDEXERS if importlib.util.find_spec(name)))


def run_indexer(module: ModuleType, lengths: list[int], decode: bool) -> list[list[int]]:
    """`sparse_attn_indexer_kpool` for one token per sequence length; what runs on a GPU only is stood in for.

    The memory that torch.empty gives is made to hold garbage and stale pool ids in turn.
    """
    rows = len(lengths)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    pools = seq_lens // POOL
    width = int(pools.max())

    def select(*arguments: object) -> None:
        chosen = next(a for a in arguments if getattr(a, "shape", ())[1:] == (TOPK // POOL,) and a.dtype == torch.int32)
        for row, count in enumerate(pools.tolist()):
            ids = written_ids(count)
            chosen[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)

    def dirty(*size: object, **kwargs: object) -> torch.Tensor:
        made = clean_empty(*size, **kwargs)
        if made.dtype == torch.int32:
            made.fill_(GARBAGE)
            made[..., ::2] = STALE
        return made

    chunk = SimpleNamespace(
        token_start=0, token_end=rows, cu_seqlen_ks=torch.zeros_like(pools), cu_seqlen_ke=pools, block_table=None,
        cu_seq_lens=None, local_cu_seq_lens=pools, total_seq_lens=width, local_total_seq_lens=width,
        max_local_total_seq_lens=width, max_seqlen_k=width, skip_kv_gather=True, num_reqs=rows,
    )  # fmt: skip
    phase = SimpleNamespace(
        chunks=[chunk], max_prefill_seq_len=max(lengths), row_shard_sizes=None, seq_lens=pools[:, None],
        decode_lens=torch.ones(rows, dtype=torch.int32), requires_padding=False, block_table=None,
        schedule_metadata=None, indices=None, per_req_decode_lens=None,
    )  # fmt: skip
    metadata = object.__new__(module.DeepseekV32IndexerMetadata)
    metadata.__dict__.update(
        slot_mapping=torch.full((rows,), -1), max_seq_len=max(lengths), num_decodes=rows * decode,
        num_decode_tokens=rows * decode, num_prefills=rows * (not decode), prefill=None if decode else phase,
        decode=phase if decode else None,
    )  # fmt: skip
    scores = torch.zeros(rows, width)
    workspace = SimpleNamespace(get_simultaneous=lambda *specs: [torch.zeros(shape).to(kind) for shape, kind in specs])
    stands_in = {
        "get_forward_context": lambda: SimpleNamespace(attn_metadata={"layer": metadata}),
        "current_workspace_manager": lambda: workspace,
        "fp8_fp4_mqa_logits": lambda *a, **k: scores,
        "fp8_fp4_paged_mqa_logits": lambda *a, **k: scores,
        "mqa_logits_mx_inputs": lambda values, scale, weights: (scale, weights),
        "get_indexer_topk": lambda backend: select,
    }
    deep_gemm = importlib.import_module("vllm.utils.deep_gemm")
    clean_empty = torch.empty
    buffer = torch.full((rows, TOPK + 128), -5, dtype=torch.int32)
    with (
        mock.patch.multiple(module, **{name: value for name, value in stands_in.items() if hasattr(module, name)}),
        mock.patch.multiple(deep_gemm, fp8_fp4_mqa_logits=lambda *a, **k: scores,
                            fp8_fp4_paged_mqa_logits=lambda *a, **k: scores),
        mock.patch.multiple(torch.ops._C, create=True, top_k_per_row_prefill=select, top_k_per_row_decode=select,
                            persistent_topk=select),
        mock.patch.object(torch, "empty", dirty),
    ):  # fmt: skip
        module.sparse_attn_indexer_kpool(
            torch.zeros(rows, 8), "layer", torch.zeros(2, 64, HEAD + 4, dtype=torch.uint8),
            torch.zeros(rows, 2, HEAD, dtype=torch.float8_e4m3fn), None, None, torch.zeros(rows, 2), 128, "ue8m0",
            TOPK, HEAD, width, width, buffer, skip_k_cache_insert=True, index_kpool=POOL, positions=seq_lens - 1,
        )  # fmt: skip
    return buffer.tolist()


def measure(ops: ModuleType, module: ModuleType) -> dict[str, object]:
    lengths = [2050, 4097, 9003]
    return {
        "case": case_of_the_kernel(ops),
        "random": random_case(ops),
        "prefill": run_indexer(module, lengths, decode=False),
        "decode": run_indexer(module, lengths, decode=True),
    }


def run() -> dict[str, object]:
    ops = importlib.import_module("vllm.models.glm5next.nvidia.ops.kpool_compress")
    module = indexer()
    wrapped = measure(ops, module)
    with harness.without("indexer_bounds"):
        stock = measure(ops, module)
    return {"wrapped": wrapped, "stock": stock, "again": case_of_the_kernel(ops)}
