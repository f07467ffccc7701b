"""For child processes that compare wrapped with unwrapped vLLM: the overlay's entries, and one patch taken away."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from overlay import registry, startup
from overlay.registry import Entry


def entry(patch_id: str) -> Entry:
    """The entry of a patch in this process, which must have imported vllm with the overlay in front."""
    return next(entry for entry in startup.current().entries if entry.patch.id == patch_id)


def states() -> dict[str, str]:
    return {entry.patch.id: str(entry.state) for entry in startup.current().entries}


@contextmanager
def without(patch_id: str) -> Iterator[None]:
    """Stock behaviour inside, the patch on the same modules again afterwards."""
    found = entry(patch_id)
    modules = list(found.modules)
    assert modules, f"{patch_id} is {found.state} ({found.reason}): there is nothing to compare"
    registry.remove(found)
    try:
        yield
    finally:
        for name in modules:
            registry.apply(found, importlib.import_module(name))
