"""What happens at `import vllm`: read the configuration, decide about every patch, hook their modules, say so.

Order matters: everything is checked before anything is changed, so that vLLM is either patched as asked or not started.
"""

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType

from overlay import hooks
from overlay.errors import OverlayError

if sys.version_info < (3, 11):  # noqa: UP036 - whoever sets PYTHONPATH may run an older Python
    raise OverlayError(
        f"the overlay needs Python 3.11 or newer, this is {sys.version.split()[0]}; OVERLAY_DISABLE=1 runs without"
    )

_lock = threading.Lock()
_failure: OverlayError | None = None
_overlay: "ArmedOverlay | None" = None


@dataclass(frozen=True)
class ArmedOverlay:
    """This process's overlay: its configuration, its patches with their states, and the vLLM it found."""

    config: object
    entries: list
    sources: object
    hardware: object
    fingerprint: str


def current() -> ArmedOverlay | None:
    """The overlay of this process; None before vLLM was imported, or without the overlay in front."""
    return _overlay


def find_vllm(finder: object, path: object, target: object):
    """vLLM's own spec with `arm` in front of its execution. Looking for vLLM without importing it arms nothing."""
    if hooks.searching("vllm"):
        return None
    spec = hooks.find_spec(finder, "vllm", path, target)
    if spec is not None and spec.origin is None:
        spec.loader = Namespace(spec.submodule_search_locations or ())
    elif spec is not None and spec.loader is not None:
        spec.loader = hooks.Loader(spec.loader, lambda: arm(spec), _after_leaf)
    return spec


class Namespace:
    """Loader of a folder that is called vllm and has no __init__.py: Python would import modules from it unchecked."""

    def __init__(self, folders: Iterable[str]) -> None:
        self.folders = list(folders)

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise OverlayError(
            f"vllm is being imported from a folder without __init__.py: {', '.join(self.folders)}\n"
            "  an installation that was cut short (install vllm again), or another folder of that name on the path; "
            "OVERLAY_DISABLE=1 imports it all the same"
        )


def arm(spec: ModuleSpec) -> None:
    """Decide about every patch and hook what is wanted; raises one OverlayError, and again at every later import.

    `spec` is the package that is about to be executed: it is the one that is checked.
    """
    global _failure, _overlay
    with _lock:
        if _failure is not None:
            raise _failure
        if _overlay is not None:
            return
        try:
            _overlay = _arm(spec)
        except OverlayError as error:
            _failure = error
            raise
        except Exception as error:
            _failure = OverlayError(
                f"the overlay itself failed at {type(error).__name__}: {error}\n"
                "  its checkout may be incomplete; OVERLAY_DISABLE=1 runs vLLM without it"
            )
            raise _failure from error


def _arm(spec: ModuleSpec) -> ArmedOverlay:
    from overlay import carried, config, live, log, registry
    from overlay.fingerprint import fingerprint
    from overlay.hardware import Hardware
    from overlay.sources import VllmSources

    carried.extend_path()
    patches = list(registry.declarations())
    settings = config.load(patches)
    log.configure(settings.log)
    sources, hardware = VllmSources.of(spec), Hardware()
    if sources is None:
        raise OverlayError(
            f"vllm is being imported from {spec.origin}, which is not the __init__.py of a folder of Python files; it "
            "cannot be checked. OVERLAY_DISABLE=1 imports it all the same"
        )
    entries = registry.decide(patches, settings, sources, hardware)
    overlay = ArmedOverlay(settings, entries, sources, hardware, fingerprint(entries))
    for entry in entries:
        if entry.state is registry.State.FAILED:
            if settings.strict:
                raise entry.failure()
            log.logger.error("%s", entry.failure())
    sys.meta_path.insert(0, hooks.LeafFinder(_before_leaf, _after_leaf, _hooked_modules(entries)))
    log.logger.info("%s", summary(overlay))
    if not sources.tested:
        log.logger.warning("vllm %s is outside the tested releases: patches go by signature and probe", sources.version)
    for entry in entries:
        log.logger.debug("%s: %s: %s", entry.patch.id, entry.state, entry.reason)
    live.publish(lambda: report(overlay))
    return overlay


def report(overlay: ArmedOverlay) -> dict[str, object]:
    """What `status --live` reads of this process."""
    return {
        "vllm": overlay.sources.version,
        "fingerprint": overlay.fingerprint,
        "patches": {entry.patch.id: str(entry.state) for entry in overlay.entries},
    }


def summary(overlay: ArmedOverlay) -> str:
    """`3 armed, 4 retired, 1 off (vllm 0.33.0, sm_121)`."""
    from overlay.registry import State

    order = (State.ARMED, State.ACTIVE, State.RETIRED, State.OFF, State.FAILED)
    counts = ((state, sum(entry.state is state for entry in overlay.entries)) for state in order)
    states = ", ".join(f"{count} {state}" for state, count in counts if count)
    return f"{states or 'no patches'} (vllm {overlay.sources.version}, {overlay.hardware.architecture})"


def _hooked_modules(entries: list) -> set[str]:
    return {module for entry in entries if entry.on for module in entry.patch.apply if module != "vllm"}


def _entries_for(module: str) -> list:
    return [entry for entry in _overlay.entries if module in entry.patch.apply] if _overlay else []


def _before_leaf(module: str) -> None:
    """Refuse to execute a module again after a patch failed on it."""
    from overlay.registry import State

    for entry in _entries_for(module):
        if entry.state is State.FAILED and _overlay.config.strict:
            raise entry.failure()


def _after_leaf(module: ModuleType) -> None:
    from overlay import live, log, registry

    for entry in _entries_for(module.__name__):
        if not entry.on:
            continue
        try:
            registry.apply(entry, module)
        except OverlayError as error:
            if _overlay.config.strict:
                raise
            log.logger.error("%s", error)
        else:
            log.logger.debug("%s: %s at %s", entry.patch.id, entry.state, module.__name__)
    live.refresh()
