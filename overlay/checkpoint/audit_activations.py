"""Activation scales against the scheme that vLLM reads in the configuration: is W4A4 claimed, can it be served?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from overlay.checkpoint.audit_scales import PATCH, Scales, how, unusable, unusable_inputs
from overlay.checkpoint.findings import Finding, error, info, layers_text

Served = Literal["W4A4", "W4A4 repaired", "W4A16"]


@dataclass(frozen=True)
class Activation:
    """One kind of NVFP4 module: how a correct engine serves it, by number of vLLM's modules, and how many of its
    projections have a usable activation scale. `claimed`: how stock vLLM would serve it."""

    kind: str
    claimed: str
    served: dict[Served, int]
    usable: int
    projections: int

    @property
    def summary(self) -> str:
        """`W4A16`, or `W4A4 (40), W4A16 (2)` where modules of the kind differ."""
        if len(self.served) == 1:
            return next(iter(self.served))
        return ", ".join(f"{how_served} ({count})" for how_served, count in sorted(self.served.items()))


@dataclass(frozen=True)
class _Verdict:
    served: Served
    usable: int
    projections: int
    # (check, text about the projections concerned)
    faults: tuple[tuple[str, str], ...]


def examine(scales: Sequence[Scales]) -> tuple[list[Activation], list[Finding]]:
    """How each kind of NVFP4 module is to be served, and findings where stock vLLM would not do that."""
    verdicts = [(layer, _verdict(layer)) for layer in scales]
    return _by_kind(verdicts), _findings(verdicts)


def _verdict(layer: Scales) -> _Verdict:
    bad = {projection: unusable_inputs(rows, layer.reciprocal) for projection, rows in layer.inputs.items()}
    projections = sum(map(len, layer.inputs.values()))
    usable = projections - sum(map(len, bad.values()))
    # One parameter of vLLM without any usable value is enough: the patch then serves the whole module as W4A16.
    dead = [group for group in layer.fused() if all(len(bad[name]) == len(layer.inputs[name]) for name in group)]
    served: Served = "W4A16" if dead else "W4A4 repaired" if usable < projections else "W4A4"
    scheme = layer.planned.scheme
    if scheme is None or scheme.weights != "nvfp4":
        return _Verdict(served, usable, projections, ())  # audit_storage tells what is wrong there
    if not scheme.activations:
        return _Verdict("W4A16", usable, projections, (("activation_scales_unused", ""),) if usable else ())
    if dead:
        names = sorted(name for group in dead for name in group)
        rows = {(name, row): value for name in names for row, value in layer.inputs[name].items()}
        fault = ("activation_scales_missing", f"{how(rows, rows)} for all of {', '.join(names)}")
        return _Verdict(served, usable, projections, (fault,))
    faults = tuple(("activation_scales_incomplete", text) for text in unusable(layer.inputs, bad, layer.routed))
    return _Verdict(served, usable, projections, faults)


def _by_kind(verdicts: Iterable[tuple[Scales, _Verdict]]) -> list[Activation]:
    kinds: dict[str, list[tuple[Scales, _Verdict]]] = {}
    for layer, verdict in verdicts:
        kinds.setdefault(layer.label, []).append((layer, verdict))
    found = []
    for kind, members in kinds.items():
        served: dict[Served, int] = {}
        for _, verdict in members:
            served[verdict.served] = served.get(verdict.served, 0) + 1
        claims = sorted({str(layer.planned.scheme or "unquantised") for layer, _ in members})
        usable = sum(verdict.usable for _, verdict in members)
        found.append(
            Activation(kind, ", ".join(claims), served, usable, sum(verdict.projections for _, verdict in members))
        )
    return found


def _findings(verdicts: Iterable[tuple[Scales, _Verdict]]) -> list[Finding]:
    """One finding for the same fault in many layers."""
    groups: dict[tuple[str, str, str, bool], set[int | None]] = {}
    for layer, verdict in verdicts:
        for check, text in verdict.faults:
            groups.setdefault((check, layer.label, text, layer.routed), set()).add(layer.layer)
    return [
        _finding(check, f"{label}{layers_text(where)}", text, routed)
        for (check, label, text, routed), where in groups.items()
    ]


def _finding(check: str, subject: str, text: str, routed: bool) -> Finding:
    if check == "activation_scales_missing":
        return error(
            check,
            f"{subject}: activation scales {text}, and vLLM takes the configuration for W4A4",
            "it loads, reports healthy and multiplies by uninitialised memory: one repeated token, or NaN",
            f"{PATCH} serves it as W4A16; pass no --moe-backend that needs W4A4",
        )
    if check == "activation_scales_incomplete":
        consequence = "vLLM takes one scale over all parts, this one among them: garbage or NaN from this module"
        cure = "gives it the largest valid scale of the parts"
        if routed:
            consequence = (
                "a garbage or NaN slot spoils every expert of the layer on FlashInfer's kernels, its own on vLLM's"
            )
            cure = "gives it the other half's value (gate and up), or the maximum of the layer's valid scales"
        return error(check, f"{subject}: activation scale {text}", consequence, f"{PATCH} {cure}")
    return info(
        check,
        f"{subject}: activation scales are stored, and the configuration says weight-only",
        "vLLM reads and discards them",
        "nothing to do",
    )
