"""The doctor's judgements on machines that are not here: GPUs, libraries, memory, engines that hang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlay import host_memory
from overlay.doctor import boot, cuda, fingerprint, machine
from overlay.doctor.boot import Worker
from overlay.doctor.checks import Surroundings
from overlay.hardware import Device, Hardware


def gpus(*devices: Device) -> Surroundings:
    around = Surroundings()
    around.hardware = Hardware()
    around.hardware.devices = devices
    around.loaded = {
        "driver": {"cuda": 13000, "devices": [{"shared_bytes": 101_376, "integrated": 1} for _ in devices]},
        "nvrtc": {"version": [13, 0], "architectures": [90, 100, 120, 121], "files": ["/x/libnvrtc.so.13"]},
        "torch": {"version": "2.14.0", "cuda": "13.0"},
        "libraries": [],
    }
    return around


GB10 = Device("NVIDIA GB10", (12, 1), True)
RTX = Device("NVIDIA GeForce RTX 5090", (12, 0), False)
H200 = Device("NVIDIA H200", (9, 0), False)


@pytest.mark.parametrize(
    ("devices", "status", "said"),
    [
        ([GB10], "pass", "1 x NVIDIA GB10 (sm_121), 101376 bytes of shared memory a block, driver for CUDA 13.0"),
        ([RTX, RTX], "pass", "2 x NVIDIA GeForce RTX 5090 (sm_120)"),
        ([GB10, RTX], "warn", "different capabilities"),
        ([H200, RTX], "warn", "patches for one of them are armed and ask for the GPU in use"),
        ([H200], "warn", "not sm_120 or sm_121"),
        ([], "warn", "no GPU"),
    ],
)
def test_gpu(devices, status, said):
    outcome = cuda.gpu(gpus(*devices))
    assert outcome.status == status
    assert said in outcome.what


def test_too_little_shared_memory():
    around = gpus(GB10)
    around.loaded["driver"]["devices"][0]["shared_bytes"] = 49152
    assert cuda.gpu(around).status == "fail"


def test_a_driver_that_does_not_answer():
    around = gpus(GB10)
    around.loaded = {"driver": {"error": "RuntimeError: cuInit returned 999"}}
    assert cuda.gpu(around).status == "warn"
    assert "cuInit returned 999" in cuda.gpu(around).what


@pytest.mark.parametrize(
    ("devices", "known", "status", "said"),
    [
        ([GB10], [90, 120], "fail", "does not know sm_121"),
        ([RTX], [90, 120], "pass", "knows sm_120"),
        ([GB10], [90, 120, 121], "pass", "knows sm_121"),
        ([H200, RTX], [90, 121], "fail", "does not know sm_120"),
        ([GB10, RTX], [90, 120], "fail", "does not know sm_121"),
        ([], [90, 120], "warn", "does not know sm_121"),
        ([H200], [90, 120, 121], "pass", "knows sm_120 and sm_121"),
    ],
)
def test_nvrtc(monkeypatch, devices, known, status, said):
    monkeypatch.setenv("OVERLAY_PATCHES", "sparse_mla=true")
    around = gpus(*devices)
    around.loaded["nvrtc"]["architectures"] = known
    outcome = cuda.nvrtc(around)
    assert outcome.status == status
    assert said in outcome.what
    assert "/x/libnvrtc.so.13" in outcome.what


@pytest.mark.parametrize(("switch", "status"), [("true", "fail"), ("false", "warn")])
def test_no_nvrtc(monkeypatch, switch, status):
    """It matters where the kernel is wanted."""
    monkeypatch.setenv("OVERLAY_PATCHES", f"sparse_mla={switch}")
    around = gpus(GB10)
    around.loaded["nvrtc"] = {"error": "DynamicLibNotFoundError: libnvrtc"}
    assert cuda.nvrtc(around).status == status


def site_packages(name: str) -> str:
    import sysconfig

    return f"{sysconfig.get_path('purelib')}/nvidia/cu13/lib/{name}"


@pytest.mark.parametrize(
    ("files", "status", "said"),
    [
        ([site_packages("libcublas.so.13"), "/usr/lib/libcuda.so.1"], "pass", "1 CUDA libraries, all from this"),
        (["/usr/local/cuda/lib64/libcublas.so.13"], "pass", "all from the system"),
        ([site_packages("libcublas.so.13"), "/opt/x/libnccl.so.2"], "warn", "outside this environment: /opt/x/libnccl"),
        ([site_packages("libnccl.so.2"), "/opt/x/libnccl.so.2.28.9"], "warn", "loaded twice"),
        ([], "pass", "no CUDA library"),
    ],
)  # fmt: skip
def test_libraries(files, status, said):
    around = gpus(GB10)
    around.loaded["libraries"] = files
    outcome = cuda.libraries(around)
    assert outcome.status == status
    assert said in outcome.what


def test_two_builds_of_nccl(tmp_path, monkeypatch):
    for name, identity in (("a", b"\x11" * 20), ("b", b"\x22" * 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libnccl.so.2").write_bytes(b"\x7fELF" + cuda.BUILD_ID + identity + b"2.28.9")
    around = gpus(GB10)
    around.loaded["libraries"] = [str(tmp_path / "a" / "libnccl.so.2")]
    monkeypatch.setattr(cuda, "_system", lambda name: [])
    assert cuda.nccl(around).status == "pass"
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", str(tmp_path / "b" / "libnccl.so.2"))
    outcome = cuda.nccl(around)
    assert outcome.status == "warn"
    assert "build 111111111111" in outcome.what
    assert "build 222222222222" in outcome.what


def test_the_build_id_is_readelfs(tmp_path):
    file = Path(os.path.realpath(sys.executable))
    done = subprocess.run(["readelf", "-n", file], capture_output=True, text=True, check=False)
    if "Build ID: " not in done.stdout:
        pytest.skip("this Python has no build id, or there is no readelf")
    assert done.stdout.partition("Build ID: ")[2].startswith(cuda.build(file))


def test_persisted_autotuning(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    around = Surroundings()
    assert "no persisted" in machine.autotune_cache(around).what
    folder = tmp_path / "flashinfer_autotune_cache" / "0.7.2" / "121a" / "abc"
    folder.mkdir(parents=True)
    (folder / "autotune_configs_dp0_rank0.json").write_text("{}")
    assert machine.autotune_cache(around).status == "pass"
    (folder / "autotune_configs_dp0_rank1.json").write_text("{}")
    outcome = machine.autotune_cache(around)
    assert outcome.status == "warn"
    assert "2 ranks" in outcome.what
    assert f"rm -r {tmp_path}/flashinfer_autotune_cache" in outcome.fix
    monkeypatch.setenv("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert machine.autotune_cache(around).status == "pass"


@pytest.mark.parametrize(
    ("device", "free", "available", "status"),
    [(GB10, 8, 100, "warn"), (GB10, 95, 100, "pass"), (RTX, 8, 100, "pass"), (None, 8, 100, "pass")],
)
def test_memory_of_integrated_gpus(tmp_path, monkeypatch, device, free, available, status):
    sizes = {"MemTotal": 121 << 20, "MemFree": free << 20, "MemAvailable": available << 20, "Cached": 0}
    text = "".join(f"{name}: {size} kB\n" for name, size in sizes.items())
    (tmp_path / "meminfo").write_text(text + "HugePages_Total: 0\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    outcome = machine.memory(gpus(*([device] if device else [])))
    assert outcome.status == status
    assert f"MemFree {host_memory.gib(free << 30)}, MemAvailable {host_memory.gib(available << 30)}" in outcome.what
    assert ("flush-cache" in outcome.fix) is (status == "warn")


@pytest.mark.parametrize(
    ("percents", "answers", "status", "said"),
    [
        ([0.0, 640.0], False, "pass", "not a hang"),
        ([100.0, 100.0], False, "warn", "loading, or a hang"),
        ([150.0], False, "warn", "loading, or a hang"),
        ([0.0], True, "pass", "the engine serves"),
    ],
)
def test_is_it_a_hang(percents, answers, status, said):
    workers = [Worker(pid, "VLLM::Worker_TP0", percent) for pid, percent in enumerate(percents)]
    outcome = boot.judge(workers, answers)
    assert outcome.status == status
    assert said in outcome.what


SERVER = """
import http.server, subprocess, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *message):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Health)
worker = subprocess.Popen(["bash", "-c", "exec -a VLLM::Worker_TP0 sleep 60"])
print(worker.pid, flush=True)
server.serve_forever() if sys.argv[2] == "answers" else worker.wait()
"""


@pytest.mark.parametrize("how", ["answers", "is silent"])
def test_an_engine_is_recognised_by_its_processes(how):
    """A worker that sleeps, below a server that answers /health or that listens and is silent."""
    import psutil

    line = [sys.executable, "-c", SERVER, "vllm serve", how]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
        worker = psutil.Process(int(server.stdout.readline()))
        try:
            while boot._name(worker) != "VLLM::Worker_TP0":
                assert worker.is_running()
            (found,) = boot.engines([worker]).items()
            assert found == (psutil.Process(server.pid), {worker.pid})
            assert boot.healthy(found[0]) is (how == "answers")
            (measured,) = boot.measure([worker])
            assert (measured.pid, measured.name) == (worker.pid, "VLLM::Worker_TP0")
            assert boot.judge([measured], False).status == "warn"
        finally:
            worker.kill()
            server.kill()
    assert boot.measure([worker])[0].percent == 0.0  # it ended meanwhile


def test_the_fingerprint_shows_which_part_differs():
    first = fingerprint.of(gpus(GB10))
    assert first == fingerprint.of(gpus(GB10))
    second = fingerprint.of(gpus(RTX))
    assert first["machine"] != second["machine"]
    assert first["packages"] == second["packages"]
    assert first["all"] != second["all"]
