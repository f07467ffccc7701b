"""process_proof against the real EngineCore, with workers that run the same overlay, another one, or none."""

import json
import subprocess
from pathlib import Path

import pytest

from overlay.patches.process_proof import compare, differences
from tests.conftest import run_python
from tests.startup.standin import PYTHON, ROOT, environment, make

ANSWER_OF_A_WORKER = """
import cloudpickle, json, os, sys
try:
    import vllm
except ImportError:
    pass
print(json.dumps(cloudpickle.loads(bytes.fromhex(os.environ["CALL"]))(None)))
"""

ENGINE_CORE = """
import json, os, subprocess, sys
import cloudpickle
from vllm.v1.engine.core import EngineCore

def worker(env):
    call = os.environ["CALL"] = cloudpickle.dumps(sent).hex()
    done = subprocess.run([sys.executable, "-c", os.environ["WORKER"]], env={**os.environ, **env, "CALL": call},
                          capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

class Executor:
    def __init__(self, environments):
        self.environments = environments
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        global sent
        sent = method
        return [worker(env) for env in self.environments]

class Dying:
    def __init__(self, error):
        self.error = error
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        assert timeout and timeout < 3600  # a worker that hangs must not hang the engine
        raise self.error

def start(executor):
    core = object.__new__(EngineCore)
    core.model_executor = executor if isinstance(executor, Dying) else Executor(executor)
    try:
        core._initialize_kv_caches(None)
    except Exception as error:
        return [type(error).__name__, str(error)]

same = {}
print(json.dumps({
    "same": start([same, same]),
    "none": start([same, {"PYTHONPATH": os.environ["WITHOUT"]}]),
    "disabled": start([same, {"OVERLAY_DISABLE": "1"}]),
    "other": start([same, {"OVERLAY_PATCHES": "sparse_mla=false"}]),
    "killed": start(Dying(RuntimeError("Executor failed: worker 1 died"))),
    "hangs": start(Dying(TimeoutError("RPC call to answer timed out."))),
}))
"""


@pytest.fixture(scope="module")
def started(fake_driver, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """How the real EngineCore starts with two workers; they import a light vLLM, because only their answer matters."""
    site = make(tmp_path_factory.mktemp("site"))
    env = fake_driver((12, 1), overlay=True)
    worker = ANSWER_OF_A_WORKER.replace("import vllm", f"sys.path.insert(0, {str(site)!r}); import vllm")
    return run_python(ENGINE_CORE, {**env, "WORKER": worker, "WITHOUT": str(site)})


def test_equal_workers_pass_on_to_the_stock_method(started: dict[str, list[str]]):
    # The stock method then fails on the empty core that this test gives it: it was reached.
    assert started["same"][0] == "AttributeError"


@pytest.mark.parametrize("which", ["none", "disabled"])
def test_a_worker_without_the_overlay_is_refused_by_rank(started: dict[str, list[str]], which: str):
    kind, message = started[which]
    assert kind == "RanksDiffer"
    assert "rank 1 runs without the overlay" in message and "rank 0" not in message


def test_a_worker_with_another_switch_is_refused_with_what_differs(started: dict[str, list[str]]):
    kind, message = started["other"]
    assert kind == "RanksDiffer"
    assert "rank 1 (pid " in message and "differs: patches.sparse_mla.state: off, not " in message


@pytest.mark.parametrize(("which", "said"), [("killed", "worker 1 died"), ("hangs", "RPC call to answer timed out")])
def test_a_worker_that_dies_or_hangs_before_it_answers_stops_the_engine(started, which: str, said: str):
    """With vLLM's own error: the stock method, which would raise AttributeError here, is not reached."""
    kind, message = started[which]
    assert kind in ("RuntimeError", "TimeoutError") and said in message


def test_differences_name_every_leaf():
    ours = {"overlay": "1", "patches": {"a": {"state": "armed", "options": {"x": 1}}}}
    theirs = {"overlay": "2", "patches": {"a": {"state": "armed", "options": {"x": 2}}, "b": {"state": "off"}}}
    assert differences(ours, theirs) == [
        "overlay: 1, not 2", "patches.a.options.x: 1, not 2", "patches.b: None, not {'state': 'off'}"
    ]  # fmt: skip
    assert differences(ours, ours) == []


def test_compare_is_silent_only_where_all_agree():
    said = {"pid": 1, "fingerprint": "f", "parts": {"overlay": "1"}}
    assert compare([said, dict(said, pid=2)], said) == []
    assert len(compare([None, dict(said, fingerprint="g", parts={"overlay": "2"})], said)) == 2


def test_status_live_shows_running_processes_and_forgets_the_dead(tmp_path: Path):
    site = make(tmp_path)
    code = "import sys, vllm; print('up', flush=True); sys.stdin.read()"

    def status():
        command = [PYTHON, "-m", "overlay", "status", "--live", "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        mine = [p for p in json.loads(done.stdout)["processes"] if p["pid"] in pids]
        return done.returncode, mine

    processes, pids = [], []
    try:
        for settings in ({}, {"OVERLAY_PATCHES": "process_proof=false"}):
            process = subprocess.Popen(
                [PYTHON, "-c", code],
                env=environment(ROOT, site, **settings),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            processes.append(process)
            assert process.stdout.readline() == "up\n"
            pids.append(process.pid)
        code, (first, second) = status()
        assert first["patches"]["process_proof"] == "armed" and second["patches"]["process_proof"] == "off"
        assert first["fingerprint"] != second["fingerprint"] and code == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert status()[1] == []


def test_a_forked_child_answers_for_itself(tmp_path: Path):
    code = """
import json, os, vllm
from overlay import live
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, json.dumps([p["pid"] for p in live.processes()]).encode()); os._exit(0)
pid, _ = os.wait()
print(json.dumps([os.getpid() in (said := json.loads(os.read(read, 65536))), pid in said, len(said) == len(set(said))]))
"""
    assert run_python(code, environment(ROOT, make(tmp_path))) == [True, True, True]
