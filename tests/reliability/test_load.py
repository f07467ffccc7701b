"""The load test sees what it is there to see: real clients over HTTP against a server that misbehaves in one way."""

import asyncio
import contextlib
import copy
import json
import subprocess
import sys
import time

import pytest

from overlay.hardware import Device
from tests.gpu import load, load_cases, load_client, load_servers
from tests.gpu.load_cases import NEW_TOKENS, Tally, difference, owner
from tests.gpu.load_judge import Sample, furthest, growth, growth_problems, noise_problems
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
    # Within a second every kind must come: most of what is given up within 150 ms was answered before.
    mix = {"whole": 30, "streamed": 30, "aborted": 10, "cancelled": 20, "malformed": 10}
    monkeypatch.setattr(load_client, "MIX", mix)
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


@pytest.mark.parametrize("beside_stock", [True, False])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crossed", "crossed: the answer to prompt"),
        ("lost", "lost: prompt"),
        ("cut", "lost: prompt"),
        ("fails", "HTTP 500"),
        ("drift", "of our answers differ from themselves alone, allowed are 0.50%"),
        ("nan", "an answer differs by inf"),
        ("errors", "answered with 500"),
        ("leak", "vllm:num_requests_running is 3.0 when nobody asks"),
    ],
)
def test_a_fault_is_seen(stock, process, tmp_path, fault, said, beside_stock):
    found = load.judge(measured(Engine(fault), process, tmp_path), stock if beside_stock else None)
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize("beside_stock", [True, False])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"alone_again": 0.3}, "alone, after the load, an answer differs by 0.300"),
        # Ours differs under load as well: that must not widen what it is allowed.
        ({"alone_again": 0.3, "largest_difference": 0.4}, "alone, after the load, an answer differs by 0.300"),
        ({"largest_difference": 0.05}, "an answer differs by 0.050 from itself alone, allowed is 0.040"),
        ({"compared_answers": 0}, "nothing was compared"),
        ({"load_seconds": 0.4}, "the load on ours lasted 0 s, not 1"),
    ],
)
def test_figures_that_are_not_as_they_must_be(stock, changes, said, beside_stock):
    found = load.judge({**stock, **changes}, stock if beside_stock else None)
    assert any(said in problem for problem in found), found


def test_stock_that_was_hardly_loaded_is_no_yardstick(stock):
    assert load.judge(stock, {**stock, "load_seconds": 0.2}) == [
        "the load on stock lasted 0 s, not 1: --budget has no room for more"
    ]


def test_a_load_that_the_budget_cuts_short_is_a_problem(short, process, tmp_path):
    with serve(Engine()) as port:
        running = load.Running("ours", process, port, ("0",), tmp_path / "log")
        figures = asyncio.run(load.measure(running, 12, 30.0, time.monotonic() + 4.0))
    (problem,) = (p for p in load.judge(figures, None) if "lasted" in p)
    assert problem.startswith("the load on ours lasted ") and "not 30" in problem


@pytest.fixture
def whole(short, process, monkeypatch, tmp_path):
    """`whole(stock)`: what `python -m tests.gpu.load` prints and keeps, with `Engine`s behind both sides."""
    kept = {}
    monkeypatch.setattr(load.measurement, "keep", lambda name, document: kept.update({name: document}))
    monkeypatch.setattr(load.jobs, "gpus", lambda: tuple("01"))
    monkeypatch.setattr(load.jobs, "room", lambda gib: 1)
    monkeypatch.setattr(load.load_judge, "growth", lambda samples, seconds: {"gpu": 0.0, "host": 0.0})
    seen = []

    def run(stock: Engine | None, *options: str) -> tuple[int, dict, list]:
        dead = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        dead.wait()

        @contextlib.contextmanager
        def servers(turn, tp, clients, folder):
            seen.append(turn)
            (folder / "stock").write_text("ValueError: no backend\n")
            with serve(Engine()) as one, serve(stock or Engine()) as two:
                found = {
                    "ours": load.Running("ours", process, one, ("0",), folder / "ours"),
                    "stock": load.Running(
                        "stock", process if stock else dead, two if stock else 1, ("0",), folder / "stock"
                    ),
                }
                yield [found[side] for side, _ in turn]

        monkeypatch.setattr(load, "servers", servers)
        arguments = ["load", "--clients", "12", "--seconds", "2", "--folder", str(tmp_path), *options]
        monkeypatch.setattr("sys.argv", arguments)
        return load.main(), kept, seen

    return run


def test_a_run_from_beginning_to_end(whole, capsys):
    """Both servers at once, and the file that is kept; what is not there is the server's process and its GPU."""
    status, kept, seen = whole(Engine())
    assert status == 0 and kept["load"]["problems"] == [] and kept["load"]["stock"]["compared_answers"]
    assert seen == [[("ours", ("0",)), ("stock", ("1",))]]
    assert capsys.readouterr().out.startswith("ours ")


def test_several_ranks_are_compared_with_stock_too_in_turn(whole):
    status, kept, seen = whole(Engine(), "--tp", "2")
    assert status == 0 and kept["load-tp2"]["stock"]["compared_answers"]
    assert seen == [[("ours", ("0", "1"))], [("stock", ("0", "1"))]]


def test_stock_that_answers_nonsense_allows_nothing(whole):
    status, kept, _ = whole(Engine("nan"))
    assert status == 1 and kept["load"]["stock"]["largest_difference"] == "inf"
    assert kept["load"]["problems"] == ["a log-probability of vLLM's own answers is no number: they are no yardstick"]
    assert "Infinity" not in json.dumps(kept)


