"""Known failure lines are named with their cause; lines that only look like them are not."""

import io
import json
import re

import pytest

from overlay import cli
from overlay.doctor import logs

AUTOTUNING = "INFO - autotuner.py:829 - flashinfer.jit: [Autotuner]: Autotuning process starts ..."
TUNED = "INFO - autotuner.py:852 - flashinfer.jit: [Autotuner]: Autotuning process ends"
BROADCAST = (
    "INFO 09-02 11:57:54 [shm_broadcast.py:801] No available shared memory broadcast block found in 60 seconds. This "
    "typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv "
    "cache quantization)."
)
WATCHDOG = "[Rank 1] Watchdog caught collective operation timeout:"
GATHER = "WorkNCCL(SeqNum=12590, OpType=_ALLGATHER_BASE, NumelIn=1404928, NumelOut=2809856,"
NO_BACKEND = "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size="

# id -> (the lines as people met them, what the answer has to say, how sure)
MET = {
    "driver_out_of_memory": (
        [
            "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY]",
            "(0x00000051) returned from _memdescAllocInternal(pMemDesc) @ mem_desc.c:1359",
        ],
        ["no single cause is established", "MemAvailable"],
        ["unknown"],
    ),
    "autotuning": ([AUTOTUNING, BROADCAST], ["--no-enable-flashinfer-autotune", "symptom"], ["established"]),
    "nccl_builds": ([WATCHDOG, GATHER], ["not the versions", "2.28.9", "Other faults"], ["possible"]),
    "pe_dim": (
        ["RuntimeError: Worker failed with error 'concat_and_cache_mla,", "pe_dim must be 64 for fp8_ds_mla'"],
        ["sparse_mla", "0.31", "neither the checkpoint nor its quantisation"],
        ["established"],
    ),
    "no_backend_head_576": ([f"{NO_BACKEND}576,"], ["geometry that this overlay does not serve"], ["established"]),
    "indexer_page_size": (
        ["Assertion error (csrc/apis/attention.hpp:262): block_kv == 32 or block_kv == 64"],
        ["kpool_block_size", "2304"],
        ["established"],
    ),
    "marlin_for_fp4": (
        [
            "Your GPU does not have native support for FP4 computation but FP4 quantization is being used.",
            "Weight-only FP4 compression will be used leveraging the Marlin kernel.",
        ],
        ["No fault", "wrong on Blackwell"],
        ["established"],
    ),
    "draft_head_never_loaded": (
        ["RuntimeError: NVFP4 weight_scale for layer 'parallel_lm_head' was never loaded (still NaN)."],
        ["thrown away", "not the cure"],
        ["established"],
    ),
    "moe_backend_without_nvfp4": (
        ["KeyError: 'layers.0.ffn.experts.w13_input_scale'"],
        ["--moe-backend", "looks like a fault of the checkpoint and is none"],
        ["established"],
    ),
    "cutlass_fp4_internal": (
        ["RuntimeError: [FP4 gemm Runner] Failed to run cutlass FP4 gemm on sm120. Error: Error Internal"],
        ["sm_121a", "101,376 bytes", "cause 1 of 2", "cause 2 of 2"],
        ["established", "established"],
    ),
    "ptxas_too_old": (
        ["ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"],
        ["TRITON_PTXAS_PATH", "CUDA 13"],
        ["established"],
    ),
    "cuda_development_files": (
        ["fatal error: nvrtc.h: No such file or directory", "/usr/bin/ld: cannot find -lnvrtc"],
        ["cause 2 of 2", "This overlay's kernel needs none"],
        ["established", "established"],
    ),
    # From the sources of vLLM 0.33.0, and its threads.
    "no_backend_head_512": (
        [
            f"{NO_BACKEND}512, dtype=torch.bfloat16, kv_cache_dtype=bfloat16, block_size=None, use_mla=True, "
            "has_sink=False, use_sparse=True, use_mm_prefix=False)"
        ],
        ["sparse_mla", "bfloat16 rows"],
        ["established"],
    ),
    "flashinfer_import": (
        ["FLASHINFER_MLA_SPARSE_SM120 requires FlashInfer's sparse MLA decode API."],
        ["flashinfer_probe", "swallowed"],
        ["established"],
    ),
    "expert_scales_differ": (
        ["WARNING w1_weight_scale_2 must match w3_weight_scale_2. Accuracy may be affected."],
        ["nvfp4_moe_scales", "1.1"],
        ["established"],
    ),
}

