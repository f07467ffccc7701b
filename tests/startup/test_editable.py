"""A vLLM that is on no path: `pip install -e` leaves a finder at the end of the meta path, and nothing else."""

import json
import site
import subprocess
from pathlib import Path

import pytest

from overlay.rehearsal import driver
from overlay.sources import VllmSources
from tests.startup.standin import PYTHON, ROOT, environment, make

VERSION = "0.33.0.post7"
# What setuptools' __editable___vllm_finder does for a flat layout, in a Python whose packages are those of one folder.
FINDER = """
import sys
from importlib.util import spec_from_file_location

class _EditableFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return spec_from_file_location(name, {init!r}) if name == "vllm" else None

sys.path[:] = [entry for entry in sys.path if not entry.endswith("-packages")]
sys.meta_path.append(_EditableFinder)
"""


def install(directory: Path, changed: dict[str, str] | None = None) -> Path:
    """Lay out the sources in `directory`/src, and return the folder that makes a Python find them and wrapt and CuPy.

    The finder comes with a sitecustomize that the overlay's executes; a .pth file would need an environment.
    """
    make(directory / "src", {"_version.py": f"__version__ = version = {VERSION!r}\n", **(changed or {})})
    packages = directory / "packages"
    packages.mkdir()
    for folder in map(Path, site.getsitepackages()):
        for name in ("wrapt", "wrapt-*", "cupy", "cupy_backends", "cupy_cuda*"):
            for found in folder.glob(name):
                (packages / found.name).symlink_to(found)
    (packages / "sitecustomize.py").write_text(FINDER.format(init=str(directory / "src/vllm/__init__.py")))
    return packages


def run(*arguments: str, path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    env = environment(ROOT, path, **settings)
    return subprocess.run([PYTHON, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("editable"))


def test_it_is_patched(editable: Path):
    done = run("-c", "import vllm; print(vllm.__file__)", path=editable)
    assert done.stdout.strip() == str(editable.with_name("src") / "vllm/__init__.py"), done.stderr
    assert f"(vllm {VERSION}, " in done.stderr and " armed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_status_finds_it(editable: Path):
    done = run("-m", "overlay", "status", "--json", path=editable)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["vllm"] == VERSION


def test_its_sources_are_the_ones_that_are_checked(tmp_path: Path):
    done = run(
        "-c", "import vllm", path=install(tmp_path, {"platforms/cuda.py": ""}), OVERLAY_PATCHES="sparse_mla=true"
    )
    assert "does not define CudaPlatformBase.get_attn_backend_cls" in done.stderr


def test_a_finder_in_front_of_the_path_decides(tmp_path: Path):
    """The package that is executed is the one that is checked, whatever else the path holds."""
    packages = install(tmp_path)
    other = make(tmp_path / "other", {"_version.py": "__version__ = version = '0.32.0'\n"})
    text = (packages / "sitecustomize.py").read_text()
    code = text.replace("sys.meta_path.append(", "sys.meta_path.insert(1, ")
    assert code != text
    (packages / "sitecustomize.py").write_text(code + f"sys.path.insert(0, {str(other)!r})\n")
    done = run("-c", "import vllm; print(vllm.__file__)", path=packages)
    assert done.stdout.strip() == str(tmp_path / "src/vllm/__init__.py")
    assert f"(vllm {VERSION}, " in done.stderr


def test_what_is_no_folder_of_python_files_is_refused_by_its_name(tmp_path: Path):
    (tmp_path / "vllm.py").write_text("")
    done = run("-c", "import vllm", path=tmp_path)
    assert f"vllm is being imported from {tmp_path}/vllm.py, which is not the __init__.py of a folder" in done.stderr
    assert done.returncode == 1
    assert run("-c", "import vllm", path=tmp_path, OVERLAY_DISABLE="1").returncode == 0


def test_a_rehearsal_reads_its_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its extensions link the driver; without their symbols the stub could not be loaded by them."""
    before = driver.package_folders()
    monkeypatch.setattr(VllmSources, "find", classmethod(lambda cls: cls(tmp_path / "src/vllm")))
    assert driver.package_folders() == [*before, tmp_path / "src/vllm"]
