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
exec(os.environ.get("THEN", ""))
print(json.dumps(cloudpickle.loads(bytes.fromhex(os.environ["CALL"]))(None)))
"""

# As jaxtyping's and typeguard's import hooks do: they ask the path finder and wrap its loader, in front of ours.
BYPASSED = """
from importlib.machinery import PathFinder
class Tool:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path, target) if name == "vllm.envs" else None
sys.meta_path.insert(0, Tool())
import vllm.envs
"""

# A patch fails at its module, and whoever imported it goes on without.
SWALLOWED = """
import contextlib
from overlay.startup import current
def fail(module, ctx):
    raise RuntimeError("planted")
next(e for e in current().entries if e.patch.id == "compile_cache").patch.apply["vllm.envs"] = fail
with contextlib.suppress(Exception):
    import vllm.envs
"""

OLDER = "import overlay.patches.process_proof as proof; del proof.describe"

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
    "bypassed": start([same, {"THEN": os.environ["BYPASSED"]}]),
    "swallowed": start([same, {"THEN": os.environ["SWALLOWED"]}]),
    "older": start([same, {"THEN": os.environ["OLDER"]}]),
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
    then = {"BYPASSED": BYPASSED, "SWALLOWED": SWALLOWED, "OLDER": OLDER}
    return run_python(ENGINE_CORE, {**env, **then, "WORKER": worker, "WITHOUT": str(site)})


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


@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("bypassed", "vllm.envs was imported past it, by another import hook or before vllm"),
        ("swallowed", "it failed: vllm.envs: RuntimeError: planted"),
    ],
)
def test_a_patch_that_is_not_active_where_it_should_be_is_refused(started, which: str, reason: str):
    """What was decided at `import vllm` is the same on both ranks: the proof is about what happened since."""
    kind, message = started[which]
    assert kind == "RanksDiffer"
    assert f": compile_cache is not what was decided: {reason}" in message
    assert "rank 1 (pid " in message and "rank 0" not in message and "differs" not in message


def test_an_overlay_too_old_to_answer_is_refused_by_rank(started: dict[str, list[str]]):
    kind, message = started["older"]
    assert kind == "RanksDiffer"
    assert "rank 1 (pid " in message
    assert "runs another version of the overlay, which cannot answer (ImportError" in message


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


def said(
    pid: int, code: str = "1", state: str = "armed", alone: str = "armed", machine: str = "here", **astray: str
) -> dict[str, object]:
    parts = {"overlay code": code, "patches": {"a": {"state": state}}}
    without = {"overlay code": code, "patches": {"a": {"state": alone}}}
    about = {"process": f"{machine} {pid}", "pid": pid, "fingerprint": "f"}
    return {**about, "parts": parts, "without a GPU": without, "astray": astray}


def test_compare_is_silent_only_where_all_agree():
    assert compare([said(1), said(2)], said(0)) == []
    assert compare([None, said(2, code="2")], said(0)) == [
        "rank 0 runs without the overlay: PYTHONPATH is not set in its environment",
        "rank 1 (pid 2) differs: overlay code: 2, not 1",
    ]


def test_a_core_without_a_gpu_is_held_against_what_no_gpu_decides():
    """Its ranks' GPUs retire what it arms; another switch or another code of its own is still seen."""
    core, rank = said(0, state="armed"), said(1, state="retired")
    assert compare([rank, rank], core, has_gpu=False) == []
    assert compare([rank], core) == ["rank 0 (pid 1) differs: patches.a.state: retired, not armed"]
    switched = said(0, state="off", alone="off")
    assert compare([rank], switched, has_gpu=False) == ["rank 0 (pid 1) differs: patches.a.state: armed, not off"]
    (problem,) = compare([rank], said(0, code="2"), has_gpu=False)
    assert problem == "rank 0 (pid 1) differs: overlay code: 1, not 2"
    (problem,) = compare([rank, said(2)], core, has_gpu=False)
    assert problem == "rank 1 (pid 2) differs: patches.a.state: armed, not retired"


def test_strict_false_takes_a_failure_of_all_ranks_and_not_of_some():
    failed, other = said(1, a="it failed"), said(2, a="it failed too", b="it failed")
    assert len(compare([failed, failed], said(0))) == 2
    assert compare([failed, failed], said(0), strict=False) == []
    (problem,) = compare([failed, other], said(0), strict=False)
    assert problem == "rank 1 (pid 2): b is not what was decided: it failed"
    (problem,) = compare([failed, said(2)], said(0), strict=False)
    assert problem == "rank 0 (pid 1): a is not what was decided: it failed"


def test_the_core_itself_is_held_to_what_was_decided():
    (problem,) = compare([said(1)], said(0, a="it failed"))
    assert problem == "the engine core (pid 0): a is not what was decided: it failed"
    alone = said(1, a="it failed")  # one process is core and worker
    assert compare([alone], alone) == ["rank 0 (pid 1): a is not what was decided: it failed"]
    (problem,) = compare([said(1, machine="another")], said(1, a="it failed"))  # containers count alike
    assert problem == "the engine core (pid 1): a is not what was decided: it failed"


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
