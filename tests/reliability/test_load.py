"""The load test sees what it is there to see: real clients over HTTP against a server that misbehaves in one way."""

import asyncio
import contextlib
import copy
import json
import subprocess
import sys
import time

import pytest

from tests.gpu import load, load_cases, load_client
from tests.gpu.load_cases import NEW_TOKENS, Sample, Tally, difference, growth, growth_problems, noise_problems, owner
from tests.reliability.completions import Engine, serve


@pytest.fixture(scope="module")
def process():
    """Stands for the server's process, whose memory is read."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield child
    child.kill()
    child.wait()


@pytest.fixture(scope="module")
def short():
    """Short prompts, few of them, and no waiting: what is tested is the judgement."""
    monkeypatch = pytest.MonkeyPatch()
    chosen = load_cases.prompts()[:8]
    monkeypatch.setattr(load_client, "prompts", lambda: chosen)
    monkeypatch.setattr(load, "SAMPLE_S", 0.05)
    monkeypatch.setattr(load, "RESERVED_S", 1.0)
    monkeypatch.setattr(load_client, "PATIENCE_S", 5.0)
    idle = load_client.idle
    monkeypatch.setattr(load_client, "idle", lambda server, names: idle(server, names, seconds=1.0))
    yield
    monkeypatch.undo()


def measured(engine: Engine, process: subprocess.Popen, tmp_path, seconds: float = 1.2) -> dict:
    with serve(engine) as port:
        running = load.Running("ours", process, port, ("0",), tmp_path / "log")
        figures = asyncio.run(load.measure(running, 12, seconds, time.monotonic() + 60))
    figures["memory_growth_mib"] = {"gpu": 0.0, "host": 0.0}  # too short to tell, and there is no GPU
    return figures


@pytest.fixture(scope="module")
def stock(short, process, tmp_path_factory):
    return measured(Engine(), process, tmp_path_factory.mktemp("stock"))


def test_a_server_that_behaves(stock):
    assert load.judge(stock, stock) == []
    assert load.judge(stock, None) == []
    requests = stock["requests"]
    assert requests["answered"] == requests["whole"] + requests["streamed"] == stock["compared_answers"]
    assert stock["compared_tokens"] == NEW_TOKENS * requests["answered"]
    assert stock["largest_difference"] == 0.0 and stock["alone_again"] == 0.0


def test_every_malformed_request_comes_and_is_refused(stock):
    seen = {status for counts in stock["refusals"].values() for status in counts}
    assert seen <= {"400", "404"}
    assert set(stock["refusals"]) <= set(load_cases.malformed("tiny", [1]))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crossed", "crossed: the answer to prompt"),
        ("lost", "lost: prompt"),
        ("cut", "lost: prompt"),
        ("fails", "HTTP 500"),
        ("drift", "of our answers differ from themselves alone, 0.00% of stock's"),
        ("nan", "an answer differs by inf"),
        ("errors", "answered with 500"),
        ("leak", "vllm:num_requests_running is 3.0 when nobody asks"),
    ],
)
def test_a_fault_is_seen(stock, process, tmp_path, fault, said):
    found = load.judge(measured(Engine(fault), process, tmp_path), stock)
    assert any(said in problem for problem in found), found


def test_a_run_from_beginning_to_end(short, process, tmp_path, monkeypatch, capsys):
    """Both servers at once, and the file that is kept; what is not there is the server's process and its GPU."""
    kept = {}
    monkeypatch.setattr(load.measurement, "keep", lambda name, document: kept.update({name: document}))
    monkeypatch.setattr(load.jobs, "gpus", lambda: ("0", "1"))
    monkeypatch.setattr(load.load_cases, "growth", lambda samples, seconds: {"gpu": 0.0, "host": 0.0})

    @contextlib.contextmanager
    def servers(tp, clients, folder):
        with serve(Engine()) as one, serve(Engine("nan")) as two:
            sides = (("ours", one), ("stock", two))
            yield [load.Running(side, process, port, ("0",), folder / side) for side, port in sides]

    monkeypatch.setattr(load, "servers", servers)
    monkeypatch.setattr("sys.argv", ["load", "--clients", "8", "--seconds", "2", "--folder", str(tmp_path)])
    assert load.main() == 0
    assert kept["load"]["problems"] == [] and kept["load"]["stock"]["largest_difference"] == "inf"
    assert "Infinity" not in json.dumps(kept) and capsys.readouterr().out.startswith("ours ")


def test_what_stock_answers_to_nonsense_is_not_held_against_ours(stock, process, tmp_path):
    errors = measured(Engine("errors"), process, tmp_path)
    assert load.judge(errors, errors) == []


