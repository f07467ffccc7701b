"""NaN where vLLM allocates a scale and leaves it: what no loader wrote can be told from what a checkpoint shipped."""

from collections.abc import Iterable

import torch

# Both survive vLLM's reload, which rebuilds parameters from meta tensors and copies their attributes.
MARK = "overlay_nan_until_loaded"
DUMMY = "overlay_dummy_until_reloaded"


def watch(layer: torch.nn.Module, names: Iterable[str], is_dummy: bool) -> None:
    """Mark those of the parameters `names` that the layer has as watched, and fill them with NaN, in place.

    With `is_dummy` they get numbers of vLLM's own first, which are nobody's scales: they are left alone, and watched
    from the first reload on, by which such an engine gets its weights.
    """
    for name in names:
        parameter = getattr(layer, name, None)
        if parameter is not None:
            setattr(parameter, MARK, True)
            if is_dummy:
                setattr(parameter, DUMMY, True)
            else:
                refill(parameter)


def watched(layer: torch.nn.Module, name: str) -> bool:
    """Was this parameter of the layer NaN before loading? Not so under dummy loading, whose values nobody stored."""
    return is_marked(layer, name) and not getattr(getattr(layer, name), DUMMY, False)


def is_marked(layer: torch.nn.Module, name: str) -> bool:
    """Is this parameter of the layer watched, now or from the next reload on?"""
    return getattr(getattr(layer, name, None), MARK, False)


def refill(parameter: torch.Tensor) -> None:
    """NaN again, if watched, and no dummy from here on; a meta tensor has no values yet."""
    if getattr(parameter, MARK, False) and not parameter.is_meta:
        setattr(parameter, DUMMY, False)
        parameter.data.fill_(float("nan"))
