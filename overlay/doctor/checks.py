"""The checks by name, in the order of the report, and how one is run: whatever goes wrong in it becomes its result."""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

from overlay import config, registry
from overlay.config import Config
from overlay.doctor import probe
from overlay.hardware import Hardware
from overlay.registry import Entry
from overlay.sources import VllmSources

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Outcome:
    """What a check found; `fix` is empty where nothing is to be done."""

    status: Status
    what: str
    fix: str = ""


def passed(what: str) -> Outcome:
    return Outcome("pass", what)


def warned(what: str, fix: str) -> Outcome:
    return Outcome("warn", what, fix)


def failed(what: str, fix: str) -> Outcome:
    return Outcome("fail", what, fix)


@dataclass(frozen=True)
class Result:
    """An outcome with the name of its check. Only required checks make the doctor's exit status 1."""

    name: str
    required: bool
    status: Status
    what: str
    fix: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class Surroundings:
    """What several checks look at, found out once and only when one of them asks."""

    @cached_property
    def sources(self) -> VllmSources | None:
        return VllmSources.find()

    @cached_property
    def hardware(self) -> Hardware:
        return Hardware()

    @cached_property
    def config(self) -> Config:
        """Raises ConfigError."""
        return config.load(list(registry.declarations()))

    @cached_property
    def entries(self) -> list[Entry]:
        """Raises ConfigError, and LookupError where vLLM is not installed."""
        if self.sources is None:
            raise LookupError("vLLM is not installed in this Python")
        return registry.decide(list(registry.declarations()), self.config, self.sources, self.hardware)

    @cached_property
    def loaded(self) -> dict[str, object]:
        """The answer of `overlay.doctor.probe` in a process of its own, where CuPy, torch and the driver are loaded."""
        return probe.ask()


@dataclass(frozen=True)
class Check:
    name: str
    required: bool
    run: Callable[[Surroundings], Outcome]


def perform(checks: Collection[Check], around: Surroundings) -> list[Result]:
    """Run the checks in their order; raises nothing."""
    return [_perform(check, around) for check in checks]


def _perform(check: Check, around: Surroundings) -> Result:
    try:
        outcome = check.run(around)
    except Exception as problem:
        # The report is most needed on machines where something unforeseen is broken.
        outcome = failed(f"the check itself failed: {type(problem).__name__}: {problem}", "say so in an issue")
    return Result(check.name, check.required, outcome.status, outcome.what, outcome.fix)
