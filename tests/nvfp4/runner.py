"""Loads the cases with the installed vLLM, in a process that believes in a 12.1 GPU, and prints JSON.

Everything up to kernels ready to run is vLLM's own (overlay.nvfp4.cpu_load says what is not). `torch.empty` is
poisoned, so that memory nobody wrote can be seen.
"""

import contextlib
import functools
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

from overlay.nvfp4.cpu_load import Lines, experts, load, numbers, start
from tests import installed
from tests.nvfp4.checkpoints import FORMATS, tensors, write
from tests.nvfp4.scenarios import QUANTIZATION, UNQUANTISED, Scenario, scenarios


@contextlib.contextmanager
def poisoned(value: float) -> Iterator[None]:
    """Every floating-point tensor that `torch.empty` and `torch.empty_strided` return holds `value`, any other zeros.

    Zeros make codes that nobody wrote (those of dummy weights, until 0.29) the same in every process.
    """

    def poisoning(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args, **kwargs):
            tensor = create(*args, **kwargs)
            if tensor.is_meta:
                return tensor
            if not tensor.is_floating_point():
                return tensor.zero_()
            largest = torch.finfo(tensor.dtype).max
            return tensor.fill_(min(value, largest) if value == value else value)

        return wrapper

    with (
        mock.patch("torch.empty", poisoning(torch.empty)),
        mock.patch("torch.empty_strided", poisoning(torch.empty_strided)),
    ):
        yield


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
    said, logger, dtype = Lines(), logging.getLogger("overlay"), torch.get_default_dtype()
    logger.addHandler(said)
    try:
        result = what()
    except Exception as error:  # what a user would see
        result = {"error": f"{type(error).__name__}: {error}"}
    finally:
        logger.removeHandler(said)
        torch.set_default_dtype(dtype)  # a load that fails leaves vLLM 0.27 at the model's
    return {**result, "log": said.lines}


def describe(model: torch.nn.Module) -> dict[str, Any]:
    """What the layers compute with: backends, alphas and activation scales, and a digest of every tensor."""
    from vllm.model_executor.layers.linear import LinearBase

    return {
        "experts": experts(model),
        "linears": {n: describe_linear(layer) for n, layer in model.named_modules() if isinstance(layer, LinearBase)},
        "digests": {name: digest(tensor) for name, tensor in named_tensors(model)},
    }


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers among which are KV-cache scales."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from ((name, tensor) for name, tensor in model.named_buffers() if not name.endswith("cos_sin_cache"))


def describe_linear(layer: torch.nn.Module) -> dict[str, Any]:
    owner = getattr(layer, "scheme", None) or layer.quant_method
    return {
        "method": type(owner).__name__,
        "kernel": type(getattr(owner, "kernel", None)).__name__,
        "quantises": hasattr(layer, "input_global_scale"),
        "leftovers": [n for n, p in layer.named_parameters() if p.is_floating_point() and p.float().isnan().any()],
        **{n: numbers(getattr(layer, n, None)) for n in ("alpha", "input_global_scale_inv", "weight_global_scale")},
    }


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]


def run(name: str, scenario: Scenario, base: Path) -> dict[str, Any]:
    """Write the scenario's checkpoint, load it, and say what came of it."""
    form = FORMATS[scenario.form]
    unquantised = UNQUANTISED[scenario.form] if scenario.unquantised is None else scenario.unquantised
    weights = tensors(form, scenario.edit(form), unquantised)
    quantization = scenario.quantization or QUANTIZATION[scenario.form]
    folder = write(base / name.replace("/", "-"), quantization, scenario.own_file, weights)

    def loaded() -> dict[str, Any]:
        with poisoned(scenario.poison), b12x() if scenario.b12x else contextlib.nullcontext():
            model, config = load(folder, **scenario.changes)
            if scenario.reload is not None:
                reload(model, config, tensors(form, scenario.reload(form), unquantised))
            return describe(model)

    with patch_options(scenario.options):
        return attempt(loaded)


@contextlib.contextmanager
def b12x() -> Iterator[None]:
    """The b12x backends as if their packages and a GPU were there, up to their own step after the conversion."""
    from vllm.model_executor.layers.fused_moe.experts.flashinfer_b12x_moe import FlashInferB12xExperts

    kernels = [FlashInferB12xExperts]
    if installed.since(0, 30):
        from vllm.model_executor.layers.fused_moe.b12x import B12xExperts

        kernels.append(B12xExperts)
    with contextlib.ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(mock.patch.object(kernel, "_supports_current_device", staticmethod(lambda: True)))
            stack.enter_context(mock.patch.object(kernel, "process_weights_after_loading", lambda self, layer: None))
        yield


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
