"""Loads tiny checkpoints with the real vLLM on CPU tensors, under the fake driver; prints JSON. Run as a module.

Argument: a JSON object {"parse": {name: path}, "load": {name: {"path", "mtp", "text_only"}}}.
"""

import hashlib
import json
import sys
import tempfile
from typing import Any

import torch


def main() -> None:
    asked = json.loads(sys.argv[1])
    pretend_host_is_the_device()
    answer = {
        "parse": {name: parsed(path) for name, path in asked["parse"].items()},
        "load": {name: load(**how) for name, how in asked["load"].items()},
    }
    print(json.dumps(answer))


def pretend_host_is_the_device() -> None:
    """vLLM's model classes make their buffers on the platform's device and a side stream for the shared experts."""
    from vllm.platforms import current_platform

    class NoStream:
        pass

    torch.cuda.Stream = NoStream
    type(current_platform).device_type = "cpu"


def parsed(path: str) -> dict[str, Any]:
    """What vLLM's ModelConfig and quantisation config make of the checkpoint's configuration files."""
    from vllm.config import LoadConfig, ModelConfig
    from vllm.model_executor.model_loader.weight_utils import get_quant_config

    config = ModelConfig(model=path, skip_tokenizer_init=True, enforce_eager=True)
    text = config.hf_text_config
    quant = get_quant_config(config, LoadConfig()) if config.quantization else None
    return {
        "architecture": config.architecture,
        "quantization": config.quantization,
        "class": type(quant).__name__ if quant else None,
        "algorithm": getattr(quant, "quant_method", None),
        "excluded": len(getattr(quant, "exclude_modules", None) or getattr(quant, "ignore", None) or ()),
        "is_hybrid": config.is_hybrid,
        "use_mla": config.use_mla,
        "head_size": config.get_head_size(),
        "index_kpool": text.index_kpool,
        "index_topk": text.index_topk,
        "linear_heads": text.linear_num_heads,
    }


def load(path: str, mtp: bool = False, text_only: bool = False) -> dict[str, Any]:
    """Build the model, and its draft, and load the checkpoint with their own `load_weights`.

    Every parameter that can hold a NaN is filled with it first, so that a single value that no tensor covers shows.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    more = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}} if mtp else {}
    arguments = EngineArgs(model=path, max_model_len=16384, enforce_eager=True, language_model_only=text_only, **more)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed()
        answer = {"target": fill(config, config.model_config)}
        if mtp:
            answer["draft"] = fill(config, config.speculative_config.draft_model_config)
    return answer


def init_distributed() -> None:
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        with tempfile.TemporaryDirectory() as folder:
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            parallel_state.initialize_model_parallel()


def fill(config: Any, model_config: Any) -> dict[str, Any]:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
        model = initialize_model(vllm_config=config, model_config=model_config)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        if parameter.is_floating_point():
            parameter.data.copy_(torch.full((), float("nan")))
    loaded = model.load_weights(DefaultModelLoader(config.load_config).get_all_weights(model_config, model))
    holes = [name for name, p in parameters.items() if p.is_floating_point() and p.float().isnan().any()]
    return {
        "parameters": len(parameters),
        "unknown": sorted(loaded - parameters.keys()),
        "missing": sorted(parameters.keys() - loaded),
        "holes": sorted(holes),
        "has_tower": any("visual" in name for name in parameters),
        "experts": [digest(*expert_weights(module)) for module in routed_experts(model)],
    }


def routed_experts(model: torch.nn.Module) -> list[Any]:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def expert_weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's gate-up and down weights in BF16; packed ones as vLLM's own method dequantises them."""
    parameters = dict(layer.named_parameters())
    if "w2_weight" in parameters and layer.w2_weight.dtype == torch.bfloat16:
        return layer.w13_weight, layer.w2_weight
    return layer.quant_method.dequantize_weight(layer)


def digest(*tensors: torch.Tensor) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
