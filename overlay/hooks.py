"""Runs a function right after a chosen module has been executed, and makes a failure stick.

A hook that raises would fail one import and leave the next to succeed with an unpatched module. Here the failure is
kept: every later import of that module raises it again, before the module is executed.
"""

import sys
import threading
from collections.abc import Callable
from types import ModuleType

_searching = threading.local()


def find_spec(finder: object, name: str, path: object, target: object):
    """The spec that the other finders on the meta path give for `name`.

    Import hooks of other tools (wrapt's among them) search the whole meta path again from inside their own search:
    `finder` must then answer nothing, or the two would call each other for ever. It does, by asking `searching`.
    """
    names = _searching.__dict__.setdefault("names", set())
    names.add(name)
    try:
        for other in list(sys.meta_path):
            if other is not finder and hasattr(other, "find_spec"):
                spec = other.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None
    finally:
        names.discard(name)


def searching(name: str) -> bool:
    return name in getattr(_searching, "names", ())


class Loader:
    """The module's own loader, with a function before the module's execution and one after it."""

    def __init__(self, loader: object, before: Callable[[], None], after: Callable[[ModuleType], None]) -> None:
        self._loader, self._before, self._after = loader, before, after

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: object) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._before()
        # inspect, pickle and importlib.resources look at these: they find what would be there without us.
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._after(module)


class LeafFinder:
    """Meta-path finder that hooks a fixed set of modules."""

    def __init__(self, before: Callable[[str], None], after: Callable[[ModuleType], None], modules: set[str]) -> None:
        self._before, self._after, self.modules = before, after, modules

    def find_spec(self, name: str, path: object = None, target: object = None):
        if name not in self.modules or searching(name):
            return None
        spec = find_spec(self, name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, lambda: self._before(name), self._after)
        return spec
