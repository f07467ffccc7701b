"""Single behaviours of the implementation on a built engine: padding, bad indices, scratch, memory, several ranks."""

from typing import Any
from unittest import mock

import torch

from tests.attention.batches import HEAD, LATENT, WIDTH, Batch, Request


def all_of_them(engine: Any) -> dict:
    return {
        "padding": padding(engine),
        "masked": masked(engine),
        "bad_indices": bad_indices(engine),
        "foreign_rows": foreign_rows(engine),
        "scratch": scratch(engine),
        "memory": memory(engine),
        "ranks": ranks(engine),
        "layouts": layouts(),
        "draft_update": draft_update(engine),
        "refusals": refusals(engine),
    }


def step(engine: Any, requests: list[Request], seed: int, padding: int = 0) -> tuple[Any, Batch, torch.Tensor]:
    layer = engine.attention_layers()[-1]
    batch = Batch(engine, requests, seed, padding)
    batch.write_history(layer)
    return layer, batch, batch.normal(batch.tokens + padding, layer.num_heads, HEAD)


def padding(engine: Any) -> dict:
    """Rows that a CUDA graph adds: exact zeros where their index rows are -1, and the others as without them."""
    requests = [Request(700, 1), Request(2100, 1)]
    layer, batch, queries = step(engine, requests, seed=11, padding=3)
    answer = batch.run(layer, queries)
    expected = batch.dense(layer, queries)
    return {
        "zeros": bool((answer[batch.tokens :] == 0).all()),
        "error": float((answer[: batch.tokens].double() - expected).norm() / expected.norm()),
    }


def masked(engine: Any) -> dict:
    """A live token without a single valid index."""
    layer, batch, queries = step(engine, [Request(40, 2)], seed=12)
    whole = batch.run(layer, queries)
    batch.selections[0] = torch.empty(0, dtype=torch.long)
    answer = batch.run(layer, queries)
    return {"zeros": bool((answer[0] == 0).all()), "other": bool(torch.equal(answer[1], whole[1]))}


