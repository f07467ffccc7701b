"""The patches in their order, what each is to do in this process, and what it has done."""

import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType

from overlay import carried
from overlay.config import Config, PatchSettings
from overlay.context import Context
from overlay.declare import NotNeeded, Patch, Target
from overlay.errors import PatchError
from overlay.hardware import Hardware
from overlay.packages import PACKAGES
from overlay.sources import VllmSources

# Order of the table in the documentation, and of application where two patches hook one module.
PATCH_IDS: tuple[str, ...] = (
    "sparse_mla",
    "nvfp4_moe_scales",
    "indexer_bounds",
    "prefill_profile",
    "indexer_topk",
    "kda_pdl",
    "flashinfer_fa2",
    "rope_pad",
    "kpool_block_size",
    "cudagraph_defaults",
    "integrated_memory",
    "indexer_workspace",
    "flashinfer_probe",
    "compile_cache",
    "process_proof",
)


class State(StrEnum):
    """Where a patch stands in this process."""

    OFF = "off"
    ARMED = "armed"
    ACTIVE = "active"
    RETIRED = "retired"
    FAILED = "failed"


@dataclass
class Entry:
    """A patch with its state. `decided` is the state before any of its modules was imported, equal in all processes of
    an engine; `modules` holds those that were wrapped in this one."""

    patch: Patch
    context: Context
    state: State
    reason: str
    decided: State = field(init=False)
    modules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decided = self.state

    @property
    def on(self) -> bool:
        return self.state in (State.ARMED, State.ACTIVE)

    def astray(self) -> str | None:
        """Why this patch does not do in this process what was decided for it; None where it does.

        A module that was not imported is none of these: not every process needs every module.
        """
        if self.state is State.FAILED and self.decided is not State.FAILED:
            return f"it failed: {self.reason}"
        unseen = [name for name in self.patch.apply if name in sys.modules and name not in self.modules]
        if self.on and unseen:
            return f"{', '.join(unseen)} was imported past it, by another import hook or before vllm"
        return None

    def failure(self) -> PatchError:
        """The one message a user sees: which patch, which target, what is wrong, how to go on without it."""
        name = self.patch.id
        return PatchError(
            f"patch {name} is wanted and cannot be applied to vLLM {self.context.vllm_version}: {self.reason}\n"
            f"  what it cures: {self.patch.title}\n"
            f"  to run without it: OVERLAY_PATCHES={name}=false, or enabled = false in [patches.{name}]"
        )


def declarations() -> Iterator[Patch]:
    """Import and return every patch's declaration; none of them imports vllm, torch, wrapt or cupy."""
    for patch_id in PATCH_IDS:
        yield importlib.import_module(f"overlay.patches.{patch_id}").PATCH


def decide(patches: Iterable[Patch], config: Config, sources: VllmSources, hardware: Hardware) -> list[Entry]:
    """Give every patch its state before any of vLLM's modules is imported; raises nothing, failures are a state."""
    return [_decide(patch, config.patches[patch.id], sources, hardware) for patch in patches]


def decide_again(entries: Iterable[Entry], hardware: Hardware) -> list[Entry]:
    """What `decide` would have answered in this process with other GPUs; changes nothing."""
    return [
        _decide(
            entry.patch,
            PatchSettings(entry.context.wanted, "decided again", entry.context.options),
            entry.context.sources,
            hardware,
        )
        for entry in entries
    ]


def _decide(patch: Patch, settings: PatchSettings, sources: VllmSources, hardware: Hardware) -> Entry:
    context = Context(patch.id, settings.options, settings.switch, sources, hardware)
    if settings.switch is False:
        return Entry(patch, context, State.OFF, f"switched off ({settings.origin})")
    try:
        verdict = patch.probe(context)
    except Exception as error:
        return Entry(patch, context, State.FAILED, f"its probe raised {type(error).__name__}: {error}")
    if verdict.kind == "absent" and settings.switch == "auto":
        return Entry(patch, context, State.RETIRED, verdict.reason)
    if verdict.kind == "impossible":
        return Entry(patch, context, State.FAILED, verdict.reason)
    try:
        problem = next(filter(None, (_mismatch(target, sources) for target in patch.targets)), None) or _missing(patch)
    except Exception as error:  # a file of vLLM's that is no Python, most often: an installation that was cut short
        problem = f"its targets cannot be checked: {type(error).__name__}: {error}"
    if problem:
        return Entry(patch, context, State.FAILED, problem)
    return Entry(patch, context, State.ARMED, verdict.reason)


def _mismatch(target: Target, sources: VllmSources) -> str | None:
    """What is wrong with a target in the installed sources, with both signatures; None where it is as expected."""
    if sources.definition(target.module, target.qualname) is None:
        where = sources.path(target.module)
        what = f"{where} does not define {target.qualname}" if where else f"there is no module {target.module}"
        return None if target.optional else f"target {target}: {what}"
    if not target.signatures:
        return None
    found = sources.signature(target.module, target.qualname)
    if found in target.signatures:
        return None
    expected = "\n              or ".join(target.signatures)
    return f"target {target} has changed\n    expected: {expected}\n    found:    {found or 'not a function'}"


def _missing(patch: Patch) -> str | None:
    """Names the first package that the patch needs and this Python lacks, or has too old a version of."""
    if problem := next(filter(None, (PACKAGES[package].problem() for package in patch.requires)), None):
        bundles = carried.others()
        return f"{problem} (the bundle's are for {', '.join(bundles)}; this is {carried.tag()})" if bundles else problem
    return None


def apply(entry: Entry, module: ModuleType) -> None:
    """Let one patch change a module that was just executed. Raises PatchError; what it had changed is taken back."""
    try:
        entry.patch.apply[module.__name__](module, entry.context)
    except NotNeeded as finding:
        entry.context.roll_back()
        if entry.context.wanted == "auto":
            entry.state, entry.reason = State.RETIRED, str(finding)
            return
        entry.state, entry.reason = State.FAILED, f"{module.__name__}: {finding}"
        raise entry.failure() from finding
    except Exception as error:
        entry.context.roll_back()
        entry.state, entry.reason = State.FAILED, f"{module.__name__}: {type(error).__name__}: {error}"
        raise entry.failure() from error
    entry.state = State.ACTIVE
    if module.__name__ not in entry.modules:
        entry.modules.append(module.__name__)


def remove(entry: Entry) -> None:
    """Take a patch's changes back, for tests that compare both behaviours in one process."""
    entry.context.roll_back()
    entry.modules.clear()
    entry.state, entry.reason = State.OFF, "removed"
