"""A real `vllm serve` with the overlay in front, started, watched and stopped by this process."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from overlay import endings, live
from overlay.config import ROOT
from overlay.errors import OverlayError

POLL_S = 1.0
PROGRESS_S = 10.0
STOP_S = 20.0
TAIL_LINES = 15


class ServerError(OverlayError):
    """The server did not come up, or did not answer; the message has the end of its log."""


@dataclass(frozen=True)
class Server:
    """A running server: its process group (one for all its children), address, model name and log."""

    process: subprocess.Popen
    port: int
    model: str
    log: Path

    def completion(self, prompt: str, max_tokens: int = 32, timeout: float = 120.0) -> dict[str, object]:
        """The answer of /v1/completions to a greedy request, as the server sent it. Raises ServerError."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ServerError(
                f"the server answers {error.code}: {error.read()[:500].decode(errors='replace')}"
            ) from None
        except (OSError, ValueError) as error:
            raise ServerError(f"no answer from the server: {error}\n{tail(self.log)}") from error

    def processes(self) -> list[dict[str, object]]:
        """What each of the server's vLLM processes says of its overlay."""
        return [said for said in live.processes() if _group(int(said["pid"])) == self.process.pid]

    def attention(self) -> str | None:
        """The last backend that the overlay named in the log, with its reason; None where it named none."""
        found = re.findall(r"sparse_mla: (\S+: .*)", self.log.read_text(errors="replace"))
        return found[-1] if found else None


@contextmanager
def serve(
    model: Path,
    flags: Sequence[str],
    log: Path,
    base: Mapping[str, str] = os.environ,
    timeout: float = 900.0,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Server]:
    """Start `vllm serve`, wait until /health answers, and stop its whole process group at the end.

    Also at an exception, Ctrl-C, SIGTERM or SIGHUP: engine core and workers are in the group and hold the GPU's memory.
    Raises ServerError where it exits or is not healthy within `timeout` seconds.
    """
    port = free_port()
    entries = [entry for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry and Path(entry) != ROOT]
    env = {**base, "PYTHONPATH": os.pathsep.join([str(ROOT), *entries])}
    env.pop("OVERLAY_DISABLE", None)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags]
    with endings.as_exceptions():
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        server = Server(process, port, str(model), log)
        try:
            _wait_until_healthy(server, timeout, progress)
            yield server
        finally:
            with endings.undisturbed():
                stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_healthy(server: Server, timeout: float, progress: Callable[[str], None]) -> None:
    started = said = time.monotonic()
    while not _healthy(server.port):
        now = time.monotonic()
        if (status := server.process.poll()) is not None:
            raise ServerError(f"vllm serve ended with exit status {status} before it was healthy\n{tail(server.log)}")
        if now - started > timeout:
            raise ServerError(f"vllm serve is not healthy after {timeout:.0f} s\n{tail(server.log)}")
        if now - said > PROGRESS_S:
            said = now
            progress(f"{now - started:4.0f} s  {tail(server.log, 1)[:120]}")
        time.sleep(POLL_S)


def _healthy(port: int) -> bool:
    """/health, not /v1/models: only the former asks the engine."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def stop(process: subprocess.Popen) -> None:
    """End the process group: asked first, then killed. Returns when none of it runs, also after its leader's exit."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            process.poll()  # a leader that nobody waits for stays in the process table
            if not _runs(process.pid):
                return
            time.sleep(0.1)


def _runs(group: int) -> bool:
    """Whether a process of the group is there that is not a zombie: in a container, nobody may collect orphans."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = status.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it ended meanwhile
        if int(its_group) == group and state != "Z":
            return True
    return False


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log; says so where there are none."""
    text = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(line for line in text[-lines:]) or f"({log} is empty)"


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
