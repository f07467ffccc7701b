"""What happens to a layer whose input scales cannot all be used: the user's two options, applied to what was read."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from overlay.errors import OverlayError
from overlay.nvfp4.findings import Finding, note, ranges
from overlay.nvfp4.policy import Policy
from overlay.nvfp4.scales import Reading


class ScaleError(OverlayError):
    """A layer has scales that were never loaded or cannot be used, and policy or arithmetic leaves no cure."""


@dataclass(frozen=True)
class Subject:
    """The layer being looked at, in the words of a message."""

    kind: str
    name: str
    rows_are: str

    def note(self, what: str, parameter: str, cure: str, rows: tuple[int, ...] = (), level: int = logging.WARNING):
        note(Finding(self.kind, self.name, what, parameter, cure, rows, self.rows_are, level))

    def refuse(self, what: str, parameter: str, way_out: str, rows: tuple[int, ...] = ()) -> ScaleError:
        which = f", {self.rows_are} {ranges(rows)}" if rows else ""
        return ScaleError(f"{self.kind} {self.name}: {what} in {parameter}{which}. {way_out}")


@dataclass(frozen=True)
class Settlement:
    """`route`: the layer cannot quantise activations. Else `values`: what to write, as stored, per parameter."""

    route: bool
    values: Mapping[str, torch.Tensor]


UNTOUCHED = Settlement(route=False, values={})


def settle(subject: Subject, readings: Mapping[str, Reading], policy: Policy, missing_elsewhere: bool) -> Settlement:
    """Decide what becomes of one layer's input scales; notes every decision but the route, whose backend comes later.

    `missing_elsewhere`: another rank of the same layer has no input scale at all and this rank has to follow it.
    Raises ScaleError where the policy is to refuse.
    """
    missing = [name for name, reading in readings.items() if reading.all_bad]
    if missing or missing_elsewhere:
        if policy.all_missing == "route":
            return Settlement(route=True, values={})
        if policy.all_missing == "refuse":
            raise subject.refuse(
                "no usable value",
                " and ".join(missing) or "the input scales of another rank",
                'The checkpoint is weight-only, or its input scales were lost. all_missing = "route" in '
                "[patches.nvfp4_moe_scales] computes such layers with 16-bit activations.",
            )
    values = {}
    for name, reading in readings.items():
        if reading.clean:
            continue
        broken = tuple(sorted(reading.bad + reading.one_sided))
        if reading.all_bad:
            number = float(policy.all_missing)
            values[name] = reading.filled(1.0 / number if reading.reciprocal else number)
            subject.note("no usable value", name, f"set to {number:g} as all_missing says")
            continue
        if broken and policy.some_bad == "refuse":
            raise subject.refuse(
                "no usable value",
                name,
                'some_bad = "repair" in [patches.nvfp4_moe_scales] gives them the maximum of the layer\'s valid ones.',
                broken,
            )
        values[name] = reading.repaired()
        if reading.bad:
            subject.note("no usable value", name, "repaired by the maximum of the layer's valid scales", reading.bad)
        if reading.one_sided:
            cure = "repaired by the other half, which reads the same input"
            subject.note("no usable value for gate or up", name, cure, reading.one_sided)
        if reading.elsewhere and not broken:
            cure = "left out of the shared scale"
            subject.note("not loaded, experts of other ranks", name, cure, level=logging.DEBUG)
    return Settlement(route=False, values=values)
