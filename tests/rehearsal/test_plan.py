"""Rehearsals of the full-size GLM-5.3-Flash geometry by the real vLLM: two children for each capability, asked once."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from overlay.rehearsal import columns, report
from overlay.rehearsal.columns import Question
from tests import installed
from tests.conftest import ROOT, run_python, without_overlay

MODEL = ROOT / "tests" / "data" / "glm53-flash-text-config.json"
LENGTH = ("--max-model-len", "131072")
GIB = 1 << 30
OURS, NATIVE = "OVERLAY_SPARSE_MLA", "FLASHINFER_MLA_SPARSE_SM120"
NATIVE_ROWS = (NATIVE, "fp8_ds_mla", 656) if installed.NATIVE_WRITES_ROWS else None
# Bytes of a block of four ranks' geometry, 16 heads each: releases pad the other layers' pages differently.
FOUR_RANKS = (18_011_136, 13_820_928) if installed.since(0, 32) else (17_462_016, 13_812_480)
needs_native = pytest.mark.skipif(
    not installed.NATIVE_WRITES_ROWS, reason="from vLLM 0.31 the native backend serves this model, where it may"
)


def question(capability: tuple[int, int], *flags: str, tp: int = 2, kv_memory: int | None = 24 * GIB) -> Question:
    return Question(MODEL, capability, tp, (*LENGTH, *flags), kv_memory=kv_memory)


def kv(dtype: str) -> tuple[str, str]:
    return "--kv-cache-dtype", dtype


QUESTIONS = {
    "bfloat16": question((12, 1), *kv("bfloat16")),
    "fp8": question((12, 1), *kv("fp8")),
    "auto": question((12, 1), *kv("auto")),
    "four ranks": question((12, 1), *kv("fp8"), tp=4),
    "another backend": question((12, 1), *kv("bfloat16"), "--attention-backend", "TRITON_MLA"),
    "little memory": question((12, 1), *kv("fp8"), kv_memory=GIB // 8),
    "bf16 weights": question((12, 1), *kv("fp8"), kv_memory=None),
    "no such flag": question((12, 1), "--no-such-flag"),
}


def ask(questions: dict[str, Question]) -> dict[str, columns.Columns]:
    answers = columns.ask_all(list(questions.values()), base=without_overlay(os.environ))
    return dict(zip(questions, answers, strict=True))


@pytest.fixture(scope="module")
def spark() -> dict[str, columns.Columns]:
    """The answers for GB10, by name of the question."""
    return ask(QUESTIONS)


@pytest.fixture(scope="module")
def workstation() -> dict[str, columns.Columns]:
    """The answers for capability 12.0, by KV dtype; and with the number of sequences that vLLM takes for 96 GiB."""
    dtypes = ("bfloat16", "fp8", "auto")
    questions = {dtype: question((12, 0), *kv(dtype), "--max-num-seqs", "64") for dtype in dtypes}
    return ask({**questions, "default sequences": question((12, 0), *kv("bfloat16"))})


@pytest.fixture(scope="module")
def direct(fake_driver: Callable[..., dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The same plans by vLLM's planner called directly, by KV dtype asked for."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copyfile(MODEL, folder / "config.json")
    env = fake_driver((12, 1), overlay=True, devices=2)
    return run_python("tests.rehearsal.direct", env, str(folder), timeout=600)


PLANNED = ("block_size", "bytes_per_block", "num_blocks", "kv_tokens", "max_concurrency")


@pytest.mark.parametrize(
    ("asked", "column", "reference"),
    [
        ("bfloat16", "overlay", "bfloat16"),
        ("fp8", "overlay", "fp8"),
        pytest.param("fp8", "stock", "auto", marks=needs_native),  # vLLM's own path stores fp8_ds_mla rows for both
        pytest.param("auto", "stock", "auto", marks=needs_native),
        ("auto", "overlay", "auto"),
    ],
)
def test_agrees_with_the_planner(spark: dict, direct: dict, asked: str, column: str, reference: str) -> None:
    rehearsed = {name: spark[asked][column][name] for name in PLANNED}
    assert rehearsed == direct[reference]


def test_blocks_of_four_ranks(spark: dict) -> None:
    stock, ours = spark["four ranks"]["stock"], spark["four ranks"]["overlay"]
    assert (stock["block_size"], ours["block_size"]) == (2304, 2304)
    assert (stock["bytes_per_block"], ours["bytes_per_block"]) == FOUR_RANKS


@pytest.mark.parametrize("box", ["spark", "workstation"])
@pytest.mark.parametrize(
    ("asked", "stock", "ours"),
    [
        ("bfloat16", None, (OURS, "bfloat16", 1024)),
        ("fp8", NATIVE_ROWS, (OURS, "fp8", 512)),
        ("auto", NATIVE_ROWS, NATIVE_ROWS or (OURS, "bfloat16", 1024)),
    ],
)
def test_backend_and_rows(
    request: pytest.FixtureRequest, box: str, asked: str, stock: tuple | None, ours: tuple | None
) -> None:
    """Backend, KV dtype really used, and bytes of a row, on both capabilities of the family."""
    both = request.getfixturevalue(box)[asked]
    for column, expected in ((both["stock"], stock), (both["overlay"], ours)):
        assert column["boots"] is (expected is not None)
        if expected is not None:
            assert (column["attention_backend"], column["kv_cache_dtype"], column["row_bytes"]) == expected
            assert column["kv_cache_dtype_asked"] == asked


@pytest.mark.skipif(installed.NATIVE_WRITES_ROWS, reason="a fault of vLLM 0.30")
def test_a_backend_that_is_chosen_and_cannot_store_the_rows(spark: dict) -> None:
    failure = spark["fp8"]["stock"]["failure"]
    assert failure["stage"] == "the first batch"
    assert "cache writer refuses rows without rope" in failure["error"]


def test_refusals_are_the_selectors_own(spark: dict) -> None:
    (selection,) = spark["bfloat16"]["stock"]["selections"]
    assert selection["chosen"] is None
    assert selection["refused"] == {
        "TRITON_MLA": ["sparse not supported"],
        NATIVE: ["kv_cache_dtype not supported"],
    }
    failure = spark["bfloat16"]["stock"]["failure"]
    assert failure["stage"] == "the model, without weights"
    assert failure["error"].startswith("ValueError: No valid attention backend found")


def test_heads_are_those_of_a_rank(spark: dict) -> None:
    assert {name: spark[name]["stock"]["selections"][0]["heads"] for name in ("fp8", "four ranks")} == {
        "fp8": 32,
        "four ranks": 16,
    }


def test_weights_are_those_of_a_rank(spark: dict) -> None:
    """Two ranks hold the model's parameters once, but for what vLLM replicates (norms, latents, indexer, router)."""
    config = columns.json.loads(MODEL.read_text())
    experts = 3 * config["hidden_size"] * config["moe_intermediate_size"] * config["n_routed_experts"] * 2  # bf16
    of_experts = experts * (config["num_hidden_layers"] - config["first_k_dense_replace"])
    two, four = (spark[name]["overlay"]["weight_bytes"] for name in ("fp8", "four ranks"))
    assert of_experts / 2 < two < of_experts / 2 * 1.1
    assert two / 2 < four < two / 2 * 1.05


