"""`python -m overlay rehearse`: what it asks, prints and returns, and every mistake that a user can make."""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from overlay import cli
from overlay.checkpoint import findings
from overlay.commands import rehearse
from overlay.recipes.check import GEOMETRY
from overlay.rehearsal import columns, driver, report
from tests.conftest import hear_signals

PATCH = {"id": "sparse_mla", "state": "active", "reason": "bf16 rows"}
STOCK = {"boots": False, "failure": {"stage": "the model", "error": "ValueError: no backend"}, "log": [], "patches": []}
OVERLAY = {
    **{"boots": True, "failure": None, "log": ["sparse_mla: ours"], "patches": [PATCH]},
    **{"vllm": "0.33.0", "attention_backend": "OVERLAY_SPARSE_MLA", "kv_cache_dtype": "bfloat16"},
    **{"kv_cache_dtype_asked": "bfloat16", "row_bytes": 1024, "block_size": 2304, "bytes_per_token": 11630.7},
    **{"moe_backend": "MARLIN", "kv_tokens": 1000, "bytes_per_block": 26_797_056, "quantization": None},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "glm5_next_text"}')
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[columns.Question]:
    """The questions that the command puts, each answered with STOCK and OVERLAY."""
    questions: list[columns.Question] = []

    def ask(question: columns.Question, **how: object) -> dict:
        questions.append(question)
        return {"stock": STOCK, "overlay": OVERLAY}

    monkeypatch.setattr(columns, "ask", ask)
    return questions


def test_flags_of_vllm_pass_through_in_their_order(model: Path, asked: list) -> None:
    line = f"rehearse --model {model} --kv-cache-dtype fp8 --capability 12.1 -tp 2 --memory 100GiB --max-model-len 4096"
    assert cli.main([*line.split(), "--mem-like-this", "--speculative-config", '{"method": "mtp"}']) == 0
    (question,) = asked
    assert (question.model, question.capability, question.tp) == (model, (12, 1), 2)
    assert (question.memory, question.kv_memory, question.allowance) == (100 << 30, None, columns.ALLOWANCE)
    flags = ["--kv-cache-dtype", "fp8", "--max-model-len", "4096", "--mem-like-this", "--speculative-config"]
    assert question.flags == [*flags, '{"method": "mtp"}']


