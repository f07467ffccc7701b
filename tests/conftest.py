"""Fixtures that every test directory shares: a vLLM process that believes in a GPU, and its answer as JSON."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from overlay.rehearsal import driver

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """`fake_driver((12, 1), overlay=True, devices=2, name=..., memory=...) -> env` for `run_python`.

    With `overlay` the checkout is on PYTHONPATH, as a user has it; without it vLLM is stock.
    """
    directory = tmp_path_factory.mktemp("driver")

    def environment(capability: tuple[int, int], *, overlay: bool = False, **described: Any) -> dict[str, str]:
        env = driver.environment(capability, directory=directory, **described)
        return with_overlay(env) if overlay else without_overlay(env)

    return environment


def hear_signals() -> None:
    """For `preexec_fn`: a child of nohup, or of a shell's background job, is started deaf to SIGHUP or SIGINT."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def with_overlay(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the checkout in front on PYTHONPATH and none of the caller's own overlay settings."""
    clean = without_overlay(env)
    return {**clean, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), clean.get("PYTHONPATH"))))}


def without_overlay(env: Mapping[str, str]) -> dict[str, str]:
    """`env` in which no overlay is found and none of its settings is left."""
    settings = {"OVERLAY_CONFIG", "OVERLAY_DISABLE", "OVERLAY_DEBUG", "OVERLAY_PATCHES"}
    clean = {key: value for key, value in env.items() if key not in settings}
    entries = filter(None, clean.pop("PYTHONPATH", "").split(os.pathsep))
    entries = [entry for entry in entries if Path(entry).resolve() != ROOT]
    return {**clean, "PYTHONPATH": os.pathsep.join(entries)} if entries else clean


def run_python(what: str, env: Mapping[str, str] | None = None, *args: str, timeout: float = 300) -> Any:
    """Run code, or a module given by its dotted name, in a fresh interpreter; return the JSON of its last output line.

    The child runs in the checkout, so `overlay` can be imported; whether sitecustomize is in effect depends on `env`
    alone. A child that fails, is too slow or prints no JSON fails the test, with what it wrote.
    """
    is_module = what.replace(".", "_").isidentifier()
    command = [sys.executable, "-m" if is_module else "-c", what, *args]
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as slow:
        said = (slow.stderr or b"").decode(errors="replace")
        pytest.fail(f"no answer within {timeout} s: {command[1:]}\n{said[-8000:]}")
    if done.returncode:
        pytest.fail(f"exit {done.returncode}: {command[1:]}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}")
    lines = done.stdout.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        pytest.fail(f"the last line is not JSON: {command[1:]}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}")
