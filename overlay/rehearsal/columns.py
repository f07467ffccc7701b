"""Runs a rehearsal twice, stock and with the overlay, each in a child under the stub driver."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from overlay.errors import OverlayError
from overlay.rehearsal import driver
from overlay.rehearsal.planner import FIRST_STAGE, PROGRESS, Request

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = driver.GIB
# What a boot takes besides weights, buffers and the profile run's prefill: activations, CUDA graphs, the CUDA context,
# NCCL. Nothing here computes it; it is printed, and --allowance changes it.
ALLOWANCE = 3 * GIB
# A column takes 12 s of one core; a machine that needs longer than this is not working on it.
TIMEOUT_S = 600.0
COLUMNS = ("stock", "overlay")


class RehearsalError(OverlayError):
    """The question itself cannot be put to vLLM: no such model, no such capability."""


@dataclass(frozen=True)
class Question:
    """What to rehearse: a model on `tp` GPUs of `capability`, with any further flags of `vllm serve`.

    `memory` (bytes per GPU) defaults to the usual board's; with `kv_memory` (bytes per GPU) nothing is subtracted.
    """

    model: Path
    capability: tuple[int, int]
    tp: int = 1
    flags: Sequence[str] = ()
    memory: int | None = None
    kv_memory: int | None = None
    allowance: int = ALLOWANCE


Columns = dict[str, dict[str, Any]]


def ask(question: Question, progress: Callable[[str], None] = lambda line: None, **how: Any) -> Columns:
    """Column name -> what vLLM would do (planner.Rehearsal.fields); `how` as in `ask_all`."""
    return ask_all([question], progress, **how)[0]


def ask_all(
    questions: Sequence[Question],
    progress: Callable[[str], None] = lambda line: None,
    columns: Sequence[str] = COLUMNS,
    base: Mapping[str, str] = os.environ,
    output: IO[str] | None = None,
) -> list[Columns]:
    """The columns of several questions about one kind of GPU, for the price of importing vLLM once for each column.

    The children of `columns` run at once. `progress` is told each stage; `output` receives all that they print; neither
    is called by two threads at a time. Raises RehearsalError for a model that cannot be read, DriverError where the
    stub driver cannot be built.
    """
    speaking = threading.Lock()
    capability, memory = _one_kind(questions)
    board = driver.board(capability)
    env = driver.environment(
        capability,
        devices=max(question.tp * _other_ranks(question.flags) for question in questions),
        memory=0 if board.integrated else memory,
        base=base,
    )
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overlay-rehearsal-")))
        requests = []
        for question in questions:
            folder = stack.enter_context(model_folder(question.model))
            flags = ["--model", str(folder), "--tensor-parallel-size", str(question.tp), *question.flags]
            requests.append(Request(flags, list(capability), memory, question.kv_memory, question.allowance))
        request_file = scratch / "requests.json"
        request_file.write_text(json.dumps([asdict(request) for request in requests]))
        children = [
            Child(
                name,
                len(requests),
                request_file,
                scratch / f"{name}.json",
                column_environment(name, env),
                progress,
                output,
                speaking,
            )
            for name in columns
        ]
        for child in children:
            stack.callback(child.end)
        answers = [child.answers() for child in children]
    return [dict(zip(columns, pair, strict=True)) for pair in zip(*answers, strict=True)]


def _one_kind(questions: Sequence[Question]) -> tuple[tuple[int, int], int]:
    """Capability and memory, in bytes, of the GPUs that all questions are about."""
    kinds = {(q.capability, driver.board(q.capability).memory if q.memory is None else q.memory) for q in questions}
    if len(kinds) != 1:
        raise RehearsalError(f"one rehearsal is about GPUs of one kind, not of {len(kinds)}")
    return kinds.pop()


def _other_ranks(flags: Sequence[str]) -> int:
    """GPUs per tensor-parallel rank that the flags ask for: pipeline stages times data-parallel replicas."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-pp", "--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("-dp", "--data-parallel-size", type=int, default=1)
    parallel, _ = parser.parse_known_args(flags)
    return max(parallel.pipeline_parallel_size * parallel.data_parallel_size, 1)


def column_environment(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: the checkout in front, as a user has it, and the kill switch in the stock column."""
    others = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry and Path(entry) != ROOT]
    quiet = {
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "VLLM_NO_USAGE_STATS": "1",
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",  # it would compile helpers for a GPU that is not there
    }
    column = {**env, **quiet, "PYTHONPATH": os.pathsep.join([str(ROOT), *others])}
    column.pop("OVERLAY_DISABLE", None)
    return {**column, "OVERLAY_DISABLE": "1"} if name == "stock" else column


@contextmanager
def model_folder(model: Path) -> Iterator[Path]:
    """The folder that vLLM is given: the model's own, or a scratch folder around a file of another name."""
    config = model / "config.json" if model.is_dir() else model
    if not config.is_file():
        raise RehearsalError(
            f"{config}: no such file. --model takes a checkpoint's folder or its config.json; "
            "nothing is downloaded, so fetch a Hugging Face model's config.json first"
        )
    try:
        content = json.loads(config.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RehearsalError(f"{config}: is not a JSON file: {error}") from error
    if not isinstance(content, dict) or not ("model_type" in content or "architectures" in content):
        raise RehearsalError(f"{config}: is not a model's configuration: it has neither model_type nor architectures")
    if config.name == "config.json":
        yield config.parent.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="overlay-model-") as folder:
        shutil.copyfile(config, Path(folder) / "config.json")
        yield Path(folder)


@dataclass
class Child:
    """One column's process, its stages as they pass, and the end of what it printed."""

    name: str
    questions: int
    request_file: Path
    answer_file: Path
    env: Mapping[str, str]
    progress: Callable[[str], None]
    output: IO[str] | None
    speaking: threading.Lock  # of all columns: print() writes a line and its end apart, and lines would run together
    said: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    stage: str = "starting Python"
    question: int = 0  # the number of the one that it works at

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "overlay.rehearsal.planner", str(self.request_file), str(self.answer_file)],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self.speaking:
                self._take(line)

    def _take(self, line: str) -> None:
        if line.startswith(PROGRESS):
            self.stage = line.removeprefix(PROGRESS).strip()
            self.question += self.stage == FIRST_STAGE
            which = f"model {self.question} of {self.questions}: " if self.questions > 1 else ""
            self.progress(f"{self.name:<8} {time.monotonic() - self.started:4.0f} s  {which}{self.stage}")
        else:
            self.said.append(line.rstrip())
        if self.output is not None:
            self.output.write(f"{self.name}: {line}")

    def answers(self) -> list[dict[str, Any]]:
        """Wait for all answers; where the child dies before the last, the rest say so with its last lines."""
        seconds = TIMEOUT_S * self.questions
        try:
            status = f"exit status {self.process.wait(timeout=seconds)}"
        except subprocess.TimeoutExpired:
            self.end()
            status = f"not done within {seconds:.0f} s"
        self.reader.join(timeout=10)
        found = json.loads(self.answer_file.read_text()) if self.answer_file.is_file() else []
        last = "\n".join(list(self.said)[-8:])
        failure = {"stage": self.stage, "error": f"the process ended without an answer ({status}):\n{last}"}
        lost = {"boots": False, "failure": failure, "log": [], "patches": []}
        return found + [lost] * (self.questions - len(found))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
