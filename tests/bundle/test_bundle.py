"""What goes into a bundle, what is refused, and when the packages that travel with it are used."""

import json
import shlex
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from overlay import bundle, carried
from overlay.bundle import BundleError
from overlay.cli import main
from tests.conftest import ROOT


def wheel(folder: Path, name: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> Path:
    """A wheel file with the given content."""
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    content = {f"{name}-1.dist-info/METADATA": f"Name: {name}\nVersion: 1\n{needs}\nRequires-Dist: a-word-in-prose\n"}
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, **content}.items():
            archive.writestr(file, text)
    return path


@pytest.fixture
def without_pip(monkeypatch, tmp_path):
    """`download` makes small wheels instead of asking pip."""

    def download(requirement, python, machine, folder):
        folder.mkdir(parents=True)
        return wheel(folder, bundle.normal(requirement.split(">")[0]), {"module.py": f"{machine} {python}"})

    monkeypatch.setattr(bundle, "download", download)
    return tmp_path / "out"


def test_the_ranges_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = bundle.requirements(12)
    assert {ours["wrapt"], ours["cupy"]} <= set(project["dependencies"])
    assert set(ours) == set(carried.PACKAGES.values())
    assert tuple(map(int, project["requires-python"].removeprefix(">=").split("."))) == bundle.OLDEST_PYTHON


def test_a_bundle_is_the_overlay_and_one_folder_of_packages_a_platform(without_pip, capsys):
    out = without_pip
    assert main(["bundle", str(out), "--python", "3.12", "--platform", "aarch64", "--cuda", "12"]) == 0
    assert f"-v {out}:/opt/overlay:ro -e PYTHONPATH=/opt/overlay" in capsys.readouterr().out
    assert {"overlay", "cuda", "sitecustomize.py", "patches.toml"} <= {file.name for file in out.iterdir()}
    assert not list(out.rglob("__pycache__"))
    here = out / "bundled" / "cp312-aarch64"
    assert {folder.name for folder in here.iterdir() if folder.is_dir()} == set(carried.PACKAGES.values())
    assert len(json.loads((here / "wheels.json").read_text())) == 3


