"""`accept` finds each fault of a misbehaving server, names what it points to, and lets a good server pass."""

import asyncio
import json
import os
import re
import signal
import threading
from unittest import mock

import pytest

from overlay.acceptance import pointers, report, runner
from overlay.acceptance.client import UsageError
from overlay.acceptance.gates import FULL, QUICK, Plan, gates
from overlay.acceptance.runner import accept
from overlay.cli import main
from tests.acceptance.server import Engine, serve

SMALL = Plan(
    needles={"8k": 2_000, "230k": 230_000},
    rows=(64, 160),
    decode_from=900,
    decode_to=1_100,
    repeat=1_200,
    batches=(64,),
    canary=64,
    speed=32,
)


DEEP = Plan(
    needles={"8k": 1_500},
    rows=(64,),
    decode_from=2_000,
    decode_to=2_400,
    repeat=1_200,
    batches=(64,),
    canary=32,
    speed=16,
)


def judged(engine: Engine, skip: tuple[str, ...] = (), patience: float = 5.0, plan: Plan = SMALL) -> dict:
    """The kit's report on a server with this engine."""
    with serve(engine) as url:
        return asyncio.run(accept(url, None, plan, skip, patience, seed=3, say=lambda _: None))


def states(found: dict) -> dict[str, str]:
    return {gate["name"]: gate["state"] for gate in found["gates"]}


def gate(found: dict, name: str) -> dict:
    return next(gate for gate in found["gates"] if gate["name"] == name)


@pytest.fixture(scope="module")
def good() -> dict:
    return judged(Engine())


def test_a_server_that_behaves_passes_every_gate_that_its_context_allows(good):
    assert good["passed"], good
    assert states(good) == {**dict.fromkeys(states(good), "passed"), "needle-230k": "beyond"}


def test_what_was_measured_is_in_the_report(good):
    assert gate(good, "batch")["measured"]["running"][0] > 8
    assert gate(good, "prefix")["measured"]["cached_tokens"] == 100
    prompt = gate(good, "needle-8k")["measured"]["prompt_tokens"]
    assert prompt == pytest.approx(2_000, rel=0.05)
    speed = gate(good, "speed")["measured"]
    assert set(speed) == {"code", "prose", "structured"}
    assert all(len(kind["runs"]) == 5 and kind["tokens_per_second"] > 0 for kind in speed.values())
    assert sorted(speed["code"]["runs"])[2] == speed["code"]["tokens_per_second"]


def test_the_context_passes_the_length_at_which_engines_died(good):
    reached = int(re.search(r"to ([\d,]+),", gate(good, "decode")["detail"])[1].replace(",", ""))
    assert reached >= SMALL.decode_to * 0.95
    assert FULL.decode_from < 24_576 < FULL.decode_to


# fault -> the gate that must fail, with its symptom
CAUGHT = {
    "one-token": ("repetition", "repeated"),
    "empty": ("repetition", "repeated"),
    "nan-rows": ("rows", "repeated"),
    "replacement": ("replacement", "replacement"),
    "dropped": ("repetition", "dropped"),
    "error-event": ("repetition", "http"),
    "http-500": ("repetition", "http"),
    "crossed": ("echo", "echo"),
    "wrong-needle": ("needle-8k", "needle"),
    "drift": ("prefix", "prefix"),
    "ends-early": ("decode", "decode"),
    "wide-batch": ("batch", "batch"),
    "no-json": ("repetition", "malformed"),
    "odd-event": ("repetition", "malformed"),
    "endless-line": ("repetition", "malformed"),
}


@pytest.mark.parametrize("fault", CAUGHT)
def test_each_fault_is_caught_and_points_somewhere(fault):
    name, symptom = CAUGHT[fault]
    found = judged(Engine(fault=fault))
    assert not found["passed"]
    assert (gate(found, name)["state"], gate(found, name)["symptom"]) == ("failed", symptom)
    assert " ".join(pointers.POINTERS[symptom].split())[:60] in " ".join(report.as_text(found).split())


def test_exchanged_answers_are_seen_without_a_trained_model_too():
    found = judged(Engine(fault="crossed"), skip=("needle*", "echo", "rows"))
    assert gate(found, "batch")["symptom"] == "batch"


