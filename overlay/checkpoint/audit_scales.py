"""The scale tensors of NVFP4 modules: read, and the weights' own judged. Activation scales are in audit_activations.

What counts as unusable is defined once, in overlay.nvfp4.scales, which the running engine uses as well. That module
works on torch tensors; torch takes two seconds to import, and is imported only where there are scales to judge.
"""

import struct
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from overlay.checkpoint import audit_modules as kinds
from overlay.checkpoint.audit_headers import Tensor, read_bytes
from overlay.checkpoint.audit_modules import GLOBAL_SCALES, INPUT_SCALES, Module
from overlay.checkpoint.audit_storage import Planned
from overlay.checkpoint.findings import Finding, counted, error, layers_text, some, warning

# A stacked scale has one number per expert; anything larger is no global or input scale.
LARGEST = 1 << 16
RECIPROCALS = {"weight_global_scale", "input_global_scale"}  # compressed-tensors stores 1 / scale
PATCH = "patch nvfp4_moe_scales (on by default)"
_FORMATS = {"F64": "d", "F32": "f", "F16": "e"}

# Row (expert, or 0 for a linear module) -> value as stored; None where the tensor is missing.
Rows = Mapping[int, float | None]


@dataclass(frozen=True)
class Scales:
    """The scales of one module of vLLM by projection: of its inputs and (global ones) of its weights.

    A projection that the checkpoint stores fused (`gate_up_proj`, `qkv_proj`) is one projection here, with its one
    scale: vLLM fills every slot of its parameter from that (layers/linear.py), of experts gate's, which it reads.
    Where the parts are stored, each has to have its own: a slot whose part has none is never written.
    """

    planned: Planned
    inputs: Mapping[str, Rows]
    weights: Mapping[str, Rows]
    reciprocal: bool

    @property
    def layer(self) -> int | None:
        return self.planned.runtime.layer

    @property
    def label(self) -> str:
        runtime = self.planned.runtime
        return f"{kinds.MTP}, {runtime.kind}" if runtime.mtp else runtime.kind

    @property
    def routed(self) -> bool:
        return self.planned.runtime.kind == kinds.ROUTED

    def fused(self) -> list[list[str]]:
        """Projections that share one parameter of vLLM: gate and up of experts, all parts of a linear module."""
        return fused(self.inputs, self.routed)


def fused(projections: Iterable[str], routed: bool) -> list[list[str]]:
    """Projections by the parameter of vLLM that their scales are loaded into."""
    names = list(projections)
    down = [name for name in names if routed and name in ("down_proj", "w2")]
    return [group for group in ([name for name in names if name not in down], down) if group]


def read(planned: Iterable[Planned]) -> list[Scales]:
    """The scales of every module that is stored as NVFP4. Raises HeaderError where a file changed meanwhile."""
    nvfp4 = [module for module in planned if any(member.format == "nvfp4" for member in module.runtime.members)]
    wanted = [
        tensor
        for module in nvfp4
        for member in module.runtime.members
        for tensor in (member.scale(GLOBAL_SCALES), member.scale(INPUT_SCALES))
        if tensor is not None and tensor.elements <= LARGEST
    ]
    raw = read_bytes(wanted)
    return [_scales(module, raw) for module in nvfp4]


def _scales(module: Planned, raw: Mapping[str, bytes]) -> Scales:
    inputs: dict[str, dict[int, float | None]] = {}
    weights: dict[str, dict[int, float | None]] = {}
    reciprocal = False
    for member in module.runtime.members:
        if member.format != "nvfp4":
            continue
        projection = member.name.rpartition(".")[2]
        for names, into in ((INPUT_SCALES, inputs), (GLOBAL_SCALES, weights)):
            tensor = member.scale(names)
            reciprocal |= tensor is not None and tensor.name.rpartition(".")[2] in RECIPROCALS
            values = decode(tensor, raw.get(tensor.name)) if tensor else ()
            into.setdefault(projection, {}).update(_rows(member, values))
    return Scales(module, inputs, weights, reciprocal)


