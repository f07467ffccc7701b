"""What a patch module declares: its fault, targets, options, probe, and what it does when its module is there.

A patch knows its own targets and nothing of the other patches. The registry decides whether it is wanted; a patch
decides, from the installed sources and the hardware, whether its fault is present.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from overlay.context import Context

Switch = Literal["auto"] | bool
OptionType = type | tuple[type, ...]


@dataclass(frozen=True)
class Option:
    """One key of a patch's TOML table: a plain value of `type` (or one of several).

    A text is one of `choices`, where there are some; a number lies in `limits`, both ends included.
    """

    name: str
    type: OptionType
    default: object
    doc: str
    choices: tuple[object, ...] = ()
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Target:
    """A function, class or attribute of vLLM that a patch touches, with the signatures that it was written for.

    `signatures` are in the normal form of `sources.normal_signature`: annotations dropped, defaults as `...`. Empty for
    classes and attributes. `optional` targets may be absent (some supported releases lack them); they may not differ.
    """

    module: str
    qualname: str
    signatures: tuple[str, ...] = ()
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Verdict:
    """What a probe found: the fault is `present`, `absent` (not needed), or `impossible` to cure here."""

    kind: Literal["present", "absent", "impossible"]
    reason: str


def present(reason: str) -> Verdict:
    return Verdict("present", reason)


def absent(reason: str) -> Verdict:
    return Verdict("absent", reason)


def impossible(reason: str) -> Verdict:
    return Verdict("impossible", reason)


class NotNeeded(Exception):
    """Raised by an apply function that finds, now that the module is there, that its fault is not."""


@dataclass(frozen=True)
class Patch:
    """A fault of vLLM and its cure.

    `why` names the fault and its symptom, `how` the seam and the cure, `until` what makes the patch unnecessary.
    `probe` runs at `import vllm`, before any of vLLM's modules, and must import none of vllm, torch, wrapt and cupy.
    `apply` maps a module name to the function that is called with that module, right after Python has executed it.
    """

    id: str
    title: str
    why: str
    how: str
    upstream: tuple[str, ...]
    until: str
    targets: tuple[Target, ...]
    probe: Callable[["Context"], Verdict]
    apply: Mapping[str, Callable[[ModuleType, "Context"], None]]
    options: tuple[Option, ...] = ()
    default: Switch = "auto"
    requires: tuple[str, ...] = field(default=("wrapt",))
