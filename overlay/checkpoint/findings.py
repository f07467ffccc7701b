"""What is wrong with a checkpoint or a launch, what it would cause, and what cures it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One fault, in words for the person who would serve this.

    `check` is a stable name for tests and tools. An `error` makes a stock vLLM of the tested releases refuse, crash or
    compute wrong numbers; a `warning` costs something or contradicts itself; an `info` is worth knowing. `cure` names
    the patch, the flag or the file that helps, and says so where nothing does.
    """

    check: str
    severity: Severity
    what: str
    consequence: str
    cure: str

    @property
    def stands(self) -> bool:
        """Is it an error that no patch of the overlay cures?"""
        return self.severity == "error" and not self.cure.startswith("patch ")

    @property
    def of_draft_layer(self) -> bool:
        """Does it matter only where the draft layer is loaded (--speculative-config)?"""
        return self.what.startswith("MTP layer")

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def error(check: str, what: str, consequence: str, cure: str) -> Finding:
    return Finding(check, "error", what, consequence, cure)


def warning(check: str, what: str, consequence: str, cure: str) -> Finding:
    return Finding(check, "warning", what, consequence, cure)


def info(check: str, what: str, consequence: str, cure: str) -> Finding:
    return Finding(check, "info", what, consequence, cure)


def numbers(values: Iterable[int], shown: int = 8) -> str:
    """`3-44, 46`: ranges of whole numbers; after `shown` ranges, how many more values there are."""
    ranges: list[list[int]] = []
    for value in sorted(set(values)):
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:shown])
    left = sum(last - first + 1 for first, last in ranges[shown:])
    return f"{text} and {left} more" if left else text


def counted(noun: str, values: Iterable[int]) -> str:
    """`expert 3`, `experts 3-5`."""
    values = set(values)
    return f"{noun}{'s' if len(values) > 1 else ''} {numbers(values)}"


def layers_text(layers: Iterable[int | None]) -> str:
    """`, layers 3-44`, to go after the name of what is in them; empty for modules outside the layers."""
    known = {layer for layer in layers if layer is not None}
    return f", {counted('layer', known)}" if known else ""


def some(names: Sequence[str], shown: int = 4) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