def test_json_has_the_contracts_shape(model: Path, asked: list, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["rehearse", "--model", str(model), "--capability", "12.0", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["stock", "overlay", "findings"]
    keys = {"attention_backend", "kv_cache_dtype", "block_size", "bytes_per_token", "moe_backend"}
    assert keys <= set(printed["overlay"])
    assert {finding["check"] for finding in printed["findings"]} == {"stock_boot"}


def test_exit_status_is_the_overlays(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(columns, "ask", lambda question, **how: {"stock": OVERLAY, "overlay": STOCK})
    assert cli.main(["rehearse", "--model", str(model), "--capability", "12.0"]) == 1
    out = capsys.readouterr().out
    assert "error: vLLM with the overlay would not boot, at the model: ValueError: no backend" in out


@pytest.mark.parametrize("named", ["", "config.json"])
def test_a_checkpoints_own_faults_are_among_the_findings(
    named: str, model: Path, asked: list, capsys: pytest.CaptureFixture
) -> None:
    (model / "model.safetensors").write_bytes(b"not safetensors")
    assert cli.main(["rehearse", "--model", str(model / named), "--capability", "12.1", "--json"]) == 1
    checks = [finding["check"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert checks == ["stock_boot", "unreadable_shard"]


@pytest.mark.parametrize(
    ("what", "cure", "flags", "status"),
    [
        ("routed experts: no scale", "patch nvfp4_moe_scales (on by default) serves it as W4A16", [], 0),
        ("routed experts: NaN", "download again", [], 1),
        ("MTP layer, routed experts: NaN", "download again", [], 0),
        ("MTP layer, routed experts: NaN", "download again", ["--speculative-config", "{}"], 1),
    ],
)
def test_what_a_patch_cures_or_nobody_loads_does_not_count(
    what: str, cure: str, flags: list[str], status: int, model: Path, asked: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [findings.error("weight_scale_unusable", what, "garbage", cure)]
    monkeypatch.setattr(rehearse, "checkpoint_findings", lambda *_: found)
    assert cli.main(["rehearse", "--model", str(model), "--capability", "12.1", *flags]) == status


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "config.json: no such file"),
        ("{", "config.json: is not a JSON file"),
        ("[]", "is not a model's configuration"),
        ('{"hidden_size": 1}', "neither model_type nor architectures"),
    ],
)
def test_a_model_that_is_none(content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert cli.main(["rehearse", "--model", str(tmp_path), "--capability", "12.1"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["12", "121", "sm_12", "12.10", "12.1b", "", "a.b"])
def test_a_capability_that_is_none(wrong: str, model: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_status:
        cli.main(["rehearse", "--model", str(model), "--capability", wrong])
    assert exit_status.value.code == 2
    assert "it looks like 12.1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["12.1", " 12.1", "12.1a", "sm_121", "sm_121a", "sm_121f"])
def test_spellings_of_a_capability(text: str) -> None:
    assert rehearse.capability(text) == (12, 1)
    assert rehearse.capability("9.0") == rehearse.capability("sm_90") == (9, 0)


def test_json_is_json_where_nothing_could_be_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["rehearse", "--model", str(tmp_path), "--capability", "12.1", "--json"]) == 2
    said = capsys.readouterr()
    assert "no such file" in json.loads(said.out)["error"] and "no such file" in said.err


def test_an_interrupted_rehearsal_has_no_traceback(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def ask(question: columns.Question, **how: object) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr(columns, "ask", ask)
    assert cli.main(["rehearse", "--model", str(model), "--capability", "12.1"]) == 130
    assert capsys.readouterr().err == "overlay: interrupted\n"


def test_a_tensor_parallel_size_that_is_none(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["rehearse", "--model", str(model), "--capability", "12.1", "--tp", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_no_compiler(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert cli.main(["rehearse", "--model", str(model), "--capability", "12.1"]) == 2
    assert "apt-get install gcc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24GiB", 24 << 30),
        ("121.7 gib", int(121.7 * (1 << 30))),
        ("24GB", 24 * 10**9),
        ("512MiB", 1 << 29),
        ("25769803776", 24 << 30),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert rehearse.size(text) == value


@pytest.mark.parametrize("text", ["24", "1024", "121.7", "1000KiB"])
def test_a_size_without_its_unit(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give a unit"):
        rehearse.size(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "-1GiB", "24 G B", "0", "1e3", "24parsec"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="looks like 24GiB"):
        rehearse.size(text)


def test_other_commands_still_refuse_unknown_flags(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["status", "--no-such-flag"])
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err


def test_devices_cover_every_rank() -> None:
    assert columns._other_ranks(["--kv-cache-dtype", "fp8"]) == 1
    assert columns._other_ranks(["-pp", "2", "--data-parallel-size=3"]) == 6


def test_one_rehearsal_is_about_one_kind_of_gpu(model: Path) -> None:
    questions = [columns.Question(model, (12, 0)), columns.Question(model, (12, 1))]
    with pytest.raises(columns.RehearsalError, match="one kind"):
        columns.ask_all(questions)


@pytest.fixture
def as_column(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """`as_column(script)`: lines of shell in the place of each column's Python."""

    def make(script: str) -> None:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}")
        python.chmod(0o755)
        monkeypatch.setattr(columns.sys, "executable", str(python))
        monkeypatch.setattr(driver, "build", lambda directory: tmp_path)

    return make


def test_a_child_that_dies_says_with_what(as_column: Callable[[str], None], model: Path) -> None:
    """A crash below Python leaves no answer: the column ends with the status and the last lines."""
    as_column("echo 'rehearsal: importing vLLM'\necho 'Segmentation fault in here'\nkill -SEGV $$\n")
    said: list[str] = []
    both = columns.ask(columns.Question(model, (12, 1)), said.append)
    for column in both.values():
        assert column["failure"]["stage"] == "importing vLLM"
        assert "exit status -11" in column["failure"]["error"]
        assert "Segmentation fault in here" in column["failure"]["error"]
    assert len(said) == 2 and all(line.endswith(" s  importing vLLM") for line in said)
    assert "would not boot" in report.as_text(both, report.findings(**both))


def test_progress_says_which_of_several_models_it_is_about(as_column: Callable[[str], None], model: Path) -> None:
    as_column("for n in 1 2; do echo 'rehearsal: importing vLLM'; echo 'rehearsal: CUDA graphs'; done\n")
    said: list[str] = []
    columns.ask_all([columns.Question(model, (12, 1))] * 2, said.append, columns=["stock"])
    assert [line.split(" s  ")[1] for line in said] == [
        f"model {number} of 2: {stage}" for number in (1, 2) for stage in ("importing vLLM", "CUDA graphs")
    ]


def test_two_columns_never_speak_at_once(as_column: Callable[[str], None], model: Path) -> None:
    """print() writes a line and its end apart: two threads in it made "stock ... vLLMoverlay ... vLLM" of two lines."""
    as_column("for i in $(seq 200); do echo 'rehearsal: stage'; done\n")
    inside: list[str] = []
    together: list[list[str]] = []

    def progress(line: str) -> None:
        inside.append(line)
        time.sleep(0.0005)
        together.append(inside.copy())
        inside.pop()

    columns.ask(columns.Question(model, (12, 1)), progress)
    assert len(together) == 400 and max(len(lines) for lines in together) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rehearsal_that_is_terminated_leaves_no_children(number: int) -> None:
    command = [sys.executable, "-m", "overlay", "rehearse", "--model", str(GEOMETRY), "--capability", "12.1"]
    streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    started = subprocess.Popen(command, cwd=columns.ROOT, preexec_fn=hear_signals, **streams)
    with started:
        waiting_for = set(columns.COLUMNS)
        while waiting_for:  # until both children run
            waiting_for.discard(started.stderr.readline().split()[0])
        children = psutil.Process(started.pid).children(recursive=True)
        started.send_signal(number)
        assert started.wait(60) == 128 + number
    assert children and not [child for child in children if child.is_running() and child.status() != "zombie"]


def test_columns_differ_in_the_kill_switch_alone() -> None:
    env = {"OVERLAY_DISABLE": "1", "PYTHONPATH": f"/other:{columns.ROOT}", "A": "b"}
    stock, overlay = (columns.column_environment(name, env) for name in columns.COLUMNS)
    assert stock.pop("OVERLAY_DISABLE") == "1"
    assert stock == overlay
    assert overlay["PYTHONPATH"] == f"{columns.ROOT}:/other" and overlay["A"] == "b"