def bad_indices(engine: Any) -> dict:
    """Positions at and beyond the sequence's end, and far beyond the block table, count for nothing."""
    layer, batch, queries = step(engine, [Request(300, 1), Request(60, 2)], seed=13)
    clean = batch.run(layer, queries)
    rows = batch.index_rows()
    holes = (rows == -1).nonzero()
    lengths = torch.tensor([301, 62, 62], dtype=torch.int32)
    rubbish = torch.stack([lengths, lengths + 5, lengths * 0 + 2**31 - 1, lengths * 0 - 7], dim=1)
    for k, (row, column) in enumerate(holes.tolist()[:: len(holes) // 97]):
        rows[row, column] = rubbish[row, k % 4]
    with mock.patch.object(Batch, "index_rows", lambda self: rows):
        return {"unchanged": bool(torch.equal(batch.run(layer, queries), clean)), "planted": int((rows > 62).sum())}


def foreign_rows(engine: Any) -> dict:
    """Whatever lies in other blocks, between the blocks and in unwritten slots is never part of an answer."""
    layer, batch, queries = step(engine, [Request(500, 2), Request(4400, 1)], seed=14)
    clean = batch.run(layer, queries)
    cache = layer.kv_cache
    storage = torch.empty(0, dtype=cache.dtype).set_(cache.untyped_storage())
    kept = {}
    for i, request in enumerate(batch.requests):
        kept[i] = batch.slots(i, torch.arange(request.context))
    saved = [cache[s // batch.block_size, s % batch.block_size].clone() for s in kept.values()]
    storage.fill_(float("nan"))
    for slots, rows in zip(kept.values(), saved, strict=True):
        cache[slots // batch.block_size, slots % batch.block_size] = rows
    answer = batch.run(layer, queries)
    storage.zero_()
    return {"unchanged": bool(torch.equal(answer, clean)), "strided": cache.stride(0) > cache.shape[1] * LATENT}


def scratch(engine: Any) -> dict:
    """One scratch for all layers, at one address, of its full size from the profile run on."""
    from vllm.v1.worker.workspace import current_workspace_manager

    first, last = engine.attention_layers()[0], engine.attention_layers()[-1]
    manager = current_workspace_manager()
    profile_output = torch.full((4, first.num_heads * HEAD), 9.0, dtype=torch.bfloat16)
    query, latents = torch.zeros(4, first.num_heads, HEAD, dtype=torch.bfloat16), torch.zeros(4, LATENT)
    with mock.patch.object(first, "_chunked_prefill_workspace_size", 1):
        first.forward_impl(query, latents, latents[:, None, :0], torch.empty(0), None, profile_output)
    reserved = manager._current_workspaces[0]
    manager.lock()
    addresses = set()
    for layer, requests in [
        (first, [Request(5, 1)]),
        (last, [Request(0, engine.max_tokens)]),
        (first, [Request(9, 4)]),
    ]:
        batch = Batch(engine, requests, seed=15)
        batch.write_history(layer)
        batch.run(layer, batch.normal(batch.tokens, layer.num_heads, HEAD))
        call = layer.impl.kernel.calls[-1]
        addresses.add((call["indices"].data_ptr(), call["workspace"].data_ptr()))
    manager.unlock()
    (index_address, workspace_address), *others = addresses
    return {
        "bytes": reserved.numel(),
        "index_bytes": engine.max_tokens * WIDTH * 4,
        "kernel_bytes": first.impl.kernel.workspace_bytes(engine.max_tokens, WIDTH),
        "addresses": 1 + len(others),
        "inside": reserved.data_ptr() <= index_address < workspace_address < reserved.data_ptr() + reserved.numel(),
        "profile_zeroed": bool((profile_output == 0).all()),
    }


def memory(engine: Any) -> dict:
    """Bytes that vLLM's base class sets aside for paths this backend never takes, by its own code, and what is left."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention.sparse_mla_attention import (
        SparseMLACommonImpl,
        SparseMLACommonMetadataBuilder,
    )

    layer = engine.attention_layers()[0]
    arguments = dict(
        num_heads=layer.num_heads,
        head_size=LATENT,
        scale=layer.scale,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="bfloat16",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=512,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=HEAD,
        qk_rope_head_dim=0,
        qk_head_dim=HEAD,
        v_head_dim=HEAD,
        kv_b_proj=layer.kv_b_proj,
        indexer=layer.indexer,
        topk_indices_buffer=layer.impl.topk_indices_buffer,
    )
    streams = mock.patch("torch.Stream", mock.MagicMock()), mock.patch("torch.Event", mock.MagicMock())
    with set_current_vllm_config(engine.vllm_config), streams[0], streams[1]:
        stock = type("Stock", (SparseMLACommonImpl,), {"forward_mqa": None})(**arguments)
    group = stock.index_group
    rows = SparseMLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(engine.vllm_config)
    workspace = engine.builder.chunked_prefill_workspace
    return {
        "stock_index_bytes_per_layer": group.physical_topk_indices.nbytes + group.valid_topk_counts.nbytes,
        "our_index_group": layer.impl.index_group is not None,
        "stock_context_bytes": rows * LATENT * 2,
        "our_context_bytes": workspace.nbytes,
    }


def ranks(engine: Any) -> dict:
    """Decode context parallelism: two ranks' partial results, merged by their LSE, are the single rank's result."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backend import AttentionImplBase

    layer, batch, _ = step(engine, [Request(0, 1), Request(37, 2), Request(2600, 1)], seed=16)
    query = batch.normal(batch.tokens, 2 * layer.num_heads, LATENT)
    interleave, size = 4, 2
    parts, shapes = [], []
    for rank in range(size):

        def with_ranks(cls, *args, rank=rank, **kwargs):
            self = object.__new__(cls)
            self.dcp_world_size, self.dcp_rank = size, rank
            self.need_to_return_lse_for_decode = cls.can_return_lse_for_decode
            return self

        with set_current_vllm_config(engine.vllm_config), mock.patch.object(AttentionImplBase, "__new__", with_ranks):
            impl = type(layer.impl)(**_arguments(layer))
        impl.process_weights_after_loading(torch.bfloat16)
        layer.kv_cache.zero_()
        for i, request in enumerate(batch.requests):
            positions = torch.arange(request.length)
            mine = positions // interleave % size == rank
            local = positions // (size * interleave) * interleave + positions % interleave
            batch._write(layer, batch.latents[i][mine], batch.slots(i, local[mine]))
        impl.topk_indices_buffer[: batch.tokens] = batch.index_rows()
        with mock.patch.object(engine.builder, "cp_kv_cache_interleave_size", interleave):
            metadata = batch.metadata()
        out, lse = impl.forward_mqa(query, layer.kv_cache, metadata, layer)
        parts.append((out.double(), lse.double()))
        shapes.append([list(out.shape), list(lse.shape), str(lse.dtype)])
    (out0, lse0), (out1, lse1) = parts
    total = torch.logaddexp(lse0, lse1)
    merged = out0 * (lse0 - total).exp()[..., None] + out1 * (lse1 - total).exp()[..., None]
    expected = []
    for token, selection in enumerate(batch.selections):
        request = [0, 1, 1, 2][token]
        rows = batch.latents[request][selection].double()
        scores = query[token].double() @ rows.T * layer.scale
        expected.append(scores.softmax(-1) @ rows)
    expected = torch.stack(expected)
    return {
        "error": float((merged - expected).norm() / expected.norm()),
        "shapes": shapes,
        "heads": impl.kernel_heads,
        # The first request has one token, which rank 0 owns.
        "empty_lse": bool((lse1[0] == -torch.inf).all()),
        "empty_out": bool((out1[0] == 0).all()),
    }


def _arguments(layer: Any) -> dict:
    return dict(
        num_heads=layer.num_heads,
        head_size=LATENT,
        scale=layer.scale,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype=layer.kv_cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=512,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=HEAD,
        qk_rope_head_dim=0,
        qk_head_dim=HEAD,
        v_head_dim=HEAD,
        kv_b_proj=layer.kv_b_proj,
        indexer=layer.indexer,
        topk_indices_buffer=layer.impl.topk_indices_buffer,
    )


def draft_update(engine: Any) -> dict:
    """A captured draft remakes the token-to-request map in place, where the release has a kernel for it."""
    from overlay.attention import compat

    if compat.compute_token_to_req_indices is None:
        return {"declared": engine.builder.supports_draft_decode_metadata_update, "possible": False}

    def on_host(query_start_loc: torch.Tensor, out: torch.Tensor, mapped: int, tokens: int) -> torch.Tensor:
        out[:tokens] = torch.searchsorted(query_start_loc[1:], torch.arange(tokens), right=True).int()
        return out[:tokens]

    batch = Batch(engine, [Request(8, 1), Request(70, 1), Request(3, 1)], seed=17)
    metadata = batch.metadata()
    address = metadata.req_id_per_token.data_ptr()
    metadata.req_id_per_token.fill_(-9)
    with mock.patch.object(compat, "compute_token_to_req_indices", on_host):
        engine.builder.update_draft_decode_metadata(metadata)
    return {
        "declared": engine.builder.supports_draft_decode_metadata_update,
        "possible": True,
        "map": metadata.req_id_per_token.tolist(),
        "in_place": metadata.req_id_per_token.data_ptr() == address,
    }


def layouts() -> dict:
    """Views of caches of several layouts: (rows, block size, stride in rows), or the error."""
    from overlay.attention.impl import row_view

    def seen(cache: torch.Tensor) -> list | str:
        try:
            rows, block_size, block_stride = row_view(cache)
        except RuntimeError as error:
            return str(error)
        return [rows.shape[0], block_size, block_stride, rows.data_ptr() - cache.data_ptr()]

    pool = torch.empty(100 * LATENT + 64)
    return {
        "contiguous": seen(pool[: 64 * LATENT].view(4, 16, LATENT)),
        "strided": seen(pool[LATENT:].as_strided((3, 16, LATENT), (20 * LATENT, LATENT, 1))),
        "part of a row": seen(pool.as_strided((3, 16, LATENT), (16 * LATENT + 16, LATENT, 1))),
        "padded rows": seen(pool.as_strided((3, 16, LATENT), (20 * 520, 520, 1))),
        "576": seen(torch.empty(4, 16, 576)),
    }


def refusals(engine: Any) -> dict:
    from vllm.config import set_current_vllm_config

    layer = engine.attention_layers()[0]
    seen = {}
    for name, change in {
        "sliding window": {"sliding_window": 128},
        "soft cap": {"logits_soft_cap": 30.0},
        "encoder": {"attn_type": "encoder"},
        "packed rows": {"kv_cache_dtype": "fp8_ds_mla"},
        "shared cache": {"kv_sharing_target_layer_name": "model.layers.3"},
    }.items():
        try:
            with set_current_vllm_config(engine.vllm_config):
                type(layer.impl)(**{**_arguments(layer), **change})
        except NotImplementedError as error:
            seen[name] = str(error)
    return seen
