"""Child process on vLLM 0.30: its real model classes, selector, planner and packed backend, with a rope of zeros.

The cache writer and FlashInfer's kernel are stood in for, with what they insist on: a rope of 64, 2048 columns.
"""

import importlib
import json
import tempfile
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.attention.batches import HEAD, LATENT, TOPK, Batch, Request
from tests.patches import harness

GROUP, ROW = 128, 656  # packed row: 512 e4m3, four fp32 scales of 128 each, 64 bf16 of rope


def pack(kv_c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, kv_cache_dtype: str,
         scale: torch.Tensor) -> None:  # fmt: skip
    """`concat_and_cache_mla` for fp8_ds_mla."""
    assert kv_cache_dtype == "fp8_ds_mla"
    if k_pe.shape[-1] != 64:
        raise RuntimeError("pe_dim must be 64 for fp8_ds_mla")
    rows, rope = kv_c[slots >= 0], k_pe[slots >= 0]
    groups = rows.float().unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1).clamp_min(1e-8) / 448
    packed = torch.cat([
        (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(1).view(torch.uint8),
        scales.contiguous().view(torch.uint8), rope.contiguous().view(torch.uint8),
    ], dim=1)  # fmt: skip
    slots = slots[slots >= 0]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = packed


def unpack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = rows[:, :LATENT].contiguous().view(torch.float8_e4m3fn).double().unflatten(1, (-1, GROUP))
    scales = rows[:, LATENT : LATENT + 16].contiguous().view(torch.float32).double()
    return (values * scales[..., None]).flatten(1), rows[:, LATENT + 16 :].contiguous().view(torch.bfloat16).double()


def kernel(query: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, out: torch.Tensor,
           bmm1_scale: float, sparse_mla_top_k: int, kv_lora_rank: int, qk_rope_head_dim: int,
           **more: Any) -> torch.Tensor:  # fmt: skip
    """FlashInfer's sparse kernel in fp64, for what it is compiled for."""
    assert (kv_lora_rank, qk_rope_head_dim, sparse_mla_top_k) == (512, 64, 2048), "no kernel is compiled for this"
    rows = kv_cache.reshape(-1, ROW)
    for token in range(query.shape[0]):
        chosen = block_tables[token, 0]
        latent, rope = unpack(rows[chosen[chosen >= 0].long()])
        scores = query[token, 0].double() @ torch.cat([latent, rope], 1).T * bmm1_scale
        out[token, 0] = (scores.softmax(-1) @ latent).to(out.dtype)
        assert (rope == 0).all()
    return out


def global_rows(req_id: torch.Tensor, block_table: torch.Tensor, indices: torch.Tensor, BLOCK_SIZE: int,
                NUM_TOPK_TOKENS: int, **more: Any) -> torch.Tensor:  # fmt: skip
    position = indices.long()
    blocks = block_table[req_id.long()].long().gather(1, position.clamp_min(0) // BLOCK_SIZE)
    return torch.where(position >= 0, blocks * BLOCK_SIZE + position % BLOCK_SIZE, -1).int()


class PackedBatch(Batch):
    """The history is written with a rope of zeros; index rows are laid out as the k-pool indexer does."""

    def _write(self, layer: Any, latents: torch.Tensor, slots: torch.Tensor) -> None:
        rope = latents.new_zeros(len(latents), 1, 64)
        layer.impl.do_kv_cache_update(latents, rope, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)

    def index_rows(self) -> torch.Tensor:
        """Columns 0 to 2047: history; from 2048: the incomplete last pool. Three of a long row's history give way."""
        rows = torch.full((self.tokens, 2176), -1, dtype=torch.int32)
        for i, selection in enumerate(self.selections):
            head, tail = selection[:TOPK], selection[TOPK:]
            rows[i, : len(head)], rows[i, TOPK : TOPK + len(tail)] = head.int(), tail.int()
            self.selections[i] = torch.cat([head[: len(head) - len(tail)], tail]) if len(tail) else head
        return rows

    @staticmethod
    def stored(layer: Any, latents: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(1, len(latents), ROW, dtype=torch.uint8)
        pack(latents, latents.new_zeros(len(latents), 64), cache, torch.arange(len(latents)), "fp8_ds_mla", None)
        return unpack(cache[0])[0]


BATCHES = {
    "prefill": [Request(0, 21), Request(0, 3)],
    "decode": [Request(0, 1), Request(2047, 1), Request(2050, 1), Request(4401, 1)],
    "mixed": [Request(2500, 1), Request(4340, 5)],
}


def build(folder: Path) -> Any:
    from tests.attention.engine import Engine

    return Engine(folder, "auto", heads=8, max_tokens=64)


def serve(folder: Path) -> dict[str, Any]:
    engine = build(folder)
    layer = engine.attention_layers()[0]
    spec = engine.specs[layer.layer_name]
    answer: dict[str, Any] = {
        "backend": layer.attn_backend.get_name(), "dtype": layer.kv_cache_dtype, "row": spec.state_content_size_bytes,
        "scale": layer.scale, "impl_scale": layer.impl.scale, "rope_of_the_model": engine.vllm_config.model_config
        .hf_text_config.qk_rope_head_dim, "projection": list(layer.kv_b_proj.weight.shape), "error": {},
    }  # fmt: skip
    for seed, (name, requests) in enumerate(BATCHES.items()):
        batch = PackedBatch(engine, requests, seed)
        batch.write_history(layer)
        queries = batch.normal(batch.tokens, layer.num_heads, HEAD)
        given = batch.run(layer, queries).double()
        expected = batch.dense(layer, queries)
        answer["error"][name] = float((given - expected).norm() / expected.norm())
    return answer


def stock(folder: Path) -> str:
    """What 0.30 itself says to the first token."""
    engine = build(folder)
    layer = engine.attention_layers()[0]
    batch = PackedBatch(engine, [Request(0, 4)], 0)
    try:
        batch.run(layer, batch.normal(4, layer.num_heads, HEAD))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def main() -> None:
    import vllm.platforms.cuda  # noqa: F401

    from tests.attention.standin import without_gpu

    ops = importlib.import_module("vllm._custom_ops")
    flashinfer = importlib.import_module("vllm.utils.flashinfer")
    sm120 = importlib.import_module("vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120")
    with (
        tempfile.TemporaryDirectory() as folder,
        without_gpu(),
        mock.patch.object(ops, "concat_and_cache_mla", pack),
        mock.patch.object(flashinfer, "flashinfer_trtllm_batch_decode_with_kv_cache_mla", kernel),
        mock.patch.object(flashinfer, "has_flashinfer_sparse_mla_sm120", lambda: True),
        mock.patch.object(sm120, "triton_convert_req_index_to_global_index", global_rows),
        mock.patch.object(sm120, "_get_workspace_buffer", lambda device: torch.empty(1, dtype=torch.uint8)),
    ):
        try:
            answers = {"wrapped": serve(Path(folder) / "wrapped")}
            with harness.without("rope_pad"):
                answers["stock"] = stock(Path(folder) / "stock")
        except Exception:
            answers = {"failed": traceback.format_exc()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
