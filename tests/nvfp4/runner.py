"""Loads the cases with the installed vLLM, as an engine does, in a process that believes in a 12.1 GPU; prints JSON.

Everything is vLLM's own, from the checkpoint's files to kernels ready to run: `ModelConfig`, `VllmConfig`, `get_model`
with its safetensors loader and `process_weights_after_loading`. Only three things are not: `torch.empty` is poisoned to
make unwritten memory visible; the device is the CPU; and Marlin's repacking, which exists for CUDA alone, hands on what
it is given.
"""

import contextlib
import functools
import gc
import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.nvfp4.checkpoints import FORMATS, tensors, write
from tests.nvfp4.scenarios import QUANTIZATION, UNQUANTISED, Scenario, scenarios


@contextlib.contextmanager
def poisoned(value: float) -> Iterator[None]:
    """Every floating-point tensor that `torch.empty` and `torch.empty_strided` return holds `value`."""

    def poisoning(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args, **kwargs):
            tensor = create(*args, **kwargs)
            if not tensor.is_floating_point() or tensor.is_meta:
                return tensor
            largest = torch.finfo(tensor.dtype).max
            return tensor.fill_(min(value, largest) if value == value else value)

        return wrapper

    with (
        mock.patch("torch.empty", poisoning(torch.empty)),
        mock.patch("torch.empty_strided", poisoning(torch.empty_strided)),
    ):
        yield


def start() -> None:
    """One process that is a whole tensor-parallel group, as vLLM's workers set it up."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    file = Path(tempfile.mkdtemp()) / "group"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{file}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # swizzle_blockscale asks for it; the device is the CPU
    intercept_marlin()


def intercept_marlin() -> None:
    from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle

    def experts(layer, w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, is_act_and_mul):
        return w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2

    oracle.prepare_nvfp4_moe_layer_for_marlin = experts
    MarlinNvFp4LinearKernel.process_weights_after_loading = lambda self, layer: None


class Log(logging.Handler):
    """The overlay's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def engine_config(folder: Path, **changes: Any):
    """vLLM's configuration for the checkpoint in `folder`.

    `changes`: `moe_backend`, `load_format`, `ranks` (expert parallel), and anything that `ModelConfig` takes.
    """
    from vllm.config import LoadConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.config.kernel import KernelConfig

    load_format = changes.pop("load_format", "auto")
    moe_backend = changes.pop("moe_backend", "auto")
    ranks = changes.pop("ranks", 1)
    return VllmConfig(
        parallel_config=ParallelConfig(tensor_parallel_size=ranks, enable_expert_parallel=ranks > 1),
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", **changes),
        load_config=LoadConfig(device="cpu", load_format=load_format),
        kernel_config=KernelConfig(moe_backend=moe_backend),
    )


def load(folder: Path, **changes: Any) -> tuple[torch.nn.Module, Any]:
    """The model as `vllm serve` would load it, and vLLM's configuration of it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_tp_group
    from vllm.model_executor.model_loader import get_model

    config = engine_config(folder, **changes)
    ranks = config.parallel_config.tensor_parallel_size
    # one process stands for the first of several ranks: nothing that loading does needs the others
    with set_current_vllm_config(config), mock.patch.object(get_tp_group(), "world_size", ranks):
        model = get_model(vllm_config=config)
    gc.freeze()  # vLLM collects garbage twice for each model, which costs a second once its modules are there
    return model, config


def reload(model: torch.nn.Module, config: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Other weights for a model that is being served, as `reload_weights` of a worker loads them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with set_current_vllm_config(config), torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(model, config.model_config)


def attempt(what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `what` returned or how it failed, with the overlay's log lines."""
    log, logger = Log(), logging.getLogger("overlay")
    logger.addHandler(log)
    try:
        result = what()
    except Exception as error:  # what a user would see
        import os

        if os.environ.get("TB"):
            import traceback

            traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    finally:
        logger.removeHandler(log)
    return {**result, "log": log.lines}


