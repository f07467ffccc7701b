"""What was found in a model's scales and what was done about it: one log line per kind of layer, with the layers."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlay.checkpoint.findings import numbers
from overlay.log import named

if TYPE_CHECKING:
    import torch

LOG = named("overlay.nvfp4_moe_scales")


@dataclass(frozen=True)
class Finding:
    """One decision about one parameter of one layer. `rows` are the experts or shards concerned; empty: all of them."""

    kind: str
    layer: str
    what: str
    parameter: str
    cure: str
    rows: tuple[int, ...] = ()
    rows_are: str = "experts"
    level: int = logging.WARNING


@dataclass
class Loading:
    """A model whose weights are being processed: its modules' names, and the findings so far."""

    names: dict[int, str] = field(default_factory=dict)
    draft: bool = False
    findings: list[Finding] = field(default_factory=list)


_current: Loading | None = None


@contextmanager
def loading(model: "torch.nn.Module", draft: bool) -> Iterator[None]:
    """Collect the findings of all layers of `model` and write them together, also when one of its layers is refused."""
    global _current
    if _current is not None:
        yield
        return
    _current = Loading({id(module): name for name, module in model.named_modules()}, draft)
    try:
        yield
    finally:
        findings, _current = _current.findings, None
        write(findings)


def note(finding: Finding) -> None:
    """Keep a finding until its model is through; outside of a model's loading, write it at once."""
    if _current is None:
        write([finding])
    else:
        _current.findings.append(finding)


def is_draft() -> bool:
    """Is the model that is being processed the draft model of a speculative configuration?"""
    return _current is not None and _current.draft


def layer_name(layer: "torch.nn.Module") -> str:
    """The name a user knows the layer by; vLLM builds some layers without one."""
    given = getattr(layer, "layer_name", "") or getattr(layer, "prefix", "")
    found = _current.names.get(id(layer), "") if _current is not None else ""
    return given or found or f"a {type(layer).__name__} without a name"


def write(findings: Iterable[Finding]) -> None:
    """One line per kind of layer and cure."""
    groups = defaultdict(list)
    for finding in findings:
        pattern, _ = numbered(finding.layer)
        groups[finding.level, finding.kind, pattern, finding.what, finding.parameter, finding.cure].append(finding)
    for (level, kind, pattern, what, parameter, cure), group in groups.items():
        LOG.log(level, "%s %s: %s in %s%s; %s", kind, place(pattern, group), what, parameter, rows(group), cure)


def numbered(name: str) -> tuple[str, int | None]:
    """``model.layers.7.mlp.experts`` -> (``model.layers.*.mlp.experts``, 7); (name, None) where there is no number."""
    found = re.search(r"(?<=\.)\d+(?=\.|$)", name)
    return (f"{name[: found.start()]}*{name[found.end() :]}", int(found[0])) if found else (name, None)


def place(pattern: str, group: Sequence[Finding]) -> str:
    """The layer's name; several layers of one kind as a pattern and a range."""
    layers = sorted({number for finding in group if (number := numbered(finding.layer)[1]) is not None})
    return f"{pattern}, layers {listed(layers)}" if len(layers) > 1 else group[0].layer


def rows(group: Sequence[Finding]) -> str:
    """The experts or shards, once where every layer has the same ones, else layer by layer."""
    distinct = {finding.rows for finding in group}
    if distinct == {()}:
        return ""
    if len(distinct) == 1:
        return f", {group[0].rows_are} {listed(group[0].rows)}"
    return f" ({'; '.join(f'{name(finding)}: {finding.rows_are} {listed(finding.rows)}' for finding in group)})"


def listed(values: Sequence[int]) -> str:
    """All of them: what is cured by number is said by number."""
    return numbers(values, shown=len(values))


def name(finding: Finding) -> str:
    number = numbered(finding.layer)[1]
    return finding.layer if number is None else f"layer {number}"
