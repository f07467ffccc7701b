"""Import hooks and the registry, with small packages and synthetic patches in this process."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from overlay import hooks, registry
from overlay.config import Config, PatchSettings
from overlay.context import Context
from overlay.declare import NotNeeded, Patch, Target, absent, impossible, present
from overlay.errors import PatchError
from overlay.hardware import Hardware
from overlay.registry import Entry, State
from overlay.sources import VllmSources

LEAF = """
runs = globals().get("runs", 0) + 1
class Selector:
    @classmethod
    def choose(cls, a, b=1): return ("stock", a, b)
def pick(a): return ("stock", a)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "leafpkg").mkdir()
    (tmp_path / "leafpkg/__init__.py").write_text("")
    (tmp_path / "leafpkg/leaf.py").write_text(LEAF)
    (tmp_path / "_version.py").write_text("__version__ = version = '0.33.0'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, hooks.LeafFinder)]
    for name in [name for name in sys.modules if name.startswith("leafpkg")]:
        del sys.modules[name]


def hook(after: Callable[[ModuleType], None], before: Callable[[str], None] = lambda name: None) -> None:
    sys.meta_path.insert(0, hooks.LeafFinder(before, after, {"leafpkg.leaf"}))


def test_the_function_runs_once_after_the_module_and_leaves_its_loader_as_it_was(package: Path):
    seen = []
    hook(lambda module: seen.append(module.pick(1)))
    module = importlib.import_module("leafpkg.leaf")
    importlib.import_module("leafpkg.leaf")
    assert seen == [("stock", 1)]
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_reload_runs_it_again(package: Path):
    seen = []
    hook(lambda module: seen.append(module.runs))
    importlib.reload(importlib.import_module("leafpkg.leaf"))
    assert seen == [1, 2]


def test_a_failure_fails_the_import(package: Path):
    def fail(module: ModuleType) -> None:
        raise PatchError("no")

    hook(fail)
    for _ in range(2):
        with pytest.raises(PatchError):
            importlib.import_module("leafpkg.leaf")


@pytest.mark.parametrize("theirs_first", [True, False])
def test_another_tools_post_import_hook_on_the_same_module(package: Path, theirs_first: bool):
    import wrapt

    seen = []

    def theirs() -> None:
        wrapt.register_post_import_hook(lambda module: seen.append("theirs"), "leafpkg.leaf")

    steps = [theirs, lambda: hook(lambda module: seen.append("ours"))]
    for step in steps if theirs_first else reversed(steps):
        step()
    importlib.import_module("leafpkg.leaf")
    assert sorted(seen) == ["ours", "theirs"]


def entry(package: Path, apply: Callable[[ModuleType, Context], None], **declared: object) -> Entry:
    patch = Patch(
        **{
            "id": "test", "title": "a test", "why": "", "how": "", "upstream": (), "until": "", "targets": (),
            "probe": lambda ctx: present("here"), "apply": {"leafpkg.leaf": apply}, **declared,
        }
    )  # fmt: skip
    settings = PatchSettings(declared.get("default", "auto"), "default", {})
    config = Config(package / "x.toml", True, "info", {"test": settings})
    return registry.decide([patch], config, VllmSources(package), Hardware())[0]


def loud(wrapped: Callable, instance: object, args: tuple, kwargs: dict) -> tuple:
    return ("wrapped", *wrapped(*args, **kwargs))


def test_wrap_and_remove(package: Path):
    def apply(module: ModuleType, ctx: Context) -> None:
        ctx.wrap(module, "Selector.choose", loud)
        ctx.wrap(module, "pick", loud)
        ctx.replace(module, "added", 7)

    e = entry(package, apply)
    module = importlib.import_module("leafpkg.leaf")
    stock = vars(module.Selector)["choose"]
    registry.apply(e, module)
    assert e.state is State.ACTIVE and e.modules == ["leafpkg.leaf"]
    assert module.Selector.choose(1, b=2) == ("wrapped", "stock", 1, 2)
    assert module.pick(3) == ("wrapped", "stock", 3) and module.added == 7
    registry.remove(e)
    assert module.Selector.choose(1) == ("stock", 1, 1) and module.pick(3) == ("stock", 3)
    assert vars(module.Selector)["choose"] is stock and not hasattr(module, "added")


def test_removal_leaves_the_wrapper_that_another_tool_put_around_ours(package: Path):
    import wrapt

    e = entry(package, lambda module, ctx: ctx.wrap(module, "pick", loud))
    module = importlib.import_module("leafpkg.leaf")
    registry.apply(e, module)
    wrapt.wrap_function_wrapper(module, "pick", lambda wrapped, instance, args, kwargs: ("other", *wrapped(*args)))
    assert module.pick(1) == ("other", "wrapped", "stock", 1)
    registry.remove(e)
    assert module.pick(1) == ("other", "stock", 1)


def test_a_failure_half_way_takes_back_what_was_done(package: Path):
    def apply(module: ModuleType, ctx: Context) -> None:
        ctx.wrap(module, "pick", loud)
        raise KeyError("second target")

    e = entry(package, apply)
    module = importlib.import_module("leafpkg.leaf")
    with pytest.raises(PatchError, match=r"leafpkg.leaf: KeyError: 'second target'"):
        registry.apply(e, module)
    assert e.state is State.FAILED and module.pick(1) == ("stock", 1)


def test_a_binding_taken_before_us_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module("leafpkg.leaf")
    stale = ModuleType("vllm.stale")
    stale.pick = module.pick
    monkeypatch.setitem(sys.modules, "vllm.stale", stale)
    e = entry(package, lambda module, ctx: ctx.wrap(module, "pick", loud))
    with pytest.raises(PatchError, match=r"leafpkg.leaf.pick was taken over by vllm.stale"):
        registry.apply(e, module)


@pytest.mark.parametrize(("switch", "state"), [("auto", State.RETIRED), (True, State.FAILED)])
def test_not_needed_after_all(package: Path, switch: object, state: State):
    def apply(module: ModuleType, ctx: Context) -> None:
        raise NotNeeded("the installed class does it")

    e = entry(package, apply, default=switch)
    module = importlib.import_module("leafpkg.leaf")
    if switch is True:
        with pytest.raises(PatchError, match="the installed class does it"):
            registry.apply(e, module)
    else:
        registry.apply(e, module)
    assert e.state is state


@pytest.mark.parametrize(
    ("verdict", "switch", "state"),
    [
        (present("x"), "auto", State.ARMED), (present("x"), True, State.ARMED), (present("x"), False, State.OFF),
        (absent("x"), "auto", State.RETIRED), (absent("x"), True, State.ARMED), (absent("x"), False, State.OFF),
        (impossible("x"), "auto", State.FAILED), (impossible("x"), True, State.FAILED),
    ],
)  # fmt: skip
def test_switch_and_verdict_give_the_state(package: Path, verdict: object, switch: object, state: State):
    assert entry(package, lambda m, c: None, probe=lambda ctx: verdict, default=switch).state is state


def test_a_probe_that_raises_is_a_failure_and_not_a_crash(package: Path):
    def probe(ctx: Context) -> None:
        raise ZeroDivisionError("oops")

    e = entry(package, lambda m, c: None, probe=probe)
    assert e.state is State.FAILED and "its probe raised ZeroDivisionError: oops" in e.reason


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (Target("vllm.leafpkg.leaf", "pick", ("(a)",)), None),
        (Target("vllm.leafpkg.leaf", "Selector.choose", ("(cls)", "(cls, a, b=...)")), None),
        (Target("vllm.leafpkg.leaf", "Selector"), None),
        (Target("vllm.leafpkg.leaf", "runs"), None),
        (Target("vllm.leafpkg.leaf", "gone", optional=True), None),
        (Target("vllm.nowhere", "gone", optional=True), None),
        (Target("vllm.leafpkg.leaf", "gone"), "does not define gone"),
        (Target("vllm.nowhere", "gone"), "there is no module vllm.nowhere"),
        (Target("vllm.leafpkg.leaf", "pick", ("(b)",), optional=True), "expected: (b)\n    found:    (a)"),
        (Target("vllm.leafpkg.leaf", "Selector", ("(a)",)), "found:    not a function"),
    ],
)
def test_targets_are_checked_in_the_source(package: Path, target: Target, said: str | None):
    e = entry(package, lambda m, c: None, targets=(target,))
    assert e.state is (State.FAILED if said else State.ARMED)
    assert (said or "") in e.reason
