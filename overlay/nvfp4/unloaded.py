"""NaN where vLLM allocates a scale and leaves it: what no loader wrote can be told from what a checkpoint shipped."""

from collections.abc import Iterable

import torch

# Survives vLLM's reload, which rebuilds parameters from meta tensors and copies their attributes.
MARK = "overlay_nan_until_loaded"


def watch(layer: torch.nn.Module, names: Iterable[str]) -> None:
    """Fill those of the parameters `names` that the layer has with NaN, in place, and mark them as watched."""
    for name in names:
        parameter = getattr(layer, name, None)
        if parameter is not None:
            setattr(parameter, MARK, True)
            refill(parameter)


def watched(layer: torch.nn.Module, name: str) -> bool:
    """Was this parameter of the layer NaN before loading? Not so under dummy loading, whose values nobody stored."""
    return getattr(getattr(layer, name, None), MARK, False)


def refill(parameter: torch.Tensor) -> None:
    """NaN again, if watched; a meta tensor has no values yet."""
    if getattr(parameter, MARK, False) and not parameter.is_meta:
        parameter.data.fill_(float("nan"))
