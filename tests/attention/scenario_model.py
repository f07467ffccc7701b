"""Child process: the real Glm5Next classes with our backend on CPU tensors. Prints one JSON object of what was seen.

The kernels are replaced by their fp64 references (`standin`); the answers are compared with dense multi-head attention
over the selected tokens, keys and values written out.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.attention.batches import HEAD, Batch, Request


def full_linear_attention(layers: int) -> dict:
    """The state of 64 linear-attention heads is what makes the full-size model's blocks as large as they are."""
    sparse = list(range(3, layers, 4))
    return {
        "linear_attn_config": {
            "num_heads": 64,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [i for i in range(layers) if i not in sparse],
            "full_attn_layers": sparse,
        }
    }


BATCHES = {
    "prefill": [Request(0, 21), Request(0, 3), Request(0, 1)],
    "decode": [Request(0, 1), Request(63, 1), Request(2047, 1), Request(2048, 1), Request(4400, 1)],
    "speculative": [Request(10, 3), Request(2050, 3), Request(1279, 3)],
    "mixed": [Request(2500, 1), Request(99, 1), Request(4340, 20), Request(0, 9)],
}


def relative_error(answer: torch.Tensor, expected: torch.Tensor) -> float:
    return float((answer.double() - expected).norm() / expected.norm())


def planned(engine: Any) -> dict:
    """What vLLM's planner made of the backend's declarations."""
    layer = engine.attention_layers()[0]
    spec = engine.specs[layer.layer_name]
    cache = layer.kv_cache
    return {
        "backend": layer.get_attn_backend().get_name(),
        "prefill_backend": layer.prefill_backend is not None,
        "layer_dtype": layer.kv_cache_dtype,
        "config_dtype": engine.vllm_config.cache_config.cache_dtype,
        "head_size": spec.head_size,
        "row_bytes": spec.state_content_size_bytes,
        "block_size": cache.shape[1],
        "planned_block_size": spec.block_size,
        "width": cache.shape[2],
        "strides": list(cache.stride()),
        "offset": cache.storage_offset(),
        "cache_dtype": str(cache.dtype),
        "layout": engine.layout.name,
        "graph_support": type(engine.builder).get_cudagraph_support(engine.vllm_config, spec).name,
        "group": sorted(engine.group.layer_names),
        "kv_groups": sorted(sorted(group.layer_names) for group in engine.kv_config.kv_cache_groups),
        "reorder_threshold": engine.builder.reorder_batch_threshold,
        "chunked_prefill_rows": engine.builder.chunked_prefill_workspace.shape[0],
    }


def forwards(engine: Any, *names: str) -> dict:
    """Relative error of one forward of each batch against dense attention, and how its tokens were routed.

    Through the last sparse-MLA layer, which is the draft's where there is one.
    """
    layer = engine.attention_layers()[-1]
    seen = {}
    for seed, name in enumerate(names):
        batch = Batch(engine, BATCHES[name], seed)
        batch.write_history(layer)
        queries = batch.normal(batch.tokens, layer.num_heads, HEAD)
        answer = batch.run(layer, queries)
        metadata = batch.metadata()
        seen[name] = {
            "error": relative_error(answer, batch.dense(layer, queries)),
            "tokens": layer.impl.kernel.calls[-1]["indices"].shape[0],
            "width": layer.impl.kernel.calls[-1]["width"],
            "lse": layer.impl.kernel.calls[-1]["lse"] is not None,
            "decodes": metadata.num_decodes,
            "prefills": metadata.num_prefills,
        }
    return seen


def main() -> None:
    import vllm

    from tests.attention import special
    from tests.attention.engine import Engine, patched_vllm

    seen: dict[str, Any] = {"version": vllm.__version__}
    with tempfile.TemporaryDirectory() as folder, patched_vllm():
        root = Path(folder)
        bf16 = Engine(root / "bf16", "bfloat16", layers=8, changes=full_linear_attention(8))
        seen["bf16"] = {"plan": planned(bf16), "forward": forwards(bf16, "prefill", "decode", "mixed")}
        seen["special"] = special.all_of_them(bf16)
        fp8 = Engine(root / "fp8", "fp8", changes=full_linear_attention(4))
        for layer in fp8.attention_layers():
            layer._k_scale.fill_(0.37)
        seen["fp8"] = {"plan": planned(fp8), "forward": forwards(fp8, "decode", "mixed")}
        nested = Engine(root / "nested", "fp8_e4m3", nested=True, speculative_tokens=2)
        seen["nested"] = {"plan": planned(nested), "forward": forwards(nested, "decode", "speculative", "mixed")}
        for heads in (4, 16, 64):
            other = Engine(
                root / str(heads), "bfloat16", changes={"num_attention_heads": heads, "num_key_value_heads": heads}
            )
            seen[f"{heads} heads"] = {"plan": planned(other), "forward": forwards(other, "prefill")}
        seen["model_classes"] = [type(model).__name__ for model in (bf16.model, fp8.model, nested.model, nested.draft)]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
