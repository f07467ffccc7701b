"""sitecustomize in processes that never import vLLM: silent, cheap, and unable to break them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.startup.standin import PYTHON, ROOT, environment, make

IN_EFFECT = "import sys; print(getattr(sys.modules.get('sitecustomize'), '__file__', None))"
FINDERS = "import sys; print([type(f).__name__ for f in sys.meta_path if not isinstance(f, type)].count('VllmFinder'))"


def run(code: str, env: dict[str, str], *flags: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PYTHON, *flags, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_a_process_without_vllm_hears_nothing_and_loads_nothing():
    done = run(
        "import json, sys; print([m for m in sys.modules if m.split('.')[0] in ('overlay', 'wrapt', 'tomllib')])",
        environment(ROOT),
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_it_imports_nothing_beyond_importlib_machinery():
    code = "import sys; print(sorted(sys.modules))"
    bare, with_us = (run(code, environment(*path)).stdout for path in ([], [ROOT]))
    assert set(eval(with_us)) - set(eval(bare)) <= {
        "sitecustomize",
        "importlib",
        "importlib.machinery",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
        "warnings",
    }


def test_looking_for_vllm_arms_nothing(tmp_path: Path):
    code = (
        "import importlib.util, sys; print(importlib.util.find_spec('vllm').origin, 'overlay.registry' in sys.modules)"
    )
    done = run(code, environment(ROOT, make(tmp_path)))
    assert done.stdout.split() == [str(tmp_path / "vllm/__init__.py"), "False"]
    assert done.stderr == ""


def test_kill_switch_comes_before_everything(tmp_path: Path):
    done = run(
        FINDERS + "; import vllm; print('overlay' in sys.modules)",
        environment(ROOT, make(tmp_path), OVERLAY_DISABLE="1"),
    )
    assert done.stdout.split() == ["0", "False"]
    assert done.stderr == ""


def test_a_shadowed_sitecustomize_is_executed_and_ours_stays_in_place(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.chained = __name__")
    for settings in ({}, {"OVERLAY_DISABLE": "1"}):
        done = run(IN_EFFECT + "; print(sys.chained)", environment(ROOT, tmp_path, **settings))
        assert done.stdout.split() == [str(ROOT / "sitecustomize.py"), "sitecustomize"]


def test_a_shadowed_sitecustomize_that_raises_does_what_it_does_without_us(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')")
    alone, chained = (run("print('on')", environment(*path)) for path in ([tmp_path], [ROOT, tmp_path]))
    assert (alone.returncode, alone.stdout) == (chained.returncode, chained.stdout) == (0, "on\n")
    assert alone.stderr.splitlines()[-1] == chained.stderr.splitlines()[-1] == "ValueError: theirs"


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_isolated_interpreters_are_not_ours(flag: str):
    assert str(ROOT) not in run(IN_EFFECT, environment(ROOT), flag).stdout


@pytest.mark.parametrize("flag", ["-s", "-P", "-B", "-O"])
def test_other_flags_are(flag: str):
    assert run(IN_EFFECT, environment(ROOT), flag).stdout.strip() == str(ROOT / "sitecustomize.py")


@pytest.mark.parametrize("entry", [".", "", "./", "../{name}", "{root}/", "{root}:"])
def test_children_after_a_chdir_keep_us(entry: str):
    value = entry.format(root=ROOT, name=ROOT.name) or ":"
    code = f"import os, subprocess, sys; os.chdir('/'); subprocess.run([sys.executable, '-c', {IN_EFFECT!r}])"
    done = run(code, environment(value), cwd=ROOT)
    assert done.stdout.strip() == str(ROOT / "sitecustomize.py")


def test_a_path_with_spaces(tmp_path: Path):
    checkout = tmp_path / "my overlay"
    checkout.mkdir()
    for name in ("sitecustomize.py", "overlay", "patches.toml", "cuda"):
        (checkout / name).symlink_to(ROOT / name)
    done = run(IN_EFFECT + "; import vllm", environment(checkout, make(tmp_path / "site")))
    assert done.stdout.strip() == str(checkout / "sitecustomize.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["another checkout", "a link to this one", "links in a folder", "one that recurses"])
@pytest.mark.parametrize("settings", [{}, {"OVERLAY_DISABLE": "1"}], ids=["on", "off"])
def test_two_checkouts_on_the_path_act_once(tmp_path: Path, kind: str, settings: dict[str, str]):
    """What lies behind both is executed once, and nothing is said."""
    second, third = tmp_path / "second", tmp_path / "third"
    text = (ROOT / "sitecustomize.py").read_text()
    if kind == "a link to this one":
        second.symlink_to(ROOT)
    else:
        second.mkdir()
    if kind == "links in a folder":
        (second / "sitecustomize.py").symlink_to(ROOT / "sitecustomize.py")
    elif kind == "another checkout":
        (second / "sitecustomize.py").write_text(text)
    elif kind == "one that recurses":  # it executes whatever is not its own: this one again
        (second / "sitecustomize.py").write_text(text.replace("_overlay_chained", "_another"))
    third.mkdir()
    (third / "sitecustomize.py").write_text("import sys; sys.third = getattr(sys, 'third', 0) + 1")
    code = FINDERS + "; print(sys.third, sys.modules['sitecustomize'].__file__)"
    for path in ((ROOT, second, third), (second, ROOT, third), (ROOT, second, ROOT, second, third)):
        done = run(code, environment(*path, **settings))
        assert done.stdout.split() == ["0" if settings else "1", "1", str(path[0] / "sitecustomize.py")]
        assert done.stderr == ""


def test_cost_of_our_own(capsys: pytest.CaptureFixture[str]):
    """Measured and printed, not judged: the time is the machine's."""
    done = subprocess.run([PYTHON, "-X", "importtime", "-c", ""], env=environment(ROOT), capture_output=True, text=True)
    line = next(line for line in done.stderr.splitlines() if line.endswith(" sitecustomize"))
    milliseconds = int(line.split("|")[1]) / 1000
    with capsys.disabled():
        print(f"\nsitecustomize: {milliseconds:.2f} ms at the start of Python {sys.version.split()[0]}")
