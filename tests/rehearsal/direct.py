"""vLLM's own planner, run directly: the reference that a rehearsal must agree with. Uses nothing of overlay.rehearsal.

A child process under the fake driver builds all 45 layers as real CPU tensors, which is possible because hidden size
and experts are small here: no KV spec depends on them. One gloo process stands for rank 0; its tensor-parallel group is
told that it has two ranks. Argument: a folder with the configuration. Prints one JSON object by KV dtype asked for.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

TP = 2
MEMORY = 24 << 30
SMALL = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 8}
SMALL |= {"vocab_size": 320, "q_lora_rank": 128}


def main(model: str) -> None:
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    torch.cuda.Stream = torch.cuda.Event = torch.Stream = torch.Event = mock.MagicMock()
    type(current_platform).device_type = "cpu"
    plans = {}
    for dtype in ("auto", "fp8", "bfloat16"):
        arguments = EngineArgs(
            model=model,
            tensor_parallel_size=TP,
            kv_cache_dtype=dtype,
            skip_tokenizer_init=True,
            hf_overrides=SMALL,
            max_model_len=131072,
        )
        config = arguments.create_engine_config()
        if not parallel_state.model_parallel_is_initialized():
            start_one_process(config, Path(model))
        plans[dtype] = plan(config)
    print(json.dumps(plans))


def start_one_process(config: Any, folder: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        parallel_state.initialize_model_parallel()
    parallel_state.get_tp_group().world_size = TP


def plan(config: Any) -> dict[str, Any]:
    """Block size, bytes per block, blocks in MEMORY and vLLM's capacity figure, for both ranks alike."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
        initialize_model(config)
    layers = config.compilation_config.static_forward_context
    current_platform.update_block_size_for_backend(config)
    block_size = config.cache_config.block_size
    specs = [get_kv_cache_spec(config)] * TP
    backends = {layer.get_attn_backend() for name, layer in layers.items() if name in specs[0]}
    layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    resolve_kv_cache_layout(config, [layouts] * TP, specs[0].values())
    plans = configurations(config, specs)
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(
        config, kv_cache_utils.generate_scheduler_kv_cache_config(plans)
    )
    (backing,) = {tensor.size for tensor in plans[0].kv_cache_tensors}  # all groups share one allocation
    return {
        "block_size": block_size,
        "bytes_per_block": backing // plans[0].num_blocks,
        "num_blocks": plans[0].num_blocks,
        "kv_tokens": tokens,
        "max_concurrency": round(concurrency, 3),
    }


def configurations(config: Any, specs: list[dict[str, Any]]) -> list[Any]:
    """Each rank's KV cache: the planner is a module of its own from 0.33, and takes the groups of all ranks."""
    try:
        from vllm.v1.core import kv_cache_planning
    except ImportError:
        from vllm.v1.core import kv_cache_utils

        return kv_cache_utils.get_kv_cache_configs(config, specs, [MEMORY] * TP)
    groups = kv_cache_planning.get_global_kv_cache_groups(config, specs)
    return kv_cache_planning.get_kv_cache_configs(config, specs, [MEMORY] * TP, groups)


if __name__ == "__main__":
    main(sys.argv[1])
