"""flashinfer_fa2 against vLLM's real Hopper backend and FlashInfer's real planning and build.

That the capped kernel compiles, and what shared memory it takes (91,680 bytes), was found with nvcc for sm_120a.
"""

import importlib.metadata
import multiprocessing
import sys
from types import ModuleType, SimpleNamespace

import pytest

from overlay.context import Context
from overlay.hardware import Device, Hardware
from overlay.patches import flashinfer_fa2
from overlay.patches.flashinfer_fa2 import CAPPED_TILE, FP8_BYTES_TILE_16, FP8_TILE, PATCH, probe
from overlay.sources import VllmSources
from tests.patches.scenarios.flashinfer_fa2 import OPT_IN

FP8_BYTES_TILE_32 = 117_312


@pytest.fixture
def answers(answer):
    return answer("flashinfer_fa2")


def test_stock_is_for_hopper_only(answers):
    assert answers["stock"]["capabilities"] == {"12.1": False, "12.0": False, "9.0": True}
    assert answers["stock"]["state"]["backend"] == "fa3"


def test_wrapped_takes_12_with_the_fa2_kernel(answers):
    assert answers["wrapped"]["capabilities"] == {"12.1": True, "12.0": True, "9.0": True}
    assert answers["wrapped"]["state"] == {"backend": "fa2", "rows": 8, "graph": True, "restored": True}


def test_batches_that_overrun_flashinfers_list_are_refused(answers):
    assert answers["stock"]["too many"]["backend"] == "fa3"
    refused = answers["wrapped"]["too many"]
    assert refused["error"] == "PatchError"
    assert "--max-num-batched-tokens 16336" in refused["said"]
    assert answers["wrapped"]["most"]["backend"] == "fa2"


def test_fp8_rows_are_let_through_on_12_and_nowhere_else(answers):
    stock, wrapped = answers["stock"]["kernels"], answers["wrapped"]["kernels"]
    assert stock["fp8 12.1"] == "_BackendPlanUnsupportedError"
    assert wrapped["fp8 12.1"] is None
    assert wrapped["fp8 12.1, less memory"] == "PatchError"
    for case in ("bf16 12.1", "fp8 9.0", "fp8 8.9"):
        assert wrapped[case] == stock[case]


def test_the_fp8_kernel_is_built_against_the_capped_header(answers):
    stock, wrapped = answers["stock"]["kernels"], answers["wrapped"]["kernels"]
    assert wrapped["fp8 build"]["name"] == stock["fp8 build"]["name"] + "_tile16"
    assert len(wrapped["fp8 build"]["folders"]) == len(stock["fp8 build"]["folders"]) + 1
    assert wrapped["bf16 build"] == stock["bf16 build"]


def test_one_line_of_the_header_is_changed_beside_its_own_includes(answers):
    changes = [change for change in answers["changed lines"] if "#include" not in change[0]]
    assert len(changes) == 1
    assert "CTA_TILE_KV > 32" in changes[0][1]
    includes = {old.split('"')[1]: new.split('"')[1] for old, new in answers["changed lines"] if "#include" in old}
    assert includes.pop("../profiler.cuh") == "flashinfer/profiler.cuh"
    assert includes and all(new == f"flashinfer/attention/{old}" for old, new in includes.items())


def test_the_shared_memory_that_flashinfer_itself_computes(answers):
    assert answers["shared bytes"] == FP8_BYTES_TILE_32 > OPT_IN > FP8_BYTES_TILE_16
    # Sixteen rows less: fp8 rows and their copies in bf16, and the probabilities' tile of 64 columns.
    assert FP8_BYTES_TILE_32 - FP8_BYTES_TILE_16 == 16 * (512 + 64 + 512 * 2 + 2)


@pytest.mark.parametrize(
    ("version", "kind"), [("0.6.17", "impossible"), ("0.6.18.post1", "present"), ("0.7.2.post1", "present")]
)
def test_an_old_flashinfer_is_refused_by_name(monkeypatch, version, kind):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    hardware = Hardware()
    hardware.__dict__["devices"] = (Device("NVIDIA GB10", (12, 1), True),)
    verdict = probe(Context("flashinfer_fa2", {}, True, VllmSources.find(), hardware))
    if not VllmSources.find().has("vllm.models.glm5next"):
        kind = "absent"
    assert verdict.kind == kind
    assert kind != "impossible" or "flashinfer-python>=0.6.18" in verdict.reason


def write_header(env, barrier, rounds):
    """One rank: in each round the header is there for none of them. It ends with 1 where a round fails."""
    sys.modules["flashinfer"], sys.modules["flashinfer.jit"] = ModuleType("flashinfer"), ModuleType("flashinfer.jit")
    sys.modules["flashinfer.jit"].env = env
    header = env.FLASHINFER_GEN_SRC_DIR / "overlay_mla_tile16/flashinfer/attention/mla.cuh"
    for _ in range(rounds):
        if barrier.wait() == 0:
            header.unlink(missing_ok=True)
        barrier.wait()
        flashinfer_fa2.capped_headers()
        text = header.read_text()
        assert text.count(CAPPED_TILE) == 1 and text.endswith("// the end\n")


def test_ranks_that_write_the_header_at_once_all_find_it_whole(tmp_path):
    folder = tmp_path / "include/flashinfer/attention"
    folder.mkdir(parents=True)
    filler = "// as long as the real one\n" * 4000
    (folder / "mla.cuh").write_text(f"{FP8_TILE}\n{filler}// the end\n")
    env = SimpleNamespace(FLASHINFER_INCLUDE_DIR=tmp_path / "include", FLASHINFER_GEN_SRC_DIR=tmp_path / "generated")
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(4, timeout=60)
    ranks = [fork.Process(target=write_header, args=(env, barrier, 100)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    (header,) = (file for file in (tmp_path / "generated").rglob("*") if file.is_file())
    assert header.name == "mla.cuh"


def test_it_is_off_by_default():
    assert PATCH.default is False
