"""Batches for a built engine: requests with a written history, their index rows, and the dense answer in fp64."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

LATENT, HEAD, TOPK, WIDTH = 512, 256, 2048, 2176


@dataclass(frozen=True)
class Request:
    """`queries` tokens of a request that has `context` tokens in the cache already."""

    context: int
    queries: int

    @property
    def length(self) -> int:
        return self.context + self.queries


class Batch:
    """Requests on an engine's cache: random latents, blocks in random order, index rows as the indexer would fill them.

    Of contexts up to 2048 every position is selected. Of longer ones 2048 positions at random, the newest always among
    them, and up to 3 more at the end of the row, as the pools of 4 and their tail have it. A quarter of the columns of
    every row hold -1 in between.
    """

    def __init__(self, engine: Any, requests: Sequence[Request], seed: int, padding: int = 0) -> None:
        self.engine, self.requests, self.padding = engine, requests, padding
        self.random = torch.Generator().manual_seed(seed)
        layer = engine.attention_layers()[0]
        self.cache = layer.kv_cache
        self.block_size = self.cache.shape[1]
        self.tokens = sum(request.queries for request in requests)
        self.latents = [self.normal(request.length, LATENT) for request in requests]
        self._place_blocks()
        self.selections = [self._select(r.context + i + 1) for r in requests for i in range(r.queries)]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(torch.bfloat16)

    def _place_blocks(self) -> None:
        """Disjoint blocks in random order; block 0 is vLLM's null block."""
        widths = [-(-request.length // self.block_size) for request in self.requests]
        order = torch.randperm(self.cache.shape[0] - 1, generator=self.random)[: sum(widths)] + 1
        self.block_table = torch.zeros(len(widths), max(widths) + 2, dtype=torch.int32)
        for row, blocks in enumerate(order.split(widths)):
            self.block_table[row, : len(blocks)] = blocks

    def _select(self, length: int) -> torch.Tensor:
        if length <= TOPK:
            return torch.arange(length)
        tail = length % 4
        head = torch.randperm(length - tail - 1, generator=self.random)[: TOPK - 1]
        return torch.cat([head, torch.arange(length - tail - 1, length)])

    def index_rows(self) -> torch.Tensor:
        """[tokens + padding, 2176] int32 with holes of -1; padding rows hold -1 only."""
        rows = torch.full((self.tokens + self.padding, WIDTH), -1, dtype=torch.int32)
        for row, selection in zip(rows, self.selections, strict=False):
            columns = torch.randperm(min(WIDTH, max(len(selection) * 4 // 3, 1)), generator=self.random)
            columns = torch.arange(WIDTH) if len(selection) > len(columns) else columns
            row[columns[: len(selection)].sort().values] = selection.int()
        return rows

    def slots(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        blocks = self.block_table[request].long()[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def write_history(self, layer: Any) -> None:
        """Everything before this step's tokens, through the layer's own cache update."""
        for i, request in enumerate(self.requests):
            if request.context:
                self._write(layer, self.latents[i][: request.context], self.slots(i, torch.arange(request.context)))

    def _write(self, layer: Any, latents: torch.Tensor, slots: torch.Tensor) -> None:
        rope = latents.new_empty(len(latents), 1, 0)
        layer.impl.do_kv_cache_update(latents, rope, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)

    def step_latents(self) -> torch.Tensor:
        new = [latents[r.context :] for latents, r in zip(self.latents, self.requests, strict=True)]
        return torch.cat([*new, self.normal(self.padding, LATENT)])

    def step_slots(self) -> torch.Tensor:
        new = [self.slots(i, torch.arange(r.context, r.length)) for i, r in enumerate(self.requests)]
        return torch.cat([*new, torch.full((self.padding,), -1)])

    def metadata(self) -> Any:
        """From the engine's own metadata builder."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0] + [r.queries for r in self.requests]).cumsum(0).int()
        lengths = torch.tensor([r.length for r in self.requests], dtype=torch.int32)
        given = dict(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(self.requests),
            num_actual_tokens=self.tokens + self.padding,
            max_query_len=max(r.queries for r in self.requests),
            max_seq_len=int(lengths.max()),
            block_table_tensor=self.block_table,
            slot_mapping=self.step_slots(),
            seq_lens_cpu_upper_bound=lengths,
            is_prefilling=torch.tensor([r.queries > 1 for r in self.requests]),
        )
        known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
        common = CommonAttentionMetadata(**{name: value for name, value in given.items() if name in known})
        return self.engine.builder.build(0, common)

    def run(self, layer: Any, queries: torch.Tensor) -> torch.Tensor:
        """One real `MLAAttention.forward`: cache update, attention through our backend, up-projection."""
        from vllm.model_executor.layers.attention import mla_attention

        metadata = self.metadata()
        layer.impl.topk_indices_buffer[: self.tokens + self.padding] = self.index_rows()
        context = mock.Mock(
            attn_metadata={layer.layer_name: metadata}, slot_mapping={layer.layer_name: self.step_slots()}
        )
        latents = self.step_latents()
        with (
            mock.patch.object(mla_attention, "get_forward_context", lambda: context),
            mock.patch.object(layer, "use_direct_call", True),
        ):
            return layer(
                queries, latents, latents.new_empty(len(latents), 1, 0), (len(latents), layer.num_heads * HEAD)
            )

    def dense(self, layer: Any, queries: torch.Tensor) -> torch.Tensor:
        """Multi-head attention over the selected tokens with keys and values written out, in fp64."""
        heads = layer.num_heads
        weight = layer.kv_b_proj.weight.double().view(heads, 2 * HEAD, LATENT)
        answers, token = [], 0
        for latents, request in zip(self.latents, self.requests, strict=True):
            projected = torch.einsum("nl,hdl->hnd", self.stored(layer, latents).double(), weight)
            for _ in range(request.queries):
                keys, values = projected[:, self.selections[token]].split(HEAD, dim=-1)
                scores = torch.einsum("hd,hnd->hn", queries[token].double(), keys) * HEAD**-0.5
                answers.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), values).flatten())
                token += 1
        return torch.stack(answers)

    @staticmethod
    def stored(layer: Any, latents: torch.Tensor) -> torch.Tensor:
        """What the cache holds of these latents: themselves, or their e4m3 values times the layer's scale."""
        if not layer.kv_cache_dtype.startswith("fp8"):
            return latents
        scale = layer._k_scale.float()
        return (latents.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
