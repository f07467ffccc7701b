"""Every sparse-MLA backend that the engine could choose on this GPU against the fp64 reference.

    python -m overlay.probe.attention --out FILE [--heads N]     `python -m overlay probe attention` runs and reads it

A row is one JSON object, a line of FILE: what was measured before a crash or a hang stays. Each backend serves a real
`MLAAttention` layer: vLLM's cache writer fills its cache, its own builder plans the batch, its implementation answers.
Without a GPU, vLLM is asked what it would offer, and nothing runs.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from overlay.attention import choice
from overlay.checkpoint import tiny_config
from overlay.kernel.reference import sparse_mla_reference
from overlay.probe import batches, device
from overlay.probe.batches import BLOCK, BLOCK_STRIDE, BLOCKS, K_SCALE, LATENT, SCALE, WIDTH, Batch

KV_CACHE_DTYPES = ("bfloat16", "fp8", "fp8_ds_mla")
HEAD = 256
# Least cosine and largest deviation of the magnitude of the worst token and head. A kernel rounds the softmax's weights
# to 16 bit; vLLM's own for fp8 rows may round queries and weights to fp8 as well: FlashInfer's FA3 kernel comes out up
# to 1.3 % too small (H200).
LIMITS_16_BIT, LIMITS_FP8 = (0.9999, 0.01), (0.99, 0.03)
OURS = choice.BACKEND_NAME
# Backends of other platforms, and those that models of other attention geometry name by themselves.
FOREIGN = ("ROCM_", "XPU_", "_DSV4")


@dataclass(frozen=True)
class Row:
    """One batch, or with `ok` None the reason why a backend is not to be had for this dtype.

    `required` is False for index rows that the indexer does not write, of vLLM's own backends: some count on the first
    `n` entries being valid. The overlay's is held to all of them.
    """

    backend: str
    kv_cache_dtype: str
    index_rows: str = ""
    tokens: int = 0
    cosine: float | None = None
    magnitude: float | None = None
    ok: bool | None = None
    required: bool = True
    reason: str = ""


class Unavailable(Exception):
    """vLLM does not give this backend to this model here."""


def measure(heads: int, where: str, sizes: tuple[int, ...] = batches.SIZES) -> Iterator[Row]:
    """All rows, on the device `where`, backend by backend; one that breaks the GPU takes those after it along."""
    device.start(where)
    with tempfile.TemporaryDirectory() as folder:
        configs = {dtype: engine_config(Path(folder), heads, dtype, max(sizes)) for dtype in KV_CACHE_DTYPES}
        for name, backend in candidates(configs.values(), heads):
            for kv_cache_dtype, config in configs.items():
                try:
                    refuse(backend, config, kv_cache_dtype)
                    driven = Driven(name, backend, config, heads, kv_cache_dtype, where)
                except Exception as why:
                    yield Row(name, kv_cache_dtype, ok=refusal(why), reason=said(why))
                else:
                    yield from answers(driven, kv_cache_dtype, where, sizes)


def answers(driven: "Driven", kv_cache_dtype: str, where: str, sizes: tuple[int, ...]) -> Iterator[Row]:
    """Every batch by one backend; after an exception it is asked no more."""
    for tokens in sizes:
        for kind in batches.KINDS:
            required = driven.name == OURS or kind == batches.KINDS[0]
            case = dict(backend=driven.name, kv_cache_dtype=kv_cache_dtype, index_rows=kind, tokens=tokens)
            batch = batches.make(tokens, kind, driven.heads, where)
            wanted, _ = sparse_mla_reference(batch.queries, driven.rows, batch.rows, SCALE)
            try:
                found = batches.compare(driven.attend(batch), wanted)
            except Exception as why:
                yield Row(**case, ok=False, required=required, reason=said(why))
                return
            fault = found.fault(limits(driven.name, kv_cache_dtype))
            yield Row(
                **case,
                cosine=found.cosine,
                magnitude=found.magnitude,
                ok=not fault,
                required=required,
                reason=fault,
            )


def limits(backend: str, kv_cache_dtype: str) -> tuple[float, float]:
    """Of the cosine and of the magnitude. The overlay's kernel rounds nothing to fp8, whatever its rows."""
    return LIMITS_16_BIT if backend == OURS or kv_cache_dtype == "bfloat16" else LIMITS_FP8


def refusal(why: Exception) -> bool | None:
    """A backend that vLLM refuses is not to be had; one that it offers and that cannot be built is wrong."""
    return None if isinstance(why, (Unavailable, ImportError)) else False


