"""process_proof where an engine core does not reach every rank: data parallel, and ranks of an external launcher.

Both against vLLM's own code: its start-up handshake over ZeroMQ, its world group, its engine core.
"""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT, run_python

# One data parallel rank: vLLM's own side of the handshake, in a process of its own.
RANK = """
import os, zmq
from types import SimpleNamespace
from vllm.config import ParallelConfig
from vllm.v1.engine.core import EngineCoreProc

config = SimpleNamespace(parallel_config=ParallelConfig(data_parallel_size=2, data_parallel_size_local=1))
core = object.__new__(EngineCoreProc)
with core._perform_handshake(zmq.Context(), os.environ["ADDRESS"], (0).to_bytes(2, "little"), True, False, config):
    pass
"""

# The front end that waits for it; vLLM's releases give the function other arguments of the same names.
FRONT_END = """
import inspect, json, os, subprocess, sys, tempfile, zmq
from types import SimpleNamespace
from vllm.config import CacheConfig, ParallelConfig
from vllm.v1.engine.utils import CoreEngine, EngineZmqAddresses, wait_for_engine_startup
from overlay import startup

def wait(env, dp=2):
    address = f"ipc://{tempfile.mkdtemp()}/handshake"
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    rank = subprocess.Popen([sys.executable, "-c", os.environ["RANK"]], env={**env, "ADDRESS": address})
    addresses = EngineZmqAddresses(inputs=[], outputs=[])
    known = dict(
        handshake_socket=socket, addresses=addresses, core_engines=[CoreEngine(0, True)],
        parallel_config=ParallelConfig(data_parallel_size=dp, data_parallel_size_local=1), coordinated_dp=True,
        cache_config=CacheConfig(), proc_manager=None, coord_process=None,
        launch=SimpleNamespace(addresses=addresses, engine_manager=None, coordinator=None,
                               watched_frontend_processes=()),
    )
    try:
        wait_for_engine_startup(**{name: known[name] for name in inspect.signature(wait_for_engine_startup).parameters})
    except RuntimeError as error:
        return str(error)
    finally:
        rank.wait(120)

with_gpu = dict(os.environ)
alone = ParallelConfig().compute_hash()
print(json.dumps({
    "no GPU": wait(json.loads(os.environ["NO_GPU"])),
    "other": wait({**with_gpu, "OVERLAY_PATCHES": "sparse_mla=false"}),
    "none": wait({**with_gpu, "OVERLAY_DISABLE": "1"}),
    "hash alone": alone,
    "state": str(next(e.decided for e in startup.current().entries if e.patch.id == "sparse_mla")),
}))
"""

# One rank of torchrun, with vLLM's own world group and engine core. It makes three engines one after another.
LAUNCHED = """
import json, os, sys, time
from vllm.distributed.parallel_state import get_world_group, init_distributed_environment
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from overlay import startup
from overlay.patches import process_proof

rank = int(os.environ["RANK"])
init_distributed_environment(2, rank, os.environ["MEET"], local_rank=rank, backend="gloo")

def start():
    executor = object.__new__(ExecutorWithExternalLauncher)
    executor.driver_worker = object()
    core = object.__new__(EngineCore)
    core.model_executor = executor
    try:
        core._initialize_kv_caches(None)
    except Exception as error:
        return [type(error).__name__, str(error)]

answers = {"asked": start()}
entry = next(e for e in startup.current().entries if e.patch.id == "kda_pdl")
entry.decided = type(entry.state).ARMED  # both ranks alike from here
answers["same"] = start()
process_proof.LAUNCHED_TIMEOUT_S, process_proof.LAUNCHED_REMINDER_S = 3.0, 1.0
if rank == 0:
    answers["silent"] = start()
else:
    time.sleep(6)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def handshake(fake_driver) -> dict[str, str | None]:
    """What vLLM's front end says to three ranks. It sees a Hopper, so that its own states are not those of no GPU."""
    env = fake_driver((9, 0), overlay=True)
    bare = {key: value for key, value in env.items() if not key.startswith(("LD_", "OVERLAY_REHEARSAL"))}
    return run_python(FRONT_END, {**env, "RANK": RANK, "NO_GPU": json.dumps(bare)})


def test_data_parallel_ranks_of_one_overlay_are_taken(handshake):
    """Also where one of the two has no GPU: a launcher without one decides for engines that have some."""
    assert handshake["state"] == "retired"  # which it is not without a GPU
    assert handshake["no GPU"] is None


@pytest.mark.parametrize("which", ["other", "none"])
def test_a_data_parallel_rank_of_another_overlay_or_none_is_refused(handshake, which: str):
    """By vLLM itself, whose message prints both hashes: they say that it was the overlay."""
    message = handshake[which]
    assert message is not None and "Configuration mismatch detected for engine 0" in message
    assert message.count(" with overlay ") == (2 if which == "other" else 1)
    worker, expected = (message.partition(f"{name} hash: ")[2].partition(" with")[0] for name in ("Worker", "Expected"))
    assert worker.partition(",")[0] == expected  # vLLM's own part is the same


def test_without_data_parallelism_the_hash_is_vllms_own(handshake):
    assert "overlay" not in handshake["hash alone"]


@pytest.fixture(scope="module")
def launched(fake_driver, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, list[str]], str]]:
    """Two ranks that start together; the second has another switch."""
    meet = tmp_path_factory.mktemp("meet") / "store"
    env = fake_driver((12, 0), overlay=True, devices=2) | {"MEET": f"file://{meet}", "LOCAL_RANK": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHED],
            env={**env, "RANK": str(rank), **extra},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, extra in enumerate(({}, {"OVERLAY_PATCHES": "kda_pdl=true"}))
    ]
    said = [rank.communicate(timeout=300) for rank in ranks]
    for rank, (_, err) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, err[-8000:]
    return [(json.loads(out.splitlines()[-1]), err) for out, err in said]


def test_ranks_of_an_external_launcher_refuse_each_other_by_name(launched):
    """On both of them, with the same sentence: each is an engine core that only reaches itself."""
    (first, _), (second, _) = launched
    kind, message = first["asked"]
    assert kind == "RanksDiffer" and first["asked"] == second["asked"]
    assert "rank 1 (pid " in message and "differs: patches.kda_pdl.state: armed, not off" in message
    assert "rank 0 (pid " in message.splitlines()[-1]


def test_equal_ranks_of_an_external_launcher_pass_on_to_the_stock_method(launched):
    # It then fails on the empty worker of this test, which can do nothing: it was reached.
    assert [answers["same"][0] for answers, _ in launched] == ["NotImplementedError", "NotImplementedError"]
    assert all("2 of 2 workers run overlay" in log for _, log in launched)


def test_a_rank_that_says_nothing_is_named_and_refused(launched):
    """As one without the overlay does: it waits in vLLM's next collective, and none of ours."""
    answers, log = launched[0]
    kind, message = answers["silent"]
    assert kind == "RanksDiffer"
    assert message.startswith("rank 1 did not say in ") and "runs without the overlay" in message
    assert "rank 1 has not said which overlay it runs" in log
