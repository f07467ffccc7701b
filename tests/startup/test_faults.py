"""Installations and surroundings that are broken in one way: vLLM is patched, or refused by name, never just served."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from overlay import hooks, registry
from overlay.context import Context
from overlay.sources import VllmSources
from tests.startup.standin import PYTHON, ROOT, environment, make
from tests.startup.test_hooks import entry, loud, package  # noqa: F401

TWICE = """
for attempt in range(2):
    try:
        import vllm
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("imported")
"""


def run(code: str, *paths: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    env = environment(ROOT, *paths, **settings)
    return subprocess.run([PYTHON, "-c", code], env=env, capture_output=True, text=True, timeout=120)


# --- vLLM half installed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "error"),
    [("def broken(:\n", "SyntaxError"), ("x = '\udcff'\n".encode("utf-8", "surrogateescape"), "UnicodeDecodeError")],
)
def test_a_file_that_is_no_python_stops_vllm_and_names_the_patch(tmp_path: Path, damage: str | bytes, error: str):
    """A download that was cut, or a disk that was full: the checks themselves cannot be made."""
    site = make(tmp_path, {"platforms/cuda.py": ""})
    content = damage if isinstance(damage, bytes) else damage.encode()
    (site / "vllm/platforms/cuda.py").write_bytes(content)
    done = run(TWICE, site, OVERLAY_PATCHES="sparse_mla=true")
    assert done.stdout.count("PatchError: patch sparse_mla is wanted and cannot be applied") == 2
    assert error in done.stdout and "OVERLAY_PATCHES=sparse_mla=false" in done.stdout


def test_without_its_version_file_vllm_goes_by_its_sources(tmp_path: Path):
    site = make(tmp_path)
    (site / "vllm/_version.py").unlink()
    done = run(TWICE, site)
    assert done.stdout.split() == ["imported", "imported"]
    assert "vllm unknown is outside the tested releases" in done.stderr


def test_a_vllm_without_its_init_file_is_refused(tmp_path: Path):
    """Python takes such a folder for a namespace: its modules can be imported, and nothing has checked them."""
    site = make(tmp_path)
    (site / "vllm/__init__.py").unlink()
    code = "import sys\nsys.path = [p for p in sys.path if 'site-packages' not in p]\n"
    for statement in ("import vllm", "import vllm.logger", "from vllm.platforms import cuda"):
        done = run(f"{code}{statement}", site)
        assert done.returncode == 1
        assert "OverlayError: vllm is being imported from a folder without __init__.py" in done.stderr
        assert str(site / "vllm") in done.stderr


def test_a_folder_that_is_called_vllm_may_still_be_looked_for(tmp_path: Path):
    """Libraries ask whether vLLM is there, in whatever folder they were started."""
    (tmp_path / "vllm").mkdir()
    code = "import importlib.util, sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
    done = run(f"{code}print(importlib.util.find_spec('vllm').origin)", tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("None", "")


def test_a_vllm_whose_import_fails_says_so_itself(tmp_path: Path):
    site = make(tmp_path, {"__init__.py": "raise ImportError('libcudart.so.13: cannot open shared object file')\n"})
    done = run(TWICE, site)
    assert done.stdout.count("ImportError: libcudart.so.13: cannot open shared object file") == 2
    assert done.stderr.count("overlay[pid") == 1


def test_what_is_not_there_at_all_is_the_targets_error(tmp_path: Path):
    site = make(tmp_path, {"v1/engine/core.py": ""})
    (site / "vllm/v1/engine/core.py").unlink()
    done = run(TWICE, site, OVERLAY_PATCHES="process_proof=true")
    assert "there is no module vllm.v1.engine.core" in done.stdout


# --- reloaded --------------------------------------------------------------------------------------------------------


def test_reloading_vllm_arms_nothing_twice(tmp_path: Path):
    code = """
import importlib, sys, vllm
from overlay import startup
first, finders = startup.current(), [type(f).__name__ for f in sys.meta_path]
importlib.reload(vllm)
del sys.modules["vllm"]
import vllm
print(startup.current() is first, [type(f).__name__ for f in sys.meta_path] == finders)
"""
    done = run(code, make(tmp_path))
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert done.stderr.count("overlay[pid") == 1


def test_a_reloaded_leaf_is_wrapped_once(package: Path):  # noqa: F811
    e = entry(package, lambda module, ctx: ctx.wrap(module, "pick", loud))
    sys.meta_path.insert(0, hooks.LeafFinder(lambda name: None, lambda m: registry.apply(e, m), {"leafpkg.leaf"}))
    module = importlib.import_module("leafpkg.leaf")
    for _ in range(3):
        assert module.pick(1) == ("wrapped", "stock", 1)
        assert e.modules == ["leafpkg.leaf"]
        importlib.reload(module)
    registry.remove(e)
    assert module.pick(1) == ("stock", 1)


# --- another tool on the same function -------------------------------------------------------------------------------


def other(wrapped, instance, args, kwargs):
    return ("other", *wrapped(*args, **kwargs))


@pytest.mark.parametrize("target", ["pick", "Selector.choose"])
@pytest.mark.parametrize("theirs_first", [True, False])
def test_two_tools_wrap_the_same_function(package: Path, target: str, theirs_first: bool):  # noqa: F811
    import wrapt

    def ours(module: ModuleType, ctx: Context) -> None:
        ctx.wrap(module, target, loud)

    e = entry(package, ours)
    module = importlib.import_module("leafpkg.leaf")

    def call() -> tuple:
        return module.pick(1) if target == "pick" else module.Selector.choose(1)

    stock = call()
    steps = [lambda: wrapt.wrap_function_wrapper(module, target, other), lambda: registry.apply(e, module)]
    for step in steps if theirs_first else reversed(steps):
        step()
    outer = ("wrapped", "other") if theirs_first else ("other", "wrapped")
    assert call() == (*outer, *stock)
    registry.remove(e)
    assert call() == ("other", *stock)


def test_another_tool_that_replaced_the_function_is_wrapped_too(package: Path):  # noqa: F811
    """Its function has another signature than the source that was checked: that is its business, as without us."""
    e = entry(package, lambda module, ctx: ctx.wrap(module, "pick", loud))
    module = importlib.import_module("leafpkg.leaf")
    module.pick = lambda *given: ("theirs", *given)
    registry.apply(e, module)
    assert module.pick(1, 2) == ("wrapped", "theirs", 1, 2)
    registry.remove(e)
    assert module.pick(1, 2) == ("theirs", 1, 2)


# --- two checkouts ---------------------------------------------------------------------------------------------------


def test_of_two_checkouts_the_first_on_the_path_decides(tmp_path: Path):
    second = tmp_path / "second"
    second.mkdir()
    for name in ("sitecustomize.py", "overlay", "cuda"):
        (second / name).symlink_to(ROOT / name)
    (second / "patches.toml").write_text("[overlay]\nnonsense = 1\n")
    site = make(tmp_path / "site")
    code = "import sys, vllm; print(sys.modules['overlay'].__file__)"
    done = run(code, second, site)
    assert done.returncode == 0 and done.stdout.strip() == str(ROOT / "overlay/__init__.py"), done.stderr


def test_the_installed_vllm_is_found_by_what_python_would_import(tmp_path: Path):
    site = make(tmp_path)
    assert VllmSources(site / "vllm").version == VllmSources.find().version
