"""The demo without a GPU: what it does, what it says it did not do, and its exit status."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from overlay import cli, serving
from overlay.commands import compile as compile_command
from overlay.commands import demo
from overlay.hardware import Device, Hardware
from overlay.rehearsal import columns
from tests.rehearsal.test_command import OVERLAY, STOCK

GIVEN = {"stock": STOCK, "overlay": OVERLAY}


def write_configuration(folder: Path) -> None:
    """In place of the checkpoint, where its weights do not matter: they take seconds to make."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "glm5_next_text"}')


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[columns.Question]:
    """No GPU, no rehearsal and no compiler: the questions that the demo would have rehearsed."""
    questions: list[columns.Question] = []

    def ask_all(given: list[columns.Question], **how: object) -> list[dict]:
        assert all((question.model / "config.json").is_file() or question.model.is_file() for question in given)
        questions.extend(given)
        return [GIVEN for _ in given]

    monkeypatch.setattr(Hardware, "devices", ())
    monkeypatch.setattr(columns, "ask_all", ask_all)
    monkeypatch.setattr(compile_command, "run", lambda options: print(f"compiled {options.arch}") or 0)
    monkeypatch.setattr(demo, "show_experts", lambda scratch: print("experts shown"))
    return questions


def test_without_a_gpu(asked: list, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    assert [question.flags for question in asked] == [("--kv-cache-dtype", "bfloat16"), ("--kv-cache-dtype", "fp8")]
    assert {(question.capability, question.tp) for question in asked} == {((12, 1), 2)}
    assert "OVERLAY_SPARSE_MLA" in out and "experts shown" in out and "compiled sm_120,sm_121" in out
    assert "Not run, because there is no NVIDIA GPU here: the kernels, ours and the experts', and the server." in out
    assert not asked[0].model.exists(), "the tiny checkpoint was left behind"


def test_status_is_that_of_its_parts(asked: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "write_checkpoint", write_configuration)
    monkeypatch.setattr(compile_command, "run", lambda options: 1)
    assert cli.main(["demo"]) == 1
    monkeypatch.setattr(compile_command, "run", lambda options: 0)
    monkeypatch.setattr(columns, "ask_all", lambda given, **how: [{"stock": OVERLAY, "overlay": STOCK}] * len(given))
    assert cli.main(["demo"]) == 1


def test_another_gpu_is_named(asked: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(demo, "write_checkpoint", write_configuration)
    monkeypatch.setattr(Hardware, "devices", (Device("NVIDIA H200", (9, 0), False),))
    assert cli.main(["demo"]) == 0
    assert "the GPU here is NVIDIA H200 of capability 9.0; --any-gpu serves on it" in capsys.readouterr().out


def test_a_gpu_can_be_left_alone(asked: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(demo, "write_checkpoint", write_configuration)
    monkeypatch.setattr(Hardware, "devices", (Device("NVIDIA GB10", (12, 1), True),))
    monkeypatch.setattr(demo, "serve_it", lambda *arguments: pytest.fail("it served"))
    assert cli.main(["demo", "--no-gpu"]) == 0
    assert "because --no-gpu was given" in capsys.readouterr().out


@pytest.mark.parametrize(("capability", "opened"), [((12, 0), None), ((9, 0), 'other_capabilities = "9.0"')])
def test_serves_where_it_can(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    capability: tuple[int, int],
    opened: str | None,
) -> None:
    """With a GPU: one completion, its backend and the patches; another family is opened by its own configuration."""

    class Server:
        def completion(self, prompt: str) -> dict:
            return {"choices": [{"text": " jumps"}]}

        def processes(self) -> list[dict]:
            return [{"pid": 7, "patches": {"sparse_mla": "active"}}]

        def attention(self) -> str:
            return "OVERLAY_SPARSE_MLA: fp8 rows"

    @contextmanager
    def serve(model: Path, flags: tuple, log: Path, base: dict, progress: object):
        assert (model / "config.json").is_file() and log == tmp_path / "log"
        config = base.get("OVERLAY_CONFIG")
        assert (Path(config).read_text() if config else None) == (opened and f"[patches.sparse_mla]\n{opened}\n")
        yield Server()

    monkeypatch.setattr(demo, "write_checkpoint", write_configuration)
    monkeypatch.delenv("OVERLAY_CONFIG", raising=False)
    monkeypatch.setattr(Hardware, "devices", (Device("a GPU", capability, False),))
    monkeypatch.setattr(serving, "serve", serve)
    assert cli.main(["demo", "--any-gpu", "--log", str(tmp_path / "log")]) == 0
    out = capsys.readouterr().out
    assert "' jumps'" in out and "OVERLAY_SPARSE_MLA: fp8 rows" in out and "sparse_mla active" in out