def describe(model: torch.nn.Module) -> dict[str, Any]:
    """What the layers compute with: backends, alphas and activation scales, and a digest of every tensor."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    experts, linears, digests = {}, {}, {}
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            experts[name] = describe_experts(module)
        elif isinstance(module, LinearBase):
            linears[name] = describe_linear(module)
        for parameter, tensor in module.named_parameters(recurse=False):
            digests[f"{name}.{parameter}"] = digest(tensor)
    return {"experts": experts, "linears": linears, "digests": digests}


def describe_experts(layer: torch.nn.Module) -> dict[str, Any]:
    method = layer.quant_method
    quant = getattr(method, "moe_quant_config", None)
    if quant is None:
        return {"method": type(method).__name__}
    return {
        "method": type(method).__name__,
        "backend": method.nvfp4_backend.value,
        "experts": type(method.moe_kernel.fused_experts).__name__,
        "w4a16": bool(getattr(method, "use_a16", False)),
        **{name: numbers(getattr(quant, name)) for name in ("g1_alphas", "g2_alphas", "a1_gscale", "a2_gscale")},
    }


def describe_linear(layer: torch.nn.Module) -> dict[str, Any]:
    owner = getattr(layer, "scheme", None) or layer.quant_method
    return {
        "method": type(owner).__name__,
        "kernel": type(getattr(owner, "kernel", None)).__name__,
        "quantises": hasattr(layer, "input_global_scale"),
        "leftovers": [n for n, p in layer.named_parameters() if p.is_floating_point() and p.float().isnan().any()],
        **{n: numbers(getattr(layer, n, None)) for n in ("alpha", "input_global_scale_inv", "weight_global_scale")},
    }


def numbers(tensor: torch.Tensor | None) -> list[float] | None:
    return None if tensor is None else tensor.detach().float().flatten().tolist()


def digest(tensor: torch.Tensor) -> str:
    data = (
        tensor.detach().contiguous().view(torch.uint8) if tensor.ndim else tensor.detach().reshape(1).view(torch.uint8)
    )
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def run(name: str, scenario: Scenario, base: Path) -> dict[str, Any]:
    """Write the scenario's checkpoint, load it, and say what came of it."""
    form = FORMATS[scenario.form]
    unquantised = UNQUANTISED[scenario.form] if scenario.unquantised is None else scenario.unquantised
    weights = tensors(form, scenario.edit(form), unquantised)
    quantization = scenario.quantization or QUANTIZATION[scenario.form]
    folder = write(base / name.replace("/", "-"), quantization, scenario.own_file, weights)

    def loaded() -> dict[str, Any]:
        with poisoned(scenario.poison):
            model, config = load(folder, **scenario.changes)
            if scenario.reload is not None:
                reload(model, config, tensors(form, scenario.reload(form), unquantised))
            return describe(model)

    with patch_options(scenario.options):
        return attempt(loaded)


@contextlib.contextmanager
def patch_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Wrap vLLM again with other options of the patch, where the overlay is in front."""
    from overlay import startup

    overlay = startup.current()
    if not options or overlay is None:
        yield
        return
    (entry,) = [entry for entry in overlay.entries if entry.patch.id == "nvfp4_moe_scales"]
    before = entry.context.options
    rewrap(entry, {**before, **options})
    try:
        yield
    finally:
        rewrap(entry, before)


def rewrap(entry: Any, options: Mapping[str, Any]) -> None:
    from overlay import registry

    registry.remove(entry)
    entry.context.options = options
    for module in entry.patch.apply:
        if module in sys.modules:
            registry.apply(entry, sys.modules[module])


def main() -> None:
    """Run everything (or what has a name that starts with an argument) and print {name: outcome} as the last line."""
    from tests.nvfp4 import checks

    start()
    wanted = tuple(sys.argv[1:]) or ("",)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        todo = {name: functools.partial(run, name, scenario, base) for name, scenario in scenarios().items()}
        todo |= checks.everything(base)
        results = {name: what() for name, what in todo.items() if name.startswith(wanted)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
