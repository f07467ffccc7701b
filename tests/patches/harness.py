"""For child processes that compare wrapped with unwrapped vLLM: the overlay's entries, and one patch taken away."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from overlay import registry, startup
from overlay.registry import Entry


def entry(patch_id: str) -> Entry:
    """The entry of a patch in this process, which must have imported vllm with the overlay in front."""
    return next(entry for entry in startup.current().entries if entry.patch.id == patch_id)


@contextmanager
def without(patch_id: str) -> Iterator[None]:
    """Stock behaviour inside, the patch on the same modules again afterwards.

    Later patches on one of its modules go and come with it: what they changed may lie on top of what it changed.
    """
    first = entry(patch_id)
    assert first.modules, f"{patch_id} is {first.state} ({first.reason}): there is nothing to compare"
    entries = startup.current().entries
    above = [e for e in entries[entries.index(first) + 1 :] if set(e.modules) & set(first.modules)]
    taken = [(e, list(e.modules)) for e in (first, *above)]
    for e, _ in reversed(taken):
        registry.remove(e)
    try:
        yield
    finally:
        for e, modules in taken:
            for name in modules:
                registry.apply(e, importlib.import_module(name))