def test_a_server_that_does_not_come_up_is_named_with_its_log(short, tmp_path):
    (tmp_path / "log").write_text("ValueError: no GPU\n")
    dead = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    running = load.Running("ours", dead, 1, ("0",), tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"(?s)the ours server ended with 3.*no GPU"):
        asyncio.run(load.measure(running, 2, 1.0, time.monotonic() + 30))


def test_a_server_that_is_gone_is_seen(short, process, tmp_path):
    with serve(Engine()) as port:
        pass

    async def ask() -> Tally:
        async with load_client.session() as session:
            server = load_client.Server(f"http://127.0.0.1:{port}", "tiny", session)
            server.alone = [{}] * len(server.prompts)
            await load_client.load(server, 2, 0.5)
            return server.tally

    assert any(problem.startswith("dropped: ") for problem in asyncio.run(ask()).problems)


ONE = {"tokens": [1, 2, 3], "logprobs": [-0.1, -0.2, -0.3], "margins": [2.0, 0.5, 1.0]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0.0, 3)),
        ({"logprobs": [-0.1, -0.25, -0.3]}, (0.05, 3)),
        ({"tokens": [1, 9, 3]}, (0.25, 1)),  # half of what the two best were apart
        ({"tokens": [1, 9, 3], "logprobs": [-0.6, -9.0, -9.0]}, (0.5, 1)),
        ({"logprobs": [float("nan"), -0.2, -0.3]}, (float("inf"), 3)),
    ],
)
def test_difference(changes, expected):
    distance, agreed = difference(ONE, {**ONE, **changes})
    assert (distance, agreed) == (pytest.approx(expected[0]), expected[1])


def test_owner_is_another_only_where_the_answer_is_wholly_anothers():
    alone = [
        {"tokens": [i] * NEW_TOKENS, "logprobs": [0.0] * NEW_TOKENS, "margins": [1.0] * NEW_TOKENS} for i in range(3)
    ]
    assert [owner(alone[i], alone, 0) for i in range(3)] == [0, 1, 2]
    mixed = copy.deepcopy(alone[1])
    mixed["tokens"][-1] = 9
    assert owner(mixed, alone, 0) == 0


def figures(share: float, largest: float) -> dict:
    return {"beyond_tolerance": round(1000 * share), "compared_answers": 1000, "largest_difference": largest,
            "tolerance": 0.02}  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "stock", "problems"),
    [
        (figures(0.0, 0.01), figures(0.0, 0.0), 0),
        (figures(0.004, 0.03), figures(0.0, 0.0), 0),
        (figures(0.006, 0.03), figures(0.0, 0.0), 1),
        (figures(0.1, 0.3), figures(0.05, 0.4), 0),
        (figures(0.1, 0.9), figures(0.05, 0.4), 1),
        ({**figures(0.0, 0.0), "compared_answers": 0}, figures(0.0, 0.0), 1),
    ],
)
def test_noise(ours, stock, problems):
    assert len(noise_problems(ours, stock)) == problems


def test_growth_counts_from_the_second_quarter_on():
    samples = [Sample(at, gpu=1000.0 + (500 if at > 20 else 0), host=100.0 + at) for at in range(0, 100, 5)]
    assert growth(samples, 100.0) == {"gpu": 0.0, "host": 50.0}
    leaking = [Sample(at, gpu=10.0 * at, host=100.0) for at in range(0, 100, 5)]
    assert growth(leaking, 100.0) == {"gpu": 500.0, "host": 0.0}


def test_growth_is_judged_beside_stock():
    assert growth_problems({"gpu": 10.0, "host": 90.0}, None) == []
    assert len(growth_problems({"gpu": 100.0, "host": 200.0}, None)) == 2
    assert growth_problems({"gpu": 100.0, "host": 200.0}, {"gpu": 50.0, "host": 150.0}) == []
    assert growth_problems({"gpu": None, "host": 0.0}, None) == ["gpu memory was not read"]


def test_memory_of_a_process_and_its_children_is_read(process, tmp_path):
    sample = load.memory(load.Running("ours", process, 1, ("0",), tmp_path), 1.0)
    assert 1.0 < sample.host < 200.0


def test_prompts_reach_every_edge_and_are_the_same_everywhere():
    lengths = {len(prompt) for prompt in load_cases.prompts()}
    assert {1, 4, 5, 64, 65, 2047, load_cases.LONGEST - NEW_TOKENS} <= lengths
    assert load_cases.prompts() == load_cases.prompts()
    assert sum(load_cases.MIX.values()) == 100