def _rows(member: Module, values: Sequence[float]) -> dict[int, float | None]:
    """A module's values by expert: one number for a stack of experts counts for each of them."""
    stack = member.weight.shape[0] if len(member.weight.shape) == 3 else None
    if stack is None:
        return {member.expert or 0: values[0] if values else None}
    if len(values) == 1:
        values = list(values) * stack
    return {row: values[row] if row < len(values) else None for row in range(stack)}


def decode(tensor: Tensor, raw: bytes | None) -> Sequence[float]:
    """The numbers of a float tensor; none for another type, or where there are no bytes."""
    if raw is None:
        return ()
    if tensor.dtype == "BF16":  # the upper half of an F32
        raw = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
        return struct.unpack(f"<{tensor.elements}f", raw)
    code = _FORMATS.get(tensor.dtype)
    return struct.unpack(f"<{tensor.elements}{code}", raw) if code else ()


def unusable_inputs(rows: Rows, reciprocal: bool) -> set[int]:
    """Rows whose activation scale is missing or cannot be computed with."""
    from overlay.nvfp4.scales import usable

    return {row for row, fine in zip(rows, usable(_tensor(rows), reciprocal).tolist(), strict=True) if not fine}


def unusable_weights(rows: Rows, reciprocal: bool) -> set[int]:
    """Rows whose global weight scale is missing or cannot be computed with."""
    from overlay.nvfp4.scales import unusable_weight_scales

    order = list(rows)
    return {order[i] for i in unusable_weight_scales(_tensor(rows), reciprocal)}


def _tensor(rows: Rows):
    import torch

    return torch.tensor([float("nan") if value is None else value for value in rows.values()])


def how(rows: Mapping[Hashable, float | None], bad: Iterable[Hashable]) -> str:
    """In what way the bad values are bad: missing, or the values."""
    values = [rows[row] for row in bad]
    stored = sorted({f"{value:g}" for value in values if value is not None})
    if not stored:
        return "missing"
    return f"{'missing or ' if None in values else ''}unusable ({some(stored, 3)})"


def unusable(values: Mapping[str, Rows], bad: Mapping[str, set[int]], routed: bool) -> list[str]:
    """`missing for gate_proj, up_proj of expert 3`: projections with the same fault in the same rows together."""
    groups: dict[tuple[str, frozenset[int]], list[str]] = {}
    for projection, rows in bad.items():
        if rows:
            groups.setdefault((how(values[projection], rows), frozenset(rows)), []).append(projection)
    return [
        f"{what} for {', '.join(sorted(names))}" + (f" of {counted('expert', rows)}" if routed else "")
        for (what, rows), names in groups.items()
    ]


def findings(scales: Sequence[Scales]) -> list[Finding]:
    """Block and global scales of the weights that are missing, unusable or at odds with each other."""
    members = [m for layer in scales for m in layer.planned.runtime.members if m.format == "nvfp4"]
    return [*_block_scales(members), *_global_scales(scales), *_gates_alone(scales), *_differing(scales)]