def said(why: Exception) -> str:
    return str(why) if isinstance(why, Unavailable) else f"{type(why).__name__}: {str(why).strip()[:300]}"


def engine_config(folder: Path, heads: int, kv_cache_dtype: str, tokens: int) -> Any:
    """The configuration of an engine that serves a tiny model of this geometry with batches of up to `tokens`."""
    from vllm.config import CacheConfig, CompilationConfig, ModelConfig, SchedulerConfig, VllmConfig

    (folder / "config.json").write_text(json.dumps(tiny_config.model_config(tiny_config.TinyModel(heads=heads))))
    length = 2 * batches.LONGEST
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length, enforce_eager=True
    )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(cache_dtype=kv_cache_dtype),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=max(tokens, length), max_num_seqs=tokens, max_model_len=length,
            is_encoder_decoder=False,
        ),
        compilation_config=CompilationConfig(mode=0, cudagraph_mode="NONE"),
    )  # fmt: skip


def candidates(configs: Iterable[Any], heads: int) -> Iterator[tuple[str, Any]]:
    """The overlay's backend, those that vLLM would try in its order, and every other that a flag could name."""
    from vllm.platforms import cuda, current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from overlay.attention.backend import SparseMLABackend

    yield OURS, SparseMLABackend
    tried = [
        member
        for config in configs
        for member in cuda._get_backend_priorities(
            use_mla=True,
            device_capability=current_platform.get_device_capability(),
            num_heads=heads,
            kv_cache_dtype=config.cache_config.cache_dtype,
            head_size=LATENT,
        )
    ]
    for member in dict.fromkeys([*tried, *AttentionBackendEnum]):
        if "MLA_SPARSE" in member.name and not any(part in member.name for part in FOREIGN):
            yield member.name, member


def refuse(backend: Any, config: Any, kv_cache_dtype: str) -> None:
    """Raise Unavailable with vLLM's own reasons where its selector would not take this backend."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    asked = AttentionSelectorConfig(
        LATENT, torch.bfloat16, kv_cache_dtype, block_size=None, use_mla=True, use_sparse=True
    )
    with set_current_vllm_config(config):
        reasons = class_of(backend).validate_configuration(
            device_capability=current_platform.get_device_capability(), **asked._asdict()
        )
    if reasons:
        raise Unavailable("; ".join(dict.fromkeys(reasons)))


def class_of(backend: Any) -> Any:
    """A registry's member is resolved, which may fail to import."""
    return backend if isinstance(backend, type) else backend.get_class()


