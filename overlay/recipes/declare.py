"""What a recipe is made of."""

from collections.abc import Iterable
from dataclasses import dataclass

from overlay.errors import OverlayError

Release = tuple[int, int]

# The vLLM releases whose argument parsers the recipes were checked against.
RELEASES: tuple[Release, ...] = ((0, 30), (0, 31), (0, 32), (0, 33))


class RecipeError(OverlayError):
    """No such recipe, or none for that vLLM."""


@dataclass(frozen=True)
class Setting:
    """An environment variable (`NAME=value`) or a flag of `vllm serve` with its value, and why it is there.

    `since` is the first release it is for, `before` the first it is not for.
    """

    text: str
    why: str
    since: Release | None = None
    before: Release | None = None

    def applies(self, release: Release) -> bool:
        return (self.since is None or release >= self.since) and (self.before is None or release < self.before)


@dataclass(frozen=True)
class Report:
    """A figure that somebody published about this model on such a box."""

    figure: str
    setup: str
    by: str
    when: str


@dataclass(frozen=True)
class Recipe:
    """One box: `gpus` cards of `memory` GiB each, `nodes` machines, and what to type."""

    name: str
    title: str
    gpus: int
    nodes: int
    capability: tuple[int, int]
    memory: float
    memory_source: str
    utilization: float
    environment: tuple[Setting, ...]
    flags: tuple[Setting, ...]
    draft_tokens: int
    reports: tuple[Report, ...]
    notes: tuple[str, ...]

    def environment_for(self, release: Release) -> list[Setting]:
        return [setting for setting in self.environment if setting.applies(release)]

    def flags_for(self, release: Release) -> list[Setting]:
        return [setting for setting in self.flags if setting.applies(release)]


def dotted(release: Iterable[int]) -> str:
    """(0, 33) -> "0.33"."""
    return ".".join(map(str, release))