# Lines that look like a known one, or share words with it, and have another cause or none that is known.
NEAR_MISSES = {
    "torch runs out of memory": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
    "another driver error": ["NVRM: Check failed: Invalid state [NV_ERR_INVALID_STATE]"],
    "broadcast alone": [BROADCAST],
    "broadcast after tuning": [AUTOTUNING, TUNED, BROADCAST],
    "tuning after broadcast": [BROADCAST, AUTOTUNING],
    "a worker failed meanwhile": [AUTOTUNING, "(Worker_TP1) ERROR WorkerProc hit an exception.", BROADCAST],
    "tuning alone": [AUTOTUNING],
    "another collective": [WATCHDOG, GATHER.replace("_ALLGATHER_BASE", "ALLREDUCE")],
    "watchdog alone": [WATCHDOG],
    "the collective alone": [GATHER],
    "the later check": ["RuntimeError: pe_dim must be 64 or 0 for fp8_ds_mla"],
    "another cache type": ["pe_dim must be 64 for fp8_e4m3"],
    "another head size": [f"{NO_BACKEND}128, dtype=torch.bfloat16, use_mla=False, use_sparse=False)"],
    "512 without sparse attention": [f"{NO_BACKEND}512, dtype=torch.bfloat16, use_mla=True, use_sparse=False)"],
    "head size 5760": [f"{NO_BACKEND}5760, dtype=torch.bfloat16)"],
    "another assertion": ["Assertion error (csrc/apis/attention.hpp:262): head_dim == 128"],
    "another file": ["Assertion error (csrc/apis/gemm.hpp:10): block_k == 64"],
    "FP8 through Marlin": ["Your GPU does not have native support for FP8 computation but FP8 quantization is used."],
    "another layer never loaded": ["RuntimeError: NVFP4 weight_scale for layer 'model.layers.3.mlp' was never loaded"],
    "another scale": ["KeyError: 'layers.0.ffn.experts.w13_weight_scale_2'"],
    "another model": ["KeyError: 'model.layers.0.mlp.experts.0.input_scale'"],
    "another GEMM": ["RuntimeError: [FP8 gemm Runner] Failed to run cutlass FP8 gemm on sm120. Error: Error Internal"],
    "another architecture": ["[FP4 gemm Runner] Failed to run cutlass FP4 gemm on sm100. Error: Error Internal"],
    "another CUTLASS error": ["[FP4 gemm Runner] Failed to run cutlass FP4 gemm on sm120. Error: Invalid argument"],
    "ptxas of another GPU": ["ptxas fatal   : Value 'sm_90a' is not defined for option 'gpu-name'"],
    "another ptxas error": ["ptxas fatal   : Unresolved extern function 'cudaGetParameterBufferV2'"],
    "another header": ["fatal error: Python.h: No such file or directory"],
    "another library": ["/usr/bin/ld: cannot find -lnvrtc_static_helper", "/usr/bin/ld: cannot find -lcuda"],
    "words of an entry": ["the patch sparse_mla cures pe_dim", "see NV_ERR_NO_MEMORY in the manual"],
    "nothing": [],
}  # fmt: skip


@pytest.mark.parametrize("name", MET)
def test_a_known_failure(name):
    lines, said, sure = MET[name]
    log = ["INFO 09-02 11:50:00 starting", *[f"(Worker_TP0 pid=7) {line}" for line in lines], "INFO bye"]
    matches = logs.examine("\n".join(log))
    assert [match.failure.id for match in matches] == [name]
    assert [cause.sure for cause in matches[0].failure.causes] == sure
    text = logs.as_text(matches)
    for words in said:
        assert words in text
    assert all(log[number - 1].strip() == text for number, text in matches[0].where)


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_line_that_only_looks_like_it(name):
    assert logs.examine("\n".join(["INFO starting", *NEAR_MISSES[name]])) == []


def test_every_entry_is_tried():
    assert {failure.id for failure in logs.failures()} == set(MET)


def test_every_entry_is_complete():
    for failure in logs.failures():
        assert failure.causes
        assert all(cause.sure in logs.SURE and cause.is_ and cause.cure for cause in failure.causes), failure.id
        assert re.search(r"#\d+|run with capability", failure.source), failure.id


def test_every_known_line_in_one_log():
    text = "\n".join(line for lines, *_ in MET.values() for line in lines)
    assert {match.failure.id for match in logs.examine(text)} == set(MET)


def test_one_worker_of_two_is_still_tuning():
    log = "\n".join([AUTOTUNING, AUTOTUNING, TUNED, BROADCAST])
    assert [match.failure.id for match in logs.examine(log)] == ["autotuning"]


def test_colours_do_not_hide_a_line():
    assert logs.examine("\x1b[31mRuntimeError:\x1b[0m pe_dim must be 64 for \x1b[1mfp8_ds_mla\x1b[0m")


def test_the_command(tmp_path, capsys):
    log = tmp_path / "boot.log"
    log.write_bytes(b"\xff\n" + "\n".join(MET["pe_dim"][0]).encode())
    assert cli.main(["doctor", "--log", str(log), "--json"]) == 0
    (known,) = json.loads(capsys.readouterr().out)["known"]
    assert known["id"] == "pe_dim"
    assert known["lines"] == [{"number": 3, "text": "pe_dim must be 64 for fp8_ds_mla'"}]
    log.write_text("all is well\n")
    assert cli.main(["doctor", "--log", str(log)]) == 1
    assert capsys.readouterr().out.startswith("not known")
    assert cli.main(["doctor", "--log", str(tmp_path / "absent.log")]) == 2
    assert "absent.log" in capsys.readouterr().err


def test_a_log_from_a_pipe(capsys, monkeypatch):
    """docker logs CONTAINER 2>&1 | python -m overlay doctor --log -"""
    raw = io.BytesIO(b"\xff\n" + "\n".join(MET["pe_dim"][0]).encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(raw))
    assert cli.main(["doctor", "--log", "-"]) == 0
    assert capsys.readouterr().out.startswith("pe_dim")
