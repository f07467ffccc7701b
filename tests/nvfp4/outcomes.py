"""What the answers of a run are asked: are these numbers right, can they be computed with, is this layer W4A16?"""

import math

import pytest

FORMATS = ("modelopt", "compressed-tensors", "quark")
ALPHA, GLOBAL_SCALE = 0.02 * 0.01, 100.0


def experts(outcome: dict) -> list[dict]:
    """The outcome's layers of experts; fails with the error of a load that was refused."""
    assert "experts" in outcome, outcome.get("error")
    return list(outcome["experts"].values())


def linears(outcome: dict, part: str = "self_attn") -> list[dict]:
    return [layer for name, layer in outcome["linears"].items() if part in name]


def is_right(layer: dict, alpha: float = ALPHA, global_scale: float = GLOBAL_SCALE) -> bool:
    """Does a layer of experts quantise with the given numbers throughout?"""
    alphas, scales = layer["g1_alphas"] + layer["g2_alphas"], layer["a1_gscale"] + layer["a2_gscale"]
    return alphas == pytest.approx([alpha] * len(alphas)) and scales == pytest.approx([global_scale] * len(scales))


def is_sane(layer: dict) -> bool:
    """Can a layer of experts compute at all: every number it multiplies by is one?"""
    numbers = [n for key in ("g1_alphas", "g2_alphas", "a1_gscale", "a2_gscale") for n in layer[key] or ()]
    return all(math.isfinite(n) and 1e-20 < n < 1e20 for n in numbers)


def is_weight_only(layer: dict) -> bool:
    """Is a layer of experts set up as vLLM sets up W4A16: Marlin, no activation scales, the weights' own alphas?"""
    alphas = layer["g1_alphas"] + layer["g2_alphas"]
    return (
        (layer["backend"], layer["experts"], layer["w4a16"]) == ("MARLIN", "MarlinExperts", True)
        and layer["a1_gscale"] is None
        and layer["a2_gscale"] is None
        and alphas == pytest.approx([0.02] * len(alphas))
    )


def is_weight_only_linear(layer: dict) -> bool:
    return layer["kernel"] == "MarlinNvFp4LinearKernel" and not layer["quantises"] and not layer["leftovers"]