class Driven:
    """A real layer served by one backend, with its cache written and its metadata builder at hand."""

    def __init__(self, name: str, backend: Any, config: Any, heads: int, kv_cache_dtype: str, where: str) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention
        from vllm.model_executor.layers.linear import ColumnParallelLinear

        self.name, self.config, self.heads = name, config, heads
        backend = class_of(backend)
        with set_current_vllm_config(config), torch.device(where), device.bf16():
            tokens = config.scheduler_config.max_num_batched_tokens
            self.index_rows = torch.full((tokens, WIDTH), -1, dtype=torch.int32)
            up = ColumnParallelLinear(LATENT, heads * 2 * HEAD, bias=False)
            up.weight.data.zero_()  # vLLM splits it after loading; nothing here uses it
            self.layer = MLAAttention(
                heads, SCALE, HEAD, 0, HEAD, 2 * HEAD, LATENT, up,
                cache_config=config.cache_config, prefix=f"{name}.attn", attn_backend=backend, use_sparse=True,
                topk_indices_buffer=self.index_rows,
            )  # fmt: skip
            if self.layer.kv_cache_dtype != kv_cache_dtype:
                config.cache_config.cache_dtype = kv_cache_dtype
                raise Unavailable(f"vLLM stores {self.layer.kv_cache_dtype} where {kv_cache_dtype} is asked for")
            self.layer.process_weights_after_loading(torch.bfloat16)
        with set_current_vllm_config(config):  # and no default device: builders keep buffers on the host beside others
            spec = backend.customize_spec(self.layer.get_kv_cache_spec(config))
            spec = dataclasses.replace(spec, block_size=BLOCK)
            self.builder = backend.get_builder_cls()(spec, [self.layer.layer_name], config, torch.device(where))
        self.cache = cache(spec, where)
        self.write()
        self.rows = self.read()

    def write(self) -> None:
        """Fill every block by vLLM's own cache writer."""
        rows = batches.latents(self.cache.device)
        if self.layer.kv_cache_dtype == "fp8":
            self.layer._k_scale.fill_(K_SCALE)
            self.layer._k_scale_float = K_SCALE
        slots = torch.arange(BLOCKS * BLOCK, device=rows.device)
        no_rope = rows.new_empty(len(rows), 1, 0)
        self.layer.impl.do_kv_cache_update(
            rows, no_rope, self.cache, slots, self.layer.kv_cache_dtype, self.layer._k_scale
        )

    def read(self) -> torch.Tensor:
        """The latent rows that attention reads, fp32 [BLOCKS * BLOCK, 512]: what the format makes of those written."""
        if self.layer.kv_cache_dtype == "fp8_ds_mla":  # its writer chooses the scales
            return batches.unpacked(self.cache.reshape(BLOCKS * BLOCK, -1))
        return batches.stored(batches.latents(self.cache.device), self.layer.kv_cache_dtype)

    def attend(self, batch: Batch) -> torch.Tensor:
        """The implementation's output for a batch, [T, heads, 512], as `MLAAttention.forward_impl` would ask for it."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        tokens, layer = len(batch.lengths), self.layer
        self.index_rows[:tokens] = batch.index_rows
        quantised = layer.kv_cache_dtype != "bfloat16"
        rows = self.cache.view(torch.float8_e4m3fn) if layer.kv_cache_dtype == "fp8" else self.cache
        queries: Any = (batch.queries, batch.queries.new_empty(tokens, self.heads, 0))
        with torch.inference_mode(), set_current_vllm_config(self.config):
            metadata = self.builder.build(0, common_metadata(batch))
            with set_forward_context({layer.layer_name: metadata}, self.config, num_tokens=tokens):
                if quantised and layer.impl.supports_quant_query_input:
                    queries = layer._decode_concat_quant_fp8_op(*queries, layer._q_scale)
                found, _ = layer.impl.forward_mqa(queries, rows, metadata, layer)
        if found.is_cuda:
            torch.cuda.synchronize()
        return found[:tokens].reshape(tokens, self.heads, LATENT)


def cache(spec: Any, where: str) -> torch.Tensor:
    """[blocks, BLOCK, row], its blocks BLOCK_STRIDE rows apart; every byte is NaN until it is written."""
    size = spec.state_content_size_bytes
    raw = torch.full((BLOCKS * BLOCK_STRIDE * size,), 0xFF, dtype=torch.uint8, device=where)
    flat = raw.view(spec.dtype)
    width = size // flat.element_size()
    return flat.as_strided((BLOCKS, BLOCK, width), (BLOCK_STRIDE * width, width, 1))


def common_metadata(batch: Batch) -> Any:
    """What the model runner would say of a batch of decodes."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    tokens, where = len(batch.lengths), batch.lengths.device
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    given = dict(
        query_start_loc=starts.to(where),
        query_start_loc_cpu=starts,
        seq_lens=batch.lengths,
        num_reqs=tokens,
        num_actual_tokens=tokens,
        max_query_len=1,
        max_seq_len=batches.LONGEST,
        block_table_tensor=batch.block_table,
        slot_mapping=torch.full((tokens,), -1, device=where),
        seq_lens_cpu_upper_bound=batch.lengths.cpu(),
        is_prefilling=torch.zeros(tokens, dtype=torch.bool),
    )
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{name: value for name, value in given.items() if name in known})


def offered(heads: int) -> Iterator[Row]:
    """Without a GPU: the reasons of those that vLLM would refuse, and of the others that nothing was run."""
    with tempfile.TemporaryDirectory() as folder:
        configs = {dtype: engine_config(Path(folder), heads, dtype, 1) for dtype in KV_CACHE_DTYPES}
        for name, backend in candidates(configs.values(), heads):
            for kv_cache_dtype, config in configs.items():
                try:
                    refuse(backend, config, kv_cache_dtype)
                    reason = "vLLM offers it; no GPU here to run it"
                except Exception as why:
                    reason = said(why)
                yield Row(name, kv_cache_dtype, reason=reason)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", type=int, default=16)
    options = parser.parse_args()
    import vllm  # noqa: F401 - arms the overlay
    from vllm.platforms import current_platform

    if device.has_gpu():
        capability = current_platform.get_device_capability()
        choice.opened.add((capability.major, capability.minor))  # ours is measured wherever it can be compiled
        rows = measure(options.heads, "cuda:0")
    else:
        rows = offered(options.heads)
    with options.out.open("w") as out:
        for row in rows:
            print(json.dumps(asdict(row)), file=out, flush=True)


if __name__ == "__main__":
    main()