def test_the_line_to_type_survives_a_space(without_pip, capsys):
    out = without_pip.with_name("a folder")
    assert main(["bundle", str(out), "--python", "3.12"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "docker run" in line)
    assert shlex.split(line)[shlex.split(line).index("-v") + 1] == f"{out}:/opt/overlay:ro"


def test_a_second_platform_joins_and_the_overlay_is_refreshed(without_pip):
    out = without_pip
    bundle.build(out, "3.12", "aarch64", 13)
    (out / "overlay" / "stale.py").write_text("left over")
    bundle.build(out, "3.11", "x86_64", 13)
    assert {folder.name for folder in (out / "bundled").iterdir()} == {"cp312-aarch64", "cp311-x86_64"}
    assert not (out / "overlay" / "stale.py").exists()
    assert not list(out.glob(".unpacking-*"))


@pytest.mark.parametrize("name", ["out", "link"])
def test_a_bundle_adds_a_platform_to_itself(without_pip, monkeypatch, name):
    """`make bundle OUT=.` inside of a bundle, also by another name: its overlay is the one to copy."""
    out = without_pip
    bundle.build(out, "3.12", "aarch64", 13)
    before = content(out)
    out.with_name("link").symlink_to(out)
    monkeypatch.setattr(bundle, "ROOT", out)
    bundle.build(out.with_name(name), "3.11", "x86_64", 13)
    assert {folder.name for folder in (out / "bundled").iterdir()} == {"cp312-aarch64", "cp311-x86_64"}
    assert content(out) == before


def content(out: Path) -> dict[str, bytes]:
    """The overlay's own files of a bundle."""
    files = (file for file in out.rglob("*") if file.is_file() and "bundled" not in file.parts)
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


def test_what_is_there_stays_whole_where_the_copy_fails(without_pip, monkeypatch):
    """A disk that is full in the middle of it: the earlier bundle can still be used."""
    out = without_pip
    bundle.build(out, "3.12", "aarch64", 13)
    before = content(out)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        bundle.build(out, "3.11", "x86_64", 13)
    assert content(out) == before


def test_a_folder_inside_of_what_is_copied_is_refused(without_pip, monkeypatch):
    bundle.build(without_pip, "3.12", "aarch64", 13)
    monkeypatch.setattr(bundle, "ROOT", without_pip)
    with pytest.raises(BundleError, match="lies in what a bundle copies"):
        bundle.build(without_pip / "overlay" / "new", "3.12", "aarch64", 13)
    assert not (without_pip / "overlay" / "new").exists()


def test_a_folder_that_is_no_bundle_is_left_alone(without_pip):
    without_pip.mkdir()
    (without_pip / "thesis.tex").write_text("years of work")
    with pytest.raises(BundleError, match="is no bundle"):
        bundle.build(without_pip, "3.12", "x86_64", 13)
    assert [file.name for file in without_pip.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("python", ["3.10", "2.7", "three", "312", ""])
def test_a_python_that_cannot_run_the_overlay_is_refused(without_pip, python):
    with pytest.raises(BundleError, match="or newer"):
        bundle.build(without_pip, python, "x86_64", 13)
    assert not without_pip.exists()


def test_pip_that_cannot_download_is_told_with_its_own_words(tmp_path, monkeypatch):
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(BundleError, match=r"no wheel of wrapt.*it said:\nERROR: .*wrapt") as refused:
        bundle.build(tmp_path / "out", "3.12", "x86_64", 13)
    assert "copied from there" in str(refused.value)
    assert not list((tmp_path / "out").iterdir())


def test_a_wheel_is_laid_out_as_an_installer_would(tmp_path):
    files = {
        "pkg/__init__.py": "one",
        "pkg-1.data/purelib/pkg/more.py": "two",
        "pkg-1.data/scripts/pkg-tool": "#!python",
        "pkg-1.data/headers/pkg.h": "three",
    }
    bundle.unpack(wheel(tmp_path, "pkg", files), tmp_path / "there")
    found = {str(file.relative_to(tmp_path / "there")) for file in (tmp_path / "there").rglob("*") if file.is_file()}
    assert found == {"pkg/__init__.py", "pkg/more.py", "pkg-1.dist-info/METADATA"}


@pytest.mark.parametrize("name", ["../outside.py", "pkg-1.data/purelib/../../outside.py", "/etc/outside.py"])
def test_a_wheel_cannot_write_outside_its_folder(tmp_path, name):
    with pytest.raises(BundleError, match="outside"):
        bundle.unpack(wheel(tmp_path, "pkg", {name: "x"}), tmp_path / "a" / "there")
    assert not list(tmp_path.rglob("outside.py"))


def test_a_requirement_that_nobody_brings_is_refused(tmp_path):
    fine = wheel(tmp_path, "fine", {}, ("numpy<2.6,>=2.0", "cuda_pathfinder==1.*", 'pytest; extra == "test"'))
    bundle.check_requirements(fine, bundle.requirements(13))
    with pytest.raises(BundleError, match="fastrlock"):
        bundle.check_requirements(wheel(tmp_path, "more", {}, ("fastrlock>=0.5",)), bundle.requirements(13))


@pytest.fixture
def carried_folder(tmp_path, monkeypatch):
    """Packages for this Python beside a checkout, none of which is installed; sys.path as it was afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    here = tmp_path / carried.tag()
    for package, folder in carried.PACKAGES.items():
        (here / folder / package.partition(".")[0]).mkdir(parents=True)
    return tmp_path


def test_what_the_image_has_is_never_shadowed(carried_folder):
    before = list(sys.path)
    assert carried.extend_path(carried_folder) == []  # all three are installed here
    assert sys.path == before


def test_what_it_lacks_is_appended_behind_everything(carried_folder, monkeypatch):
    monkeypatch.setattr(carried, "_installed", lambda package: package == "cupy")
    before = list(sys.path)
    assert carried.extend_path(carried_folder) == ["wrapt", "cuda.pathfinder"]
    assert sys.path[: len(before)] == before
    assert [Path(entry).name for entry in sys.path[len(before) :]] == ["wrapt", "cuda-pathfinder"]


def test_packages_for_another_python_or_processor_are_not_used(tmp_path):
    (tmp_path / "cp399-aarch64" / "wrapt").mkdir(parents=True)
    assert carried.extend_path(tmp_path) == []
    assert carried.others(tmp_path) == ["cp399-aarch64"]
    assert carried.others(tmp_path / "none") == []


def test_a_parent_package_that_is_missing_counts_as_not_installed():
    assert not carried._installed("no_such_package.inside")
    assert carried._installed("json.decoder")
