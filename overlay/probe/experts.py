"""A small NVFP4 mixture of experts: its checkpoint tensors with a fault or without, and what it computes, in fp64.

Only torch: the reference shares nothing with vLLM. Every scale is a power of two, so that dequantised weights and
quantised activations are exact in bf16 and nothing but the kernel under test rounds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from overlay.checkpoint.tiny_nvfp4 import Packed, dequantise, global_scale, quantise

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 4, 2, 512, 256, 64
DEAD = 2  # the expert without input scales, where one has none
INVERTED = 25.0  # what a global scale is off by where its reciprocal, 5, is taken for it, 0.2


@dataclass(frozen=True)
class Experts:
    """Weights by expert and projection, the scales of their inputs, and tokens with their routes."""

    packed: dict[tuple[int, str], Packed]
    input_scales: dict[str, float]  # of gate and up, and of down
    tokens: torch.Tensor  # bf16 [TOKENS, HIDDEN]
    logits: torch.Tensor  # fp32 [TOKENS, EXPERTS]

    @property
    def routes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights fp32 and ids int32, [TOKENS, TOP_K]: softmax over all, the largest, renormalised."""
        weights, ids = self.logits.softmax(-1).topk(TOP_K, -1)
        return weights / weights.sum(-1, keepdim=True), ids.int()

    @cached_property
    def weights(self) -> dict[tuple[int, str], torch.Tensor]:
        """Dequantised, fp64."""
        return {key: dequantise(weight).double() for key, weight in self.packed.items()}

    def weight(self, expert: int, name: str) -> torch.Tensor:
        return self.weights[expert, name]


@lru_cache
def make(up_apart: bool = False) -> Experts:
    """Random experts; with `up_apart`, up's global scale is eight times gate's and its block scales an eighth."""
    random = torch.Generator().manual_seed(20)
    packed = {}
    for expert in range(EXPERTS):
        for name, (rows, columns) in {
            "gate_proj": (INTERMEDIATE, HIDDEN),
            "up_proj": (INTERMEDIATE, HIDDEN),
            "down_proj": (HIDDEN, INTERMEDIATE),
        }.items():
            weight = torch.randn(rows, columns, generator=random) / columns**0.5
            scale = global_scale(1.0) * (8 if up_apart and name == "up_proj" else 1)
            packed[expert, name] = quantise(weight, scale)
    tokens = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
    logits = torch.randn(TOKENS, EXPERTS, generator=random) * 2
    experts = Experts(packed, {}, tokens, logits)
    largest = max(hidden.abs().max().item() for hidden in _hidden_states(experts))
    scales = {"w13": global_scale(tokens.abs().max().item()), "w2": global_scale(largest)}
    return Experts(packed, scales, tokens, logits)


def reference(experts: Experts, quantises: bool) -> torch.Tensor:
    """What the layer computes, fp64 [TOKENS, HIDDEN]; with `quantises`, both GEMMs read their inputs in NVFP4."""

    def as_read(values: torch.Tensor, scale: float) -> torch.Tensor:
        return dequantise(quantise(values.float(), scale)).double() if quantises else values

    weights, ids = experts.routes
    tokens = as_read(experts.tokens.double(), experts.input_scales["w13"])
    output = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for expert in range(EXPERTS):
        chosen, slot = (ids == expert).nonzero(as_tuple=True)
        hidden = _hidden(experts, expert, tokens[chosen])
        hidden = as_read(hidden.bfloat16().double(), experts.input_scales["w2"])
        share = weights[chosen, slot].double()[:, None]
        output.index_add_(0, chosen, share * (hidden @ experts.weight(expert, "down_proj").T))
    return output


def _hidden(experts: Experts, expert: int, tokens: torch.Tensor) -> torch.Tensor:
    gate, up = (tokens @ experts.weight(expert, name).T for name in ("gate_proj", "up_proj"))
    return torch.nn.functional.silu(gate) * up


def _hidden_states(experts: Experts) -> Iterator[torch.Tensor]:
    for expert in range(EXPERTS):
        yield _hidden(experts, expert, experts.tokens.double())


def checkpoint(experts: Experts, has_input_scale: Callable[[int], bool], inverted: bool) -> dict[str, torch.Tensor]:
    """The layer's ModelOpt tensors, named as vLLM's `RoutedExperts.load_weights` takes them.

    `has_input_scale(expert)`: is it shipped? `inverted` stores every global scale of down as if a reciprocal had been
    taken for it: outputs point the right way and are 25 times too large.
    """
    tensors = {}
    for (expert, name), weight in experts.packed.items():
        factor = INVERTED if inverted and name == "down_proj" else 1.0
        tensors[f"{expert}.{name}.weight"] = weight.codes
        tensors[f"{expert}.{name}.weight_scale"] = weight.block_scales
        tensors[f"{expert}.{name}.weight_scale_2"] = torch.tensor(weight.global_scale * factor, dtype=torch.float32)
        if has_input_scale(expert):
            scale = experts.input_scales["w2" if name == "down_proj" else "w13"]
            tensors[f"{expert}.{name}.input_scale"] = torch.tensor(scale, dtype=torch.float32)
    return tensors


def cosine(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """1 where both point the same way, whatever their lengths."""
    found, wanted = found.double().flatten(), wanted.double().flatten()
    return (found @ wanted / (found.norm() * wanted.norm())).item()


def magnitude(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How much longer `found` is than `wanted`: what a cosine cannot see."""
    return (found.double().norm() / wanted.double().norm()).item()