def _block_scales(members: Iterable[Module]) -> list[Finding]:
    """Block scales that are missing, or whose shape does not go with the weight's (one per 16 values)."""
    wrong: dict[tuple[str, str], set[int | None]] = {}
    for member in members:
        weight, scale = member.weight, member.parts.get("weight_scale")
        last = member.name.rpartition(".")[2]
        values = weight.shape[-1] * (1 if weight.dtype == "F4" else 2)
        expected = [*weight.shape[:-1], values // 16]
        if scale is None:
            wrong.setdefault((member.kind, f"{last} has no block scales"), set()).add(member.layer)
        elif list(scale.shape) != expected:
            what = f"block scales of {last} have the shape {list(scale.shape)}; {expected} goes with the weight"
            wrong.setdefault((member.kind, what), set()).add(member.layer)
    return [
        error(
            "block_scales",
            f"{kind}{layers_text(where)}: {what}",
            "loading stops at a shape, or the weights are multiplied by uninitialised memory",
            "nothing can restore them: download again, or export again with groups of 16",
        )
        for (kind, what), where in wrong.items()
    ]


def _global_scales(scales: Iterable[Scales]) -> list[Finding]:
    broken: dict[tuple[str, str], set[int | None]] = {}
    for layer in scales:
        alone = served_with_gates(layer)
        bad = {
            projection: unusable_weights(rows, layer.reciprocal)
            for projection, rows in layer.weights.items()
            if projection != alone
        }
        for text in unusable(layer.weights, bad, layer.routed):
            broken.setdefault((layer.label, text), set()).add(layer.layer)
    return [
        error(
            "weight_scale_unusable",
            f"{label}{layers_text(where)}: global weight scale {text}",
            "vLLM multiplies by it, or by its neighbour's instead, without a look: garbage or NaN from this module",
            "nothing can restore it (with the overlay vLLM refuses the layer by name): download again, or export again",
        )
        for (label, text), where in broken.items()
    ]


def served_with_gates(layer: Scales) -> str | None:
    """The name under which routed experts hold up, where no expert has a global weight scale for it and all have
    gate's: vLLM computes both with gate's, whatever up's is (RoutedExperts loads a scale by shard; `[:, 0]` is used).
    """
    for gate, up in (("gate_proj", "up_proj"), ("w1", "w3")):
        rows = [layer.weights.get(name, {}).values() for name in (gate, up)]
        if layer.routed and all(rows) and None not in rows[0] and set(rows[1]) == {None}:
            return up
    return None


def _gates_alone(scales: Iterable[Scales]) -> list[Finding]:
    found: dict[tuple[str, str], set[int | None]] = {}
    for layer in scales:
        if (up := served_with_gates(layer)) is not None:
            found.setdefault((layer.label, up), set()).add(layer.layer)
    return [
        warning(
            "weight_scale_of_gate_alone",
            f"{label}{layers_text(where)}: no expert has a global weight scale for {up}",
            "vLLM computes gate and up with gate's: right where they were quantised with one scale, wrong in silence "
            "where up had another",
            "the overlay computes the same and warns: export again with both, or make sure that they are equal",
        )
        for (label, up), where in found.items()
    ]


def _differing(scales: Iterable[Scales]) -> list[Finding]:
    """Global weight scales that differ within one fused parameter, by kind, with the worst ratio."""
    differing: dict[tuple[str, str], list[tuple[int | None, float]]] = {}
    for layer in scales:
        if ratios := _ratios(layer):
            module = layer.planned.runtime.name.rpartition(".")[2]
            who = counted("expert", ratios) if layer.routed else module
            differing.setdefault((layer.label, who), []).append((layer.layer, max(ratios.values())))
    return [
        error(
            "weight_scales_differ",
            f"{label}{layers_text(layer for layer, _ in found)}: global weight scales of parts that vLLM fuses differ "
            f"by a factor of up to {max(ratio for _, ratio in found):.2f} ({who})",
            "vLLM uses one of them for all parts: the others are off by that factor",
            f"{PATCH} rescales the block scales to the larger one",
        )
        for (label, who), found in differing.items()
    ]


def _ratios(layer: Scales) -> dict[int, float]:
    """Row -> ratio of the largest to the smallest scale of one fused parameter, where it is above 1.1."""
    from overlay.nvfp4.scales import MISMATCH_RATIO

    found = {}
    for group in layer.fused():
        parts = [layer.weights[projection] for projection in group if projection in layer.weights]
        skip = set().union(*(unusable_weights(rows, layer.reciprocal) for rows in parts))
        for row in parts[0].keys() - skip if len(parts) > 1 else ():
            values = [rows[row] for rows in parts if rows.get(row)]
            if len(values) == len(parts) and max(values) > MISMATCH_RATIO * min(values):
                found[row] = max(values) / min(values)
    return found