@pytest.mark.parametrize("fault", ["hang", "stalls"])
def test_a_hang_is_told_from_a_slow_answer_and_ends_the_run(fault):
    found = judged(Engine(fault=fault), patience=0.5)
    assert gate(found, "repetition")["symptom"] == "hang"
    assert gate(found, "repetition")["seconds"] < 5
    if fault == "hang":
        assert set(states(found).values()) == {"passed", "failed", "not run"}
        assert "does not answer" in found["engine"]


def test_an_engine_that_dies_past_a_context_length_is_named_by_the_long_decode():
    found = judged(Engine(fault="dies-decoding", where=2_200), plan=DEEP)
    assert gate(found, "decode")["symptom"] == "dropped"
    assert states(found)["replacement"] == states(found)["speed"] == "not run"
    assert "/health answers 503" in found["engine"]
    assert not found["passed"]


def test_a_failure_that_only_long_prompts_meet_leaves_the_rest_to_run():
    found = judged(Engine(fault="http-500", where=1_500))
    assert gate(found, "needle-8k")["symptom"] == "http"
    assert "EngineDeadError" in gate(found, "needle-8k")["detail"]
    assert states(found)["speed"] == "passed"


def test_an_interrupted_run_reports_the_gates_so_far(tmp_path, monkeypatch, capsys):
    """Ctrl-C while the second gate waits for a server that hangs."""
    report_file = tmp_path / "report.json"

    def interrupt(line: str) -> None:
        if line.startswith("[2/"):
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()

    monkeypatch.setattr("overlay.commands.accept._progress", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell job ignores it
    try:
        with serve(Engine(fault="hang")) as url:
            status = main(["accept", "--url", url, "--quick", "--json", str(report_file)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 1
    found = json.loads(report_file.read_text())
    assert states(found)["health"] == "passed"
    assert {state for name, state in states(found).items() if name != "health"} == {"not run"}
    assert found["engine"] == "interrupted" and "not accepted: 1 passed" in capsys.readouterr().out


def test_a_gate_that_failed_stays_failed_where_the_run_is_interrupted_after_it():
    """The server hangs: whoever presses Ctrl-C while it is asked whether it lives must not lose why it was asked."""

    async def interrupted() -> dict:
        with serve(Engine(fault="hang")) as url:
            failed = asyncio.Event()

            async def death(client: object) -> None:
                failed.set()
                await asyncio.sleep(60)

            with mock.patch.object(runner, "_death", death):
                task = asyncio.create_task(accept(url, None, SMALL, (), 0.5, 3, say=lambda _: None))
                await failed.wait()
                task.cancel()
                return await task

    found = asyncio.run(interrupted())
    assert gate(found, "repetition")["state"] == "failed" and gate(found, "repetition")["symptom"] == "hang"
    assert states(found)["speed"] == "not run" and found["engine"] == "interrupted"


def test_a_run_in_which_nothing_passed_is_not_accepted():
    found = judged(Engine(), skip=("*",))
    assert set(states(found).values()) == {"skipped"} and not found["passed"]


def test_deselected_gates_stay_in_the_report():
    found = judged(Engine(fault="wrong-needle"), skip=("needle*", "rows", "echo"))
    assert found["passed"]
    assert [name for name, state in states(found).items() if state == "skipped"] == [
        "rows",
        "echo",
        "needle-8k",
        "needle-230k",
    ]
    assert "skipped" in report.verdict(found)


def test_a_gate_only_a_trained_model_passes_says_how_to_leave_it_out():
    found = judged(Engine(fault="wrong-needle"))
    assert gate(found, "rows")["symptom"] == "rows"
    text = report.as_text(found)
    assert "random weights" in text
    assert "--skip needle-8k" in text


def test_an_unknown_gate_or_model_is_refused_by_name():
    with pytest.raises(UsageError, match="did you mean 'echo'"):
        judged(Engine(), skip=("ecko",))
    with serve(Engine()) as url, pytest.raises(UsageError, match="serves glm, not 'other'"):
        asyncio.run(accept(url, "other", SMALL, (), 5.0, 3, say=lambda _: None))


def test_nothing_listening_is_a_failed_run_not_a_traceback():
    found = asyncio.run(accept("http://127.0.0.1:9", None, SMALL, (), 1.0, 3, say=lambda _: None))
    assert gate(found, "health")["symptom"] == "refused"
    assert states(found)["speed"] == "not run"


def test_the_reason_that_nothing_is_run_is_told_once():
    lines = []
    found = asyncio.run(accept("127.0.0.1:9", None, SMALL, (), 1.0, 3, say=lines.append))
    assert found["url"] == "http://127.0.0.1:9"
    assert gate(found, "health")["detail"] == "http://127.0.0.1:9/health: 127.0.0.1:9: Connection refused"
    details = [gate["detail"] for gate in found["gates"] if gate["state"] == "not run"]
    assert "Connection refused" in details[0] and set(details[1:]) == {"as above"}
    assert sum("Connection refused" in line for line in lines) == 2


def test_an_engine_that_is_dead_from_the_start():
    found = judged(Engine(dead=True))
    assert gate(found, "health")["symptom"] == "unhealthy"
    assert "/health answers 503" in found["engine"]


def test_a_server_that_wants_a_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    detail = gate(judged(Engine(fault="locked")), "repetition")["detail"]
    assert "HTTP 401" in detail and "set OPENAI_API_KEY" in detail
    monkeypatch.setenv("OPENAI_API_KEY", "open sesame")
    found = judged(Engine(fault="locked"))
    assert found["passed"] and "open sesame" not in json.dumps(found)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "", "http:///v1"])
def test_an_address_that_is_none(url, capsys):
    assert main(["accept", "--url", url]) == 2
    assert "looks like http://localhost:8000" in capsys.readouterr().err


def test_a_report_that_could_not_be_written_is_refused_before_anything_is_asked(tmp_path, capsys):
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "none" / "report.json", tmp_path / "file" / "report.json"):
        assert main(["accept", "--url", "http://127.0.0.1:9", "--json", str(place)]) == 2
        said = capsys.readouterr().err
        assert str(place) in said and "[1/" not in said


