"""How the child starts the last rank otherwise, with vLLM's own executor module; its workers are stand-ins."""

import pytest

from tests.conftest import run_python
from tests.gpu.rank_cases import cases

ODD = [case.name for case in cases(4) if case.odd]

START = """
import json, os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from vllm.v1.executor.multiproc_executor import WorkerProc
from tests.gpu import rank_cases, rank_child

SAY = (
    "import os, sys; site = sys.modules.get('sitecustomize'); "
    "print(os.environ.get('OVERLAY_PATCHES'), hasattr(site, 'VllmFinder'))"
)

def make(*, rank):
    done = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, cwd="/")
    return done.stdout.split()

WorkerProc.make_worker_process = staticmethod(make)
before, found = dict(os.environ), {}
for case in rank_cases.cases(4):
    if case.odd:
        with rank_child.last_rank_differs(case), ThreadPoolExecutor(case.tp) as pool:  # as vLLM starts them
            starts = [pool.submit(WorkerProc.make_worker_process, rank=rank) for rank in range(case.tp)]
            found[case.name] = [start.result() for start in starts]
print(json.dumps({"found": found, "unchanged": dict(os.environ) == before and WorkerProc.make_worker_process is make}))
"""


@pytest.fixture(scope="module")
def started(fake_driver):
    return run_python(START, fake_driver((9, 0), overlay=True, devices=4))


@pytest.mark.parametrize("name", ODD)
def test_only_the_last_rank_differs(started, name):
    *others, last = started["found"][name]
    assert others and all(other == ["None", "True"] for other in others)
    assert last == (["None", "False"] if "without" in name else ["sparse_mla=false", "True"])


def test_nothing_else_is_changed(started):
    assert started["unchanged"]
