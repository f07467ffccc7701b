"""What happens to a layer whose input scales cannot all be used: the user's two options, applied to what was read."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from overlay.errors import OverlayError
from overlay.nvfp4.findings import Finding, listed, note
from overlay.nvfp4.policy import Policy
from overlay.nvfp4.scales import Reading


class ScaleError(OverlayError):
    """A layer has scales that were never loaded or cannot be used, and policy or arithmetic leaves no cure."""


NO_VALUE = "no usable value"
ROUTE = (
    'The checkpoint is weight-only, or its input scales were lost. all_missing = "route" in [patches.nvfp4_moe_scales] '
    "computes such layers with 16-bit activations."
)
REPAIR = 'some_bad = "repair" in [patches.nvfp4_moe_scales] gives them the maximum of the layer\'s valid ones.'


@dataclass(frozen=True)
class Subject:
    """The layer being looked at, in the words of a message."""

    kind: str
    name: str
    rows_are: str

    def note(self, what: str, parameter: str, cure: str, rows: tuple[int, ...] = (), level: int = logging.WARNING):
        note(Finding(self.kind, self.name, what, parameter, cure, rows, self.rows_are, level))

    def refuse(self, what: str, parameter: str, way_out: str, rows: tuple[int, ...] = ()) -> ScaleError:
        which = f", {self.rows_are} {listed(rows)}" if rows else ""
        return ScaleError(f"{self.kind} {self.name}: {what} in {parameter}{which}. {way_out}")

    def refuse_to_change(self, parameters: str, built_for: str) -> ScaleError:
        """For a layer that quantises activations, and whose input scales are missing from what it is reloaded with."""
        way_out = (
            f"The layer was built for {built_for}, which quantises activations, and captured graphs keep it so. Reload "
            "a checkpoint of the kind the engine was started with."
        )
        return self.refuse(f"{NO_VALUE} after a reload", parameters, way_out)


@dataclass(frozen=True)
class Settlement:
    """`route`: the layer cannot quantise activations, for want of what `missing` names.

    Else `values`: what to write, as stored, per parameter.
    """

    route: bool
    values: Mapping[str, torch.Tensor]
    missing: str = ""


def settle(subject: Subject, readings: Mapping[str, Reading], policy: Policy, missing_elsewhere: bool) -> Settlement:
    """Decide what becomes of one layer's input scales; notes every decision but the route, whose backend comes later.

    `missing_elsewhere`: another rank of the same layer has no input scale at all and this rank has to follow it.
    Raises ScaleError where the policy is to refuse.
    """
    missing = [name for name, reading in readings.items() if reading.all_bad]
    if missing or missing_elsewhere:
        named = " and ".join(missing) or "the input scales of another rank"
        if policy.all_missing == "route":
            return Settlement(route=True, values={}, missing=named)
        if policy.all_missing == "refuse":
            raise subject.refuse(NO_VALUE, named, ROUTE)
    values, notes = {}, defaultdict(list)
    for name, reading in readings.items():
        if reading.clean:
            continue
        broken = tuple(sorted(reading.bad + reading.one_sided))
        if broken and not reading.all_bad and policy.some_bad == "refuse":
            raise subject.refuse(NO_VALUE, name, REPAIR, broken)
        values[name] = reading.filled(policy.all_missing) if reading.all_bad else reading.repaired()
        for decision in describe(reading, policy):
            notes[decision].append(name)
    for (what, cure, rows, level), names in notes.items():
        subject.note(what, " and ".join(names), cure, rows, level)
    return Settlement(route=False, values=values)


def describe(reading: Reading, policy: Policy) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """What is done about one parameter that is not clean: (what, cure, rows, level) of a log line."""
    if reading.all_bad:
        yield NO_VALUE, f"set to {policy.all_missing:g} as all_missing says", (), logging.WARNING
        return
    if reading.bad:
        yield NO_VALUE, "repaired by the maximum of the layer's valid scales", reading.bad, logging.WARNING
    if reading.one_sided:
        cure = "repaired by the other half, which reads the same input"
        yield "no usable value for gate or up", cure, reading.one_sided, logging.WARNING
    if reading.elsewhere:
        yield "not loaded, experts of other ranks", "left out of the shared scale", reading.elsewhere, logging.DEBUG
