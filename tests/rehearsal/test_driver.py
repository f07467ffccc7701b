"""The stub driver: built from what is installed, answering for the GPU that was asked for."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from overlay.rehearsal import driver

ROOT = Path(driver.__file__).resolve().parents[2]
NO_DEVICE = 100


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return driver.build(tmp_path_factory.mktemp("driver"))


def run(code: str, env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_exports_what_the_installed_libraries_link(libraries: Path) -> None:
    """Checked with ctypes, not with the reader that made the list: vLLM's own extension is looked into by nm."""
    extension = next(Path(folder) / "vllm" for folder in driver.package_folders() if (folder / "vllm").is_dir())
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", extension / "_C_stable_libtorch.abi3.so"], capture_output=True, text=True
    )
    linked = [
        name for line in listed.stdout.splitlines() if (name := line.split()[-1])[:2] == "cu" and name[2].isupper()
    ]
    assert linked, "vLLM's extension links no driver function: this test has lost its subject"
    stub = ctypes.CDLL(str(libraries / driver.LIBCUDA))
    assert [name for name in linked if not hasattr(stub, name)] == []
    # Triton's helper asks for this one, which no installed library links.
    assert stub.cuCtxSetLimit() == NO_DEVICE
    assert stub.cuInit(0) == NO_DEVICE


def test_error_text_is_a_string(libraries: Path) -> None:
    """Callers print the pointer unchecked: an unset one would crash them."""
    stub, text = ctypes.CDLL(str(libraries / driver.LIBCUDA)), ctypes.c_char_p()
    assert stub.cuGetErrorString(NO_DEVICE, ctypes.byref(text)) == 0
    assert text.value == b"no CUDA-capable device is detected"


@pytest.mark.parametrize(
    ("memory", "integrated"), [(None, False), (96 * driver.GIB, False), (0, True)], ids=["usual", "given", "unknown"]
)
def test_nvml_describes_the_wanted_gpu(libraries: Path, memory: int | None, integrated: bool) -> None:
    env = driver.environment((12, 1), devices=3, name="a board", memory=memory, directory=libraries.parent)
    code = (
        "from overlay.hardware import Hardware as H; print([(d.name, d.capability, d.integrated) for d in H().devices])"
    )
    assert run(code, env) == str([("a board", (12, 1), integrated)] * 3)


def test_pynvml_reads_it(libraries: Path) -> None:
    code = """
from vllm.third_party import pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(1)
info = n.nvmlDeviceGetMemoryInfo(h)
same = n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h)))
print(n.nvmlDeviceGetCount(), same, info.total, info.free)
print(n.nvmlDeviceGetPciInfo(h).busId, n.nvmlDeviceGetP2PStatus(h, h, n.NVML_P2P_CAPS_INDEX_NVLINK))
try:
    n.nvmlDeviceGetHandleByIndex(2)
except n.NVMLError as error:
    print(error)
"""
    # By its file: importing the vllm package would cost seconds and is not what is tested.
    file = next(f / "vllm/third_party/pynvml.py" for f in driver.package_folders() if (f / "vllm").is_dir())
    code = code.replace(
        "from vllm.third_party import pynvml as n",
        f"import sys; sys.path.insert(0, {str(file.parent)!r}); import pynvml as n",
    )
    env = driver.environment((9, 0), devices=2, memory=5 << 30, directory=libraries.parent)
    assert run(code, env).splitlines() == [f"2 1 {5 << 30} {5 << 30}", "00000000:02:00.0 5", "Invalid Argument"]


def test_real_devices_are_hidden(libraries: Path) -> None:
    base = {"CUDA_VISIBLE_DEVICES": "3", "LD_LIBRARY_PATH": "/somewhere", "OVERLAY_REHEARSAL_NAME": "stale"}
    env = driver.environment((12, 0), base=base, directory=libraries.parent)
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert env["LD_LIBRARY_PATH"] == f"{libraries}{os.pathsep}/somewhere"
    assert env["OVERLAY_REHEARSAL_NAME"] == driver.board((12, 0)).name
    assert (
        driver.environment((12, 0), base=env, directory=libraries.parent)["LD_LIBRARY_PATH"] == env["LD_LIBRARY_PATH"]
    )


def test_builds_once(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call finds the first one's work: it needs no compiler."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "")
    assert driver.build(libraries.parent) == libraries


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("which", ["root", "libraries"])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, which: str, mode: int) -> None:
    """What lies in it is loaded into vLLM's processes. The line that the message gives is the way out."""
    root = tmp_path / "my driver"
    built = driver.build(root)
    folder = root if which == "root" else built
    folder.chmod(mode)
    with pytest.raises(driver.DriverError, match="other users can write to it") as refused:
        driver.environment((12, 1), directory=root)
    line = str(refused.value).rpartition("; ")[2]
    assert line == f"chmod 700 '{folder}'"
    subprocess.run(line, shell=True, check=True)
    assert driver.build(root) == built


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # root's files are trusted: make them somebody's
        os.chown(tmp_path, 4321, -1)
    with pytest.raises(driver.DriverError, match=f"user {os.stat(tmp_path).st_uid} owns it .*; set XDG_CACHE_HOME to"):
        driver.build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_its_own_folders_are_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where new files are the group's by default, and in the folder that the kernel cache shares with it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(0o002)
    try:
        folders = [driver.build(), *driver.build().parents]
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in folders[:3]] == [0o700] * 3
    assert folders[3] == tmp_path


def test_many_at_once_build_one(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from overlay.rehearsal import driver; print(driver.build(Path({str(tmp_path)!r})))"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    answers = {child.communicate(timeout=120)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0] * 4
    (folder,) = answers
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([Path(folder).name, "lock"])
    assert sorted(path.name for path in Path(folder).iterdir()) == [driver.LIBCUDA, driver.LIBNVML]


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(driver.DriverError, match=r"no C compiler.*\n.*apt-get install gcc libc6-dev"):
        driver.build(tmp_path / "driver")
    assert not list(tmp_path.glob("driver/*/*"))


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'stdio.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(driver.DriverError, match=r"libc6-dev(.|\n)*stdio.h: No such file"):
        driver.build(tmp_path / "driver")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc to make a library to read")
def test_reads_symbols_of_a_library(libraries: Path, tmp_path: Path) -> None:
    """A library that links the driver gives its driver functions, and nothing else; one that does not gives none."""
    source = "int cuInit(unsigned); int puts(const char *); int cuRoutine(void) { return 0; }\n"
    source += 'int f(void) { puts(""); return cuInit(0) + cuRoutine(); }\n'
    linked, plain = tmp_path / "linked.so", tmp_path / "plain.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o"]
    subprocess.run([*command, linked, f"-L{libraries}", f"-l:{driver.LIBCUDA}"], input=source, text=True, check=True)
    subprocess.run([*command, plain], input=source, text=True, check=True)
    with linked.open("rb") as first, plain.open("rb") as second, Path(__file__).open("rb") as third:
        assert driver.linked_symbols(first) == {"cuInit"}
        assert driver.linked_symbols(second) == set()
        assert driver.linked_symbols(third) == set()


def test_header_names_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").write_text(
        "#define cuMemAlloc cuMemAlloc_v2\nCUresult cuMemAlloc(CUdeviceptr *p);\n"
    )
    (tmp_path / "include" / "other.h").write_text("cuNotThis();\n")
    assert driver.wanted_symbols([tmp_path]) == {"cuMemAlloc", "cuMemAlloc_v2"}
