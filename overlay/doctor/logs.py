"""Known failure lines in a boot log: what caused them, as far as somebody has established it, and what cures them."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("failures.toml")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SURE = {"established": "cause", "possible": "possible cause", "unknown": "cause not known"}


@dataclass(frozen=True)
class Cause:
    sure: str
    is_: str
    cure: str


@dataclass(frozen=True)
class Failure:
    """An entry of failures.toml, with its patterns compiled."""

    id: str
    lines: tuple[re.Pattern, ...]
    causes: tuple[Cause, ...]
    source: str
    # opening, closing and error line of something that must be going on; None where that does not matter
    during: tuple[re.Pattern, re.Pattern, re.Pattern] | None


@dataclass(frozen=True)
class Match:
    """A failure found in a log, with the number (from 1) and text of the first line of each pattern."""

    failure: Failure
    where: tuple[tuple[int, str], ...]

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.failure.id,
            "lines": [{"number": number, "text": text} for number, text in self.where],
            "causes": [{"sure": cause.sure, "cause": cause.is_, "cure": cause.cure} for cause in self.failure.causes],
            "source": self.failure.source,
        }


@cache
def failures() -> tuple[Failure, ...]:
    """Every known failure, in the order of the file."""
    return tuple(_failure(entry) for entry in tomllib.loads(FILE.read_text(encoding="utf-8"))["failure"])


def _failure(entry: dict) -> Failure:
    going_on = [entry[key] for key in ("open", "close", "error") if key in entry]
    return Failure(
        id=entry["id"],
        lines=tuple(map(re.compile, entry["lines"])),
        causes=tuple(Cause(cause["sure"], cause["is"], cause["cure"]) for cause in entry["cause"]),
        source=entry["source"],
        during=tuple(map(re.compile, going_on)) if going_on else None,
    )


def examine(text: str) -> list[Match]:
    """The known failures in a log."""
    lines = [_COLOURS.sub("", line) for line in text.splitlines()]
    found = (_match(failure, lines) for failure in failures())
    return [match for match in found if match is not None]


def _match(failure: Failure, lines: Sequence[str]) -> Match | None:
    where = []
    for pattern in failure.lines:
        number = next((number for number, line in enumerate(lines) if pattern.search(line)), None)
        if number is None:
            return None
        where.append((number + 1, lines[number].strip()))
    if failure.during is not None and not _going_on(failure.during, lines[: where[0][0] - 1]):
        return None
    return Match(failure, tuple(where))


def _going_on(during: tuple[re.Pattern, re.Pattern, re.Pattern], before: Sequence[str]) -> bool:
    """Was it opened more often than closed (each worker writes both), with no error since?"""
    opening, closing, error = during
    opened = [number for number, line in enumerate(before) if opening.search(line)]
    closed = sum(1 for line in before if closing.search(line))
    return len(opened) > closed and not any(error.search(line) for line in before[opened[-1] :])


def as_text(matches: Sequence[Match]) -> str:
    """The matches in words; `not known` where there are none."""
    if not matches:
        return "not known: no line of this log is one whose cause has been established"
    blocks = []
    for match in matches:
        lines = [match.failure.id, *(f"  line {number}: {text}" for number, text in match.where)]
        several = len(match.failure.causes) > 1
        for number, cause in enumerate(match.failure.causes, 1):
            label = SURE[cause.sure] + (f" {number} of {len(match.failure.causes)}" if several else "")
            lines += [f"  {label}: {cause.is_}", f"  cure: {cause.cure}"]
        blocks.append("\n".join([*lines, f"  source: {match.failure.source}"]))
    return "\n\n".join(blocks)