def test_patches_are_those_of_the_process(spark: dict) -> None:
    assert spark["fp8"]["stock"]["patches"] == []
    states = {patch["id"]: patch["state"] for patch in spark["fp8"]["overlay"]["patches"]}
    assert states["sparse_mla"] == "active"
    assert set(states.values()) <= {"active", "armed", "retired", "off"}


def test_rows_of_the_report_are_there(spark: dict) -> None:
    for column in spark["fp8"].values():
        assert column["moe_backend"] and column["cudagraph_mode"] and column["indexer_topk"]
        assert column["attention_layers"][column["attention_backend"]] == 11
        assert column["bytes_per_token"] == round(column["bytes_per_block"] / column["block_size"], 1)


def test_another_backend_is_never_replaced_and_would_not_boot(spark: dict) -> None:
    overlay = spark["another backend"]["overlay"]
    assert not overlay["boots"]
    assert overlay["selections"][0]["asked"] == "TRITON_MLA"
    assert "sparse not supported" in overlay["failure"]["error"]


def test_too_little_memory_is_vllms_own_refusal(spark: dict) -> None:
    overlay = spark["little memory"]["overlay"]
    assert overlay["failure"]["stage"] == "the KV cache plan"
    assert "KV cache" in overlay["failure"]["error"] and "max_model_len" in overlay["failure"]["error"]
    assert overlay["bytes_per_block"] == spark["fp8"]["overlay"]["bytes_per_block"]  # known before it failed


def test_graphs_are_checked_against_the_planned_blocks(workstation: dict) -> None:
    """vLLM takes 1024 sequences on a 96 GiB card, and refuses to capture graphs for more than it has Mamba blocks."""
    overlay = workstation["default sequences"]["overlay"]
    assert overlay["max_num_seqs"] == 1024 > overlay["num_blocks"]
    assert overlay["failure"]["stage"] == "CUDA graphs"
    assert "max_num_seqs (1024) exceeds available Mamba cache blocks" in overlay["failure"]["error"]


def test_memory_sum(spark: dict) -> None:
    overlay = spark["bf16 weights"]["overlay"]
    budget = overlay["budget"]
    taken = sum(budget[name] for name in ("weights", "buffers", "prefill_workspace", "allowance"))
    assert budget["kv_cache"] == int(budget["memory"] * budget["utilization"]) - taken < 0
    assert overlay["failure"] == {
        "stage": "the KV cache plan",
        "error": "no memory is left for the KV cache",
    }
    (finding,) = (f for f in report.findings(**spark["bf16 weights"]) if f.check == "overlay_boot")
    assert "--tp" in finding.cure


def test_a_flag_that_vllm_does_not_know(spark: dict) -> None:
    for column in spark["no such flag"].values():
        assert column["failure"] == {
            "stage": "vLLM's configuration",
            "error": "vllm serve: unrecognized arguments: --no-such-flag",
        }


def test_questions_do_not_disturb_each_other(spark: dict) -> None:
    """The last of them was asked in the same process as the first: nothing of a model is left in its buffers."""
    sizes = {name: spark[name]["overlay"]["buffer_bytes"] for name in ("bfloat16", "fp8")}
    assert 0 < sizes["fp8"] < 1 << 27
    assert abs(sizes["fp8"] - sizes["bfloat16"]) < 4096  # vLLM makes a few scalars once a process


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_answer_can_be_printed(spark: dict, name: str) -> None:
    both = spark[name]
    text = report.as_text(both, report.findings(**both))
    for column in both.values():
        if column["failure"]:
            assert column["failure"]["error"].split()[0] in text
        else:
            assert column["attention_backend"] in text


def test_a_file_of_another_name_and_a_folder_are_taken(tmp_path: Path) -> None:
    with columns.model_folder(MODEL) as folder:
        assert (folder / "config.json").read_text() == MODEL.read_text()
    assert not folder.exists()
    shutil.copyfile(MODEL, tmp_path / "config.json")
    for given in (tmp_path, tmp_path / "config.json"):
        with columns.model_folder(given) as folder:
            assert folder == tmp_path