def test_every_symptom_is_tried():
    """Each pointer is what some misbehaving server led to, here or in the tests above."""
    tried = {symptom for _, symptom in CAUGHT.values()} | {"refused", "unhealthy", "hang", "rows"}
    assert tried == set(pointers.POINTERS)


def test_every_kind_of_fault_has_a_pointer_and_every_gate_its_own_name():
    assert {"refused", "http", "dropped", "hang", "malformed", "unhealthy"} <= pointers.POINTERS.keys()
    for plan in (FULL, QUICK):
        names = [gate.name for gate in gates(plan)]
        assert len(names) == len(set(names))
    assert {gate.name for gate in gates(FULL) if gate.trained} == {
        "rows",
        "echo",
        "needle-8k",
        "needle-30k",
        "needle-88k",
        "needle-230k",
    }


def test_command_line_writes_json_compares_and_exits_by_the_verdict(tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    with serve(Engine()) as url:
        assert main(["accept", "--url", url + "/v1", "--quick", "--json", str(before)]) == 0
    assert "[1/" in capsys.readouterr().err
    written = json.loads(before.read_text())
    assert written["passed"] and written["model"] == "glm"
    with serve(Engine(fault="wrong-needle")) as url:
        command = ["accept", "--url", url, "--quick", "--json", str(after), "--compare", str(before)]
        assert main([*command, "--seed", str(written["seed"])]) == 1
    said = capsys.readouterr().out
    assert re.search(r"needle-8k +passed +failed", said)
    assert re.search(r"code, tokens/s +\d", said)
    assert "not accepted" in said


@pytest.mark.parametrize("text", ["", "[]", '{"gates": []}', '{"gates": [1]}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, capsys, text):
    file = tmp_path / "report.json"
    file.write_text(text)
    assert main(["accept", "--url", "http://127.0.0.1:9", "--compare", str(file)]) == 2
    assert "is not a report" in capsys.readouterr().err
    assert main(["accept", "--url", "http://127.0.0.1:9", "--compare", str(tmp_path / "none.json")]) == 2
