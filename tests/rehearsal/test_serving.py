"""`vllm serve` under supervision: a small HTTP server in the place of vLLM's command line, behind the real overlay."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlay import serving
from overlay.commands import demo
from tests.conftest import hear_signals
from tests.startup import standin

# Healthy at the second question; a child of its own stands for the engine core.
SERVER = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
import vllm.platforms.cuda_stand_in

model, flags = sys.argv[2], dict(zip(sys.argv[3::2], sys.argv[4::2]))
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print("core", child.pid, flush=True)
print("sparse_mla: OVERLAY_SPARSE_MLA: fp8 rows", flush=True)
if model == "broken":
    sys.exit("no kernel image is available")
asked = 0

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += self.path == "/health"
        self.send_response(200 if asked > 1 and model != "sick" else 503)
        self.end_headers()

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["prompt"] == "refuse":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"too long")
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"text": "lazy dog"}], "got": request}).encode())

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `vllm serve` is SERVER; the overlay's own settings are the defaults."""
    files = {"entrypoints/cli/main.py": SERVER, "entrypoints/cli/__init__.py": "", "entrypoints/__init__.py": ""}
    files |= {"platforms/cuda_stand_in.py": "", "platforms/__init__.py": ""}
    return standin.environment(standin.make(tmp_path_factory.mktemp("vllm"), files))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def core_pid(log: Path) -> int:
    return int(next(line for line in log.read_text().splitlines() if line.startswith("core")).split()[1])


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core of this server never listens: there is no use in being patient with it."""
    monkeypatch.setattr(serving, "STOP_S", 2.0)


def test_serves_answers_and_leaves_nothing(base: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving.serve(Path("tiny"), ["--dtype", "auto"], log, base=base, timeout=60) as server:
        answer = server.completion("The quick brown fox", max_tokens=5)
        processes, attention = server.processes(), server.attention()
        core = core_pid(log)
        assert alive(core)
    assert answer["choices"][0]["text"] == "lazy dog"
    assert answer["got"] == {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 5, "temperature": 0}
    assert attention == "OVERLAY_SPARSE_MLA: fp8 rows"
    # The server's own process, with the real registry's states: this vLLM is a stand-in, its patches are not.
    assert [said["pid"] for said in processes] == [server.process.pid]
    assert set(processes[0]["patches"].values()) <= {"armed", "active", "retired", "off"}
    assert server.process.returncode is not None
    assert not alive(core), "a child that ignores SIGTERM outlived its server"


def test_an_http_error_is_told(base: dict[str, str], tmp_path: Path) -> None:
    with (
        serving.serve(Path("tiny"), [], tmp_path / "log", base=base, timeout=60) as server,
        pytest.raises(serving.ServerError, match="the server answers 400: too long"),
    ):
        server.completion("refuse")


def test_a_server_that_ends_is_told_with_its_log(base: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(serving.ServerError, match=r"exit status 1(.|\n)*no kernel image is available"),
        serving.serve(Path("broken"), [], log, base=base, timeout=60),
    ):
        pass
    assert not alive(core_pid(log)), "what the failed server had started goes as well"


def test_a_server_that_never_is_healthy(base: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(serving.ServerError, match="not healthy after 6 s"),
        serving.serve(Path("sick"), [], log, base=base, timeout=6),
    ):
        pass
    assert not alive(core_pid(log))


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGINT],
        [signal.SIGTERM],
        [signal.SIGHUP],
        [signal.SIGINT, signal.SIGINT],
        [signal.SIGHUP, signal.SIGTERM],
    ],
)
def test_a_signal_takes_the_server_along(base: dict[str, str], tmp_path: Path, numbers: list[int]) -> None:
    """Also one that is followed by another while the server is asked to end: its core does not listen."""
    log = tmp_path / "log"
    code = f"""
from pathlib import Path
from overlay import serving
import time
serving.STOP_S = 2.0
with serving.serve(Path("tiny"), [], Path({str(log)!r}), timeout=60):
    print("up", flush=True)
    time.sleep(600)
"""
    root = Path(serving.__file__).resolve().parents[1]
    streams = {"stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", code], env=base, cwd=root, preexec_fn=hear_signals, **streams)
    assert child.stdout.readline().strip() == "up"
    core = core_pid(log)
    for number in numbers:
        child.send_signal(number)
        time.sleep(0.5)
    child.wait(timeout=60)
    deadline = time.monotonic() + 30
    while alive(core) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(core)


def test_the_kill_switch_of_the_caller_is_not_inherited(base: dict[str, str], tmp_path: Path) -> None:
    with serving.serve(Path("tiny"), [], tmp_path / "log", base={**base, "OVERLAY_DISABLE": "1"}, timeout=60) as server:
        assert "patches" in server.processes()[0]


@pytest.mark.parametrize(
    ("capability", "any_gpu", "serves"),
    [(None, True, False), ((12, 0), False, True), ((9, 0), False, False), ((9, 0), True, True), ((7, 5), True, False)],
)
def test_where_the_demo_serves(capability: tuple[int, int] | None, any_gpu: bool, serves: bool) -> None:
    assert demo.can_serve(capability, any_gpu) is serves


def test_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "is empty" in serving.tail(log)
    log.write_text(os.linesep.join(map(str, range(40))))
    assert serving.tail(log, 2) == "38\n39"