def test_where_stock_does_not_serve_the_tolerance_is_the_bound(whole, capsys):
    status, kept, _ = whole(None)
    assert status == 0 and "stock" not in kept["load"]
    assert kept["load"]["without_stock"] == "the stock server ended with 3"
    assert "the stock server ended with 3: judged by the tolerance alone" in capsys.readouterr().out


def test_a_stock_server_that_fails_later_takes_nothing_of_ours_away(whole):
    refuses = Engine()
    refuses.choice = lambda prompt: 1 / 0  # HTTP 500
    status, kept, _ = whole(refuses)
    assert status == 0 and kept["load"]["ours"]["compared_answers"]
    assert kept["load"]["without_stock"].startswith("the stock server: Refused: HTTP 500")


def test_a_gpu_that_is_too_small_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(load.jobs.Hardware, "devices", (Device("GPU", (12, 0), False, 12 << 30),))
    with pytest.raises(SystemExit, match=r"a GPU of 12\.0 GiB is too small: one engine of this test may take 17 GiB"):
        load.run(1, 64, 240.0, 1200.0, tmp_path)


@pytest.mark.parametrize(
    ("tp", "count", "at_once"), [(1, 1, False), (1, 2, True), (2, 3, False), (4, 4, False), (4, 8, True)]
)
def test_no_two_servers_share_a_gpu(tp, count, at_once):
    found = load_servers.turns(tp, tuple("01234567"[:count]))
    assert len(found) == (1 if at_once else 2)
    for turn in found:
        used = [gpu for _, gpus in turn for gpu in gpus]
        assert len(used) == len(set(used)) == tp * len(turn)


def test_what_stock_answers_to_nonsense_is_not_held_against_ours(stock, process, tmp_path):
    errors = measured(Engine("errors"), process, tmp_path)
    assert load.judge(errors, errors) == []


def test_a_server_that_does_not_come_up_is_named_with_its_log(short, tmp_path):
    (tmp_path / "log").write_text("ValueError: no GPU\n")
    dead = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    running = load.Running("ours", dead, 1, ("0",), tmp_path / "log")
    with pytest.raises(load.NotServed, match=r"(?s)the ours server ended with 3.*no GPU"):
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


def test_answers_that_part_where_the_margin_is_no_number_are_not_alike():
    alone = {**ONE, "margins": [2.0, float("nan"), 1.0]}
    assert difference(alone, {**ONE, "tokens": [1, 9, 3]}) == (float("inf"), 1)


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
        (figures(0.0, 0.0), {**figures(0.0, 0.0), "compared_answers": 0}, 1),
        (figures(0.004, 0.03), None, 0),
        (figures(0.006, 0.05), None, 2),
        ({**figures(0.0, 0.0), "compared_answers": 0}, None, 1),
        (figures(0.0, 0.3), figures(0.0, float("inf")), 2),
    ],
)
def test_noise(ours, stock, problems):
    assert len(noise_problems(ours, stock)) == problems


def test_nothing_of_ours_but_the_tolerance_is_in_the_bound():
    assert furthest(figures(1.0, 9.0), None) == furthest(figures(0.0, 0.0), None) == 0.04
    assert furthest(figures(0.0, 0.0), figures(0.0, 0.4)) == 0.8


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


@pytest.fixture
def smi(monkeypatch):
    """`smi(compute_apps, memory_used)`: what nvidia-smi says from now on."""

    def says(apps: list[str], used: list[str]) -> None:
        answers = {"--query-compute-apps=pid,used_memory": apps, "--query-gpu=memory.used": used}
        monkeypatch.setattr(load_servers, "nvidia_smi", lambda query, gpus=(): answers[query][: len(gpus) or None])

    return says


def test_memory_of_a_process_and_its_children_is_read(process, tmp_path, smi):
    running = load.Running("ours", process, 1, ("0",), tmp_path)
    smi([f"{process.pid}, 700", "1, 9000", f"{process.pid}, 50"], ["9999"])
    sample = load.memory(running, 1.0, load.told_apart(running))
    assert 1.0 < sample.host < 200.0 and sample.gpu == 750.0


def test_where_processes_cannot_be_told_apart_the_whole_gpu_is_read_and_the_report_says_so(
    short, process, tmp_path, smi
):
    running = load.Running("ours", process, 1, ("0", "1"), tmp_path)
    smi(["1, 9000"], ["500", "600", "700"])
    assert not load.told_apart(running) and load.memory(running, 1.0, False).gpu == 1100.0
    figures = measured(Engine(), process, tmp_path, seconds=0.3)
    assert figures["gpu_memory_of"] == "whole GPUs, where nothing else of these tests runs"
    smi([f"{process.pid}, 700"], [])
    assert measured(Engine(), process, tmp_path, seconds=0.3)["gpu_memory_of"] == "its processes"
    smi([f"{process.pid}, [N/A]"], ["[N/A]", "[N/A]"])
    assert not load.told_apart(running) and load.memory(running, 1.0, False).gpu is None


def test_prompts_reach_every_edge_and_are_the_same_everywhere():
    lengths = {len(prompt) for prompt in load_cases.prompts()}
    assert {1, 4, 5, 64, 65, 2047, load_cases.LONGEST - NEW_TOKENS} <= lengths
    assert load_cases.prompts() == load_cases.prompts()
    assert sum(load_cases.MIX.values()) == 100
