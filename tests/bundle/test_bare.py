"""A real bundle, in a Python that has vLLM and neither wrapt nor CuPy. Skipped by name where pip has no index."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from overlay import bundle, carried
from tests.conftest import without_overlay

# What a vLLM image lacks. cuda-pathfinder is one part of the namespace package `cuda`.
LEFT_OUT = ("wrapt", "cupy", "cupyx", "cupy_backends")

SCENARIO = """
import json, subprocess, sys

control = subprocess.run([sys.executable, "-I", "-c", "import wrapt"], capture_output=True, text=True)
import vllm
import cupy, wrapt
from importlib.metadata import version
from cuda import pathfinder
from overlay import startup

print(json.dumps({
    "control": control.stderr.strip().splitlines()[-1],
    "files": {"wrapt": wrapt.__file__, "cupy": cupy.__file__, "cuda.pathfinder": pathfinder.__file__},
    "vllm": vllm.__file__,
    "wrapt": version("wrapt"),
    "prefix": sys.prefix,
    "failed": {e.patch.id: e.reason for e in startup.current().entries if e.state == "failed"},
    "armed": [e.patch.id for e in startup.current().entries if e.on],
    "behind": [entry for entry in sys.path if "bundled" in entry] == sys.path[-len(
        [entry for entry in sys.path if "bundled" in entry]):],
}))
"""


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for this Python, made with pip."""
    out = tmp_path_factory.mktemp("bundle") / "overlay"
    try:
        bundle.build(out, f"{sys.version_info[0]}.{sys.version_info[1]}", os.uname().machine, 13)
    except bundle.BundleError as error:
        pytest.skip(f"tests/bundle/test_bare.py needs pip and a package index: {error}")
    return out


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment with everything that is installed here but what a bundle brings."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    packages = folder / "packages"
    (packages / "cuda").mkdir(parents=True)
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            if entry.name.partition("-")[0] in (*LEFT_OUT, "cupy_cuda12x", "cupy_cuda13x", "cuda_pathfinder"):
                continue
            if entry.name == "cuda":
                for part in entry.iterdir():
                    if part.name != "pathfinder":
                        (packages / "cuda" / part.name).symlink_to(part)
            elif entry.suffix != ".pth":
                (packages / entry.name).symlink_to(entry)
    python = folder / "venv" / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    )
    (Path(where.stdout.strip()) / "image.pth").write_text(f"{packages}\n")
    return python


@pytest.fixture(scope="module")
def seen(bundled: Path, bare: Path, fake_driver) -> dict:
    env = without_overlay(fake_driver((12, 1)))
    done = start(bare, SCENARIO, {**env, "PYTHONPATH": str(bundled)})
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(done.stdout.splitlines()[-1])


def start(python: Path, code: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    """Run code away from the checkout, which `-c` would put on the path."""
    return subprocess.run([python, "-c", code], env=env, cwd=python.parent, capture_output=True, text=True, timeout=300)


def test_the_image_lacks_the_packages(seen):
    assert seen["control"] == "ModuleNotFoundError: No module named 'wrapt'"
    assert seen["prefix"].endswith("/venv")


def test_the_bundle_brings_them(seen, bundled):
    folder = bundled / "bundled" / carried.tag()
    assert {name: Path(file).is_relative_to(folder) for name, file in seen["files"].items()} == dict.fromkeys(
        carried.PACKAGES, True
    )
    assert seen["behind"]


def test_the_patches_arm_on_the_images_own_vllm(seen, bundled):
    assert seen["failed"] == {}
    assert "sparse_mla" in seen["armed"]
    assert not Path(seen["vllm"]).is_relative_to(bundled)


def test_without_its_packages_the_overlay_asks_for_them_by_name(bundled, bare, fake_driver, tmp_path):
    partial = tmp_path / "overlay"
    shutil.copytree(bundled, partial, ignore=shutil.ignore_patterns("bundled"))
    (partial / "bundled" / "cp399-none").mkdir(parents=True)
    env = without_overlay(fake_driver((12, 1)))
    done = start(bare, "import vllm", {**env, "PYTHONPATH": str(partial)})
    assert done.returncode == 1
    assert "the package wrapt is not installed: pip install 'wrapt>=2.5,<3'" in done.stderr
    assert f"the bundle's are for cp399-none; this is {carried.tag()}" in done.stderr
