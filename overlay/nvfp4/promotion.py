"""What a checkpoint's configuration says of its NVFP4 layers, where vLLM reads it wrongly.

Weight-only layers, in shapes that vLLM does not recognise: a head start alone, which lets vLLM select a W4A16 backend
from the beginning. What counts are the tensors, checked after loading, whatever a configuration says. And algorithms
that vLLM does not know: it would leave such layers unquantised and read packed bytes as bf16.
"""

import copy
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from overlay.errors import OverlayError

# On experts that the configuration's groups make W4A16 among layers that quantise activations.
PROMOTED = "overlay_promoted_to_w4a16"


class AlgorithmError(OverlayError):
    """A layer is quantised with an algorithm that vLLM cannot load."""


def config_groups(config: Mapping) -> list[Mapping]:
    """The groups of a ModelOpt configuration: a table or a list, at the top or below "quantization"."""
    inner = config.get("quantization")
    groups = config.get("config_groups") or (inner.get("config_groups") if isinstance(inner, Mapping) else None) or []
    members = groups.values() if isinstance(groups, Mapping) else groups if isinstance(groups, list) else []
    return [group for group in members if isinstance(group, Mapping)]


def is_weight_only(groups: list[Mapping]) -> bool:
    """Does every group quantise weights alone? An empty activation table says as much as null or no key."""
    return bool(groups) and not any(group.get("input_activations") for group in groups)


def experts_are_weight_only(groups: list[Mapping], prefix: str) -> bool:
    """Where groups differ: do those that target the experts at `prefix` quantise weights alone?"""
    names = (prefix, f"{prefix}.0.gate_proj")
    return is_weight_only([group for group in groups if any(fnmatchcase(n, t) for t in targets(group) for n in names)])


def targets(group: Mapping) -> list[str]:
    """The patterns of a group: a list, or one by itself."""
    named = group.get("targets") or []
    return [named] if isinstance(named, str) else [target for target in named if isinstance(target, str)]


def experts_method(get_quant_method: Callable, config: object, layer: object, prefix: str) -> object:
    """ModelOpt's method for a layer; W4A16 for experts that the configuration's groups quantise so.

    `config` carries its groups as `overlay_groups`. The linear layers beside such experts keep the algorithm they have.
    """
    groups = getattr(config, "overlay_groups", None)
    if groups and type(layer).__name__ == "RoutedExperts" and experts_are_weight_only(groups, prefix):
        config = copy.copy(config)
        config.overlay_groups, config.quant_method = None, "W4A16_NVFP4"
        setattr(layer, PROMOTED, True)
        return type(config).get_quant_method(config, layer, prefix)
    return get_quant_method(layer, prefix)


def known_method(get_quant_method: Callable, config: object, layer: object, prefix: str) -> object:
    """The mixed-precision method for a layer. Raises AlgorithmError where vLLM would silently leave it unquantised.

    A layer that the configuration excludes may be listed with an algorithm that vLLM knows: the exclusion wins there,
    as in vLLM. Listed with one that it does not know, the configuration contradicts itself, and integers that are
    loaded as bf16 are numbers too.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    method = get_quant_method(layer, prefix)
    is_quantised = method is not None and not isinstance(method, UnquantizedLinearMethod)
    if is_quantised or not isinstance(layer, RoutedExperts | LinearBase | ParallelLMHead):
        return method
    algorithm = (
        own_algorithm(config, prefix) if isinstance(layer, RoutedExperts) else config._resolve_quant_algo(prefix)
    )
    if algorithm is None or (is_known(algorithm) and config.is_layer_excluded(prefix)):
        return method
    raise AlgorithmError(
        f"layer {prefix}: the checkpoint quantises it with {algorithm}, which vLLM's mixed-precision loader cannot "
        f"load for a {type(layer).__name__}; it would read the packed values as unquantised weights. Use a checkpoint "
        "without this algorithm, or a vLLM that knows it."
    )


# What a checkpoint may list beside "experts", in the module that holds them, and mean the experts by.
EXPERT_PROJECTIONS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3", "w13"})


def own_algorithm(config: object, prefix: str) -> str | None:
    """The algorithm of an entry that is the experts' own. vLLM takes one of anything beside them, too: of a shared
    expert, say, where the routed ones are not quantised and have no entry.
    """
    for candidate in config._quantized_layer_prefix_candidates(prefix):
        parent = candidate.removesuffix(".experts")
        for key, entry in config.quantized_layers.items():
            if key == candidate or key.startswith(f"{candidate}.") or is_projection_of(key, parent):
                return entry["quant_algo"].upper()
    return None


def is_projection_of(key: str, parent: str) -> bool:
    return key.startswith(f"{parent}.") and key.removeprefix(f"{parent}.") in EXPERT_PROJECTIONS


def is_known(algorithm: str) -> bool:
    """Can vLLM's mixed-precision loader do anything with this algorithm, in some kind of layer?"""
    from vllm.model_executor.layers.quantization import modelopt

    block_codecs = getattr(modelopt, "B12X_BLOCK_CODECS", ())  # the two aliases and the codecs came after 0.27
    more = (*getattr(modelopt, "_BLOCK_FP8_MOE_ALGOS", ()), *(codec.upper() for codec in block_codecs))
    return algorithm in (*modelopt.QUANT_ALGOS, *more)
