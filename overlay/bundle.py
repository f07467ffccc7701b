"""A folder with the overlay and the wheels that a vLLM image lacks, unpacked for one Python and processor.

A container then needs one mount and one variable. `overlay.carried` finds the packages.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from overlay.carried import tag
from overlay.errors import OverlayError
from overlay.packages import CUPY, WRAPT

ROOT = Path(__file__).resolve().parent.parent
CONTENT = ("overlay", "cuda", "sitecustomize.py", "patches.toml", "README.md", "LICENSE")
MACHINES = ("x86_64", "aarch64")
CUDA_VERSIONS = (12, 13)
OLDEST_PYTHON = (3, 11)

# vLLM requires these itself, so every image has them.
IN_EVERY_IMAGE = {"numpy"}
# The newest first: pip takes the best of the named platform tags. vLLM's images have glibc 2.35.
GLIBC_TAGS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")


class BundleError(OverlayError):
    """The bundle cannot be made; what is there stays as it was."""


def requirements(cuda: int) -> dict[str, str]:
    """Folder below the tag -> what pip is asked for. The ranges are those of pyproject.toml."""
    return {
        "wrapt": f"wrapt{WRAPT.pin}",
        "cupy": f"cupy-cuda{cuda}x{CUPY.pin}",
        "cuda-pathfinder": "cuda-pathfinder>=1.3.4,<2",
    }


def build(out: Path, python: str, machine: str, cuda: int) -> Path:
    """Write the bundle into `out` and return the folder of its packages. Raises BundleError.

    `out` must not exist, be empty, or be an earlier bundle: that one's overlay is replaced and the packages are added,
    so one folder can serve both processors.
    """
    version = parse_python(python)
    carried = out / "bundled"
    if any(out.resolve().is_relative_to(ROOT / name) for name in CONTENT):
        raise BundleError(f"{out} lies in what a bundle copies; name a folder outside of {ROOT}")
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not carried.is_dir())):
        raise BundleError(f"{out} exists and is no bundle; name a new folder or remove it")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".unpacking-") as scratch:
        wheels, packages = Path(scratch) / "wheels", Path(scratch) / "packages"
        wanted = requirements(cuda)
        record = {}
        for folder, requirement in wanted.items():
            wheel = download(requirement, version, machine, wheels / folder)
            unpack(wheel, packages / folder)
            check_requirements(wheel, wanted)
            record[wheel.name] = hashlib.sha256(wheel.read_bytes()).hexdigest()
        (packages / "wheels.json").write_text(json.dumps(record, indent=2) + "\n")
        if not out.samefile(ROOT):  # a bundle that adds a platform to itself has its overlay already
            copy_overlay(out, Path(scratch))
        target = carried / tag(version, machine)
        carried.mkdir(exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        packages.rename(target)
    return target


def parse_python(text: str) -> tuple[int, int]:
    """`"3.12"` -> (3, 12)."""
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)?", text)
    if not found or (int(found[1]), int(found[2])) < OLDEST_PYTHON:
        raise BundleError(f"--python {text}: a Python of 3.11 or newer, as `python3 --version` in the image says it")
    return int(found[1]), int(found[2])


def copy_overlay(out: Path, scratch: Path) -> None:
    """Replace the overlay's own files in `out` by this checkout's: copied whole into `scratch` first, then renamed."""
    new, old = scratch / "new", scratch / "old"
    new.mkdir()
    old.mkdir()
    for name in CONTENT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, new / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():  # a bundle made from a bundle has no README
            shutil.copyfile(ROOT / name, new / name)
    for file in new.iterdir():
        if os.path.lexists(out / file.name):
            (out / file.name).rename(old / file.name)
        file.rename(out / file.name)


def download(requirement: str, python: tuple[int, int], machine: str, folder: Path) -> Path:
    """Let pip fetch one wheel, without its dependencies, for a Python and processor that need not be this one."""
    number = "".join(map(str, python))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", ".".join(map(str, python))]
    command += [
        "--abi",
        f"cp{number}",
        *(part for glibc in GLIBC_TAGS for part in ("--platform", f"{glibc}_{machine}")),
    ]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode or len(wheels) != 1:
        said = "\n".join(line for line in done.stderr.splitlines() if "WARNING" not in line)
        raise BundleError(
            f"pip has no wheel of {requirement} for Python {'.'.join(map(str, python))} on {machine}; it said:\n"
            f"{said[-1500:].strip() or 'nothing'}\n"
            "A bundle is made where the package index can be reached, and copied from there."
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel as an installer would lay out its Python files; scripts and headers are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            found = re.match(r"[^/]+\.data/(purelib|platlib)/(.+)", entry.filename)
            name = found[2] if found else entry.filename
            if entry.is_dir() or (not found and re.match(r"[^/]+\.data/", name)):
                continue
            target = folder / name
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise BundleError(f"{wheel.name} holds {name!r}, which lies outside of it")
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)


def check_requirements(wheel: Path, bundled: dict[str, str]) -> None:
    """Refuse a wheel that needs a package which neither the bundle nor every image has."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        header = archive.read(metadata).decode().partition("\n\n")[0]
    needs = re.findall(r"^Requires-Dist: *([A-Za-z0-9._-]+)(.*)$", header, re.M)
    names = {normal(name) for name, rest in needs if "extra ==" not in rest}
    if missing := names - IN_EVERY_IMAGE - {normal(name) for name in bundled}:
        raise BundleError(f"{wheel.name} also needs {', '.join(sorted(missing))}, which the bundle does not carry")


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def size(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
