"""Compilation for every architecture, with neither GPU nor driver, and what the compile command reports."""

import functools
import json
import re

import pytest

from overlay import cli
from overlay.kernel import build, report
from overlay.kernel.errors import CompileError
from overlay.kernel.variants import ARCHITECTURES, SHARED_LIMIT, VARIANTS, variants_for

SM_BYTES = 102_400  # shared memory of an sm_12x multiprocessor, of which every block keeps 1 KB for itself
RESERVED = 1024


@pytest.fixture(scope="module", autouse=True)
def compile_once():
    """The tests of this module share what they compile: an architecture takes some five seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "build", functools.cache(build.build))
        yield


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(compile_once, request):
    return request.param, report.compile_variants(request.param), report.compile_helpers(request.param)


def test_every_kernel_compiles_without_spills(compiled):
    arch, variants, helpers = compiled
    assert [(row["heads"], row["kv_dtype"]) for row in variants] == [(v.heads, v.kv_dtype) for v in VARIANTS]
    assert {row["kernel"] for row in helpers} == {"merge_splits", "index_rows"}
    for row in variants + helpers:
        assert row["spill_bytes"] == 0, f"{row['kernel']} spills on {arch}"
        assert 16 <= row["registers"] <= 255


def test_shared_memory_is_within_the_budget(compiled):
    _, variants, helpers = compiled
    for row in variants + helpers:
        assert row["shared_bytes"] <= SHARED_LIMIT
    for row, variant in zip(variants, VARIANTS, strict=True):
        assert row["shared_bytes"] == variant.shared_bytes  # dynamic only
        assert variant.blocks * (row["shared_bytes"] + RESERVED) <= SM_BYTES
        assert variant.blocks * variant.threads * row["registers"] <= 65_536


def test_the_binary_is_a_whole_elf_file():
    cubin = build.build(build.index_rows_program(), "sm_121").cubin
    assert cubin[:4] == b"\x7fELF"
    program_headers = int.from_bytes(cubin[32:40], "little")
    size, count = int.from_bytes(cubin[54:56], "little"), int.from_bytes(cubin[56:58], "little")
    assert program_headers + size * count <= len(cubin)


def test_shared_memory_that_disagrees_with_the_source_does_not_compile():
    variant = variants_for(8, "bf16")[0]
    program = build.attention_program(variant)
    text = program.text.replace(f", {variant.shared_bytes})", f", {variant.shared_bytes + 256})")
    wrong = build.Program(program.name, text, program.threads)
    assert wrong.text != program.text
    with pytest.raises(CompileError, match="shared memory that the launcher asks for"):
        build.build(wrong, "sm_90")


def test_an_error_names_architecture_version_and_log():
    program = build.Program("broken", 'extern "C" __global__ void broken() { nonsense(); }', 32)
    with pytest.raises(CompileError) as raised:
        build.build(program, "sm_120")
    message = str(raised.value)
    assert "sm_120" in message and build.nvrtc_version() in message and "nonsense" in message


@pytest.mark.parametrize(
    ("arch", "way_out"),
    [
        ("sm_70", "sm_80 or newer"),  # NVRTC no longer knows it
        ("sm_75", "sm_80 or newer"),  # and this one it does
        ("sm_999", "knows sm_.*a newer one may: .*nvidia-cuda-nvrtc"),
        ("compute_90", "knows sm_.*reads sm_NN"),
        ("sm_120x", "knows sm_.*reads sm_NN"),
    ],
)
def test_an_unknown_architecture_is_named_with_the_way_out(arch, way_out):
    with pytest.raises(CompileError, match=rf"{arch}.*{way_out}"):
        build.build(build.index_rows_program(), arch)


def test_nvrtc_missing_is_named_with_the_way_out(monkeypatch):
    from cupy_backends.cuda.libs import nvrtc

    class Absent:
        @staticmethod
        def getVersion():
            raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setattr(build, "_nvrtc", lambda: Absent)
    with pytest.raises(CompileError, match=r"libnvrtc\.so not found.*pip install"):
        build.nvrtc_version()
    assert nvrtc.getVersion() >= (12, 8)


def test_nvrtc_too_old_for_the_gpu_is_named_with_the_way_out(monkeypatch):
    from cupy_backends.cuda.libs import nvrtc

    class Old:  # 12.8 knows sm_120, and not yet sm_121
        getVersion = staticmethod(lambda: (12, 8))
        getSupportedArchs = staticmethod(lambda: [80, 86, 89, 90, 100, 101, 120])

    monkeypatch.setattr(build, "_nvrtc", lambda: Old)
    with pytest.raises(CompileError, match=r"NVRTC 12\.8 cannot compile for sm_121.*12\.9 does.*pip install"):
        build.build(build.index_rows_program(), "sm_121")
    assert 121 in nvrtc.getSupportedArchs()


def test_what_comes_from_nvrtcs_own_cache_is_compiled_again(monkeypatch):
    """It has no log, so nobody could say what it needs."""
    asked, compile_program = [], build._compile

    def cached(nvrtc, program, arch, options):
        asked.append(options)
        cubin, log = compile_program(nvrtc, program, arch, options)
        return cubin, log if "--no-cache" in options else ""

    monkeypatch.setattr(build, "_compile", cached)
    assert build.build(build.index_rows_program(), "sm_90").resources.registers > 0
    assert asked == [build.OPTIONS, (*build.OPTIONS, "--no-cache")]


def test_a_log_without_resources_is_refused():
    with pytest.raises(CompileError, match="does not report the resources of kernel"):
        build.read_resources("nothing here", "kernel", "13.0")


def test_resources_count_spilled_stores_and_loads():
    log = "0 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\nUsed 255 registers, 2048 bytes smem\n"
    assert build.read_resources(log, "kernel", "13.0") == build.Resources(255, 32, 2048)


def test_command_prints_a_table(capsys):
    assert cli.main(["compile", "--arch", "sm_121"]) == 0
    printed = capsys.readouterr().out
    for variant in VARIANTS:
        assert variant.name in printed
    assert "NVRTC" in printed and "over budget" not in printed


def test_command_prints_json(capsys):
    assert cli.main(["compile", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["nvrtc"] == build.nvrtc_version()
    assert {row["arch"] for row in printed["variants"]} == {"sm_120", "sm_121"}
    keys = {"kernel", "arch", "heads", "kv_dtype", "registers", "spill_bytes", "shared_bytes"}
    assert all(set(row) == keys for row in printed["variants"])


def test_command_fails_over_budget(capsys, monkeypatch):
    monkeypatch.setattr(report, "SHARED_LIMIT", 45_000)
    assert cli.main(["compile", "--arch", "sm_120"]) == 1
    assert "more than 45000 bytes" in " ".join(capsys.readouterr().out.split())


def test_command_names_an_unknown_architecture(capsys):
    assert cli.main(["compile", "--arch", "sm_1"]) == 2
    assert "sm_1: they need sm_80 or newer" in capsys.readouterr().err


def test_spills_count_on_the_target_only():
    row = {"arch": "sm_120", "spill_bytes": 4, "shared_bytes": 0}
    assert report.over_budget(row) == "spills"
    assert report.over_budget({**row, "arch": "sm_90"}) == ""


def ptx(program, arch):
    """What NVRTC hands to the assembler: volatile instructions in the order in which they are carried out."""
    nvrtc = build._nvrtc()
    handle = nvrtc.createProgram(program.text, "program.cu", (), ())
    try:
        nvrtc.compileProgram(handle, ("--std=c++17", "-ftz=true", f"-arch=compute_{arch}"))
        return nvrtc.getPTX(handle).decode()
    finally:
        nvrtc.destroyProgram(handle)


@pytest.mark.parametrize("arch", ["80", "90", "120"])
def test_the_merge_reads_nothing_before_the_main_kernel_has_ended(arch):
    """It is launched to start early (overlay/kernel/early.py), from 9.0 on; the emulator knows one kernel at a time."""
    merge, main = ptx(build.merge_program(), arch), ptx(build.attention_program(VARIANTS[0]), arch)
    assert ("griddepcontrol.wait" in merge, "griddepcontrol.launch_dependents" in main) == (arch != "80",) * 2
    assert "griddepcontrol.launch_dependents" not in merge and "griddepcontrol.wait" not in main
    reads = [match.start() for match in re.finditer(r"\bld(\.volatile)?\.global", merge)]
    assert len(reads) > 8
    assert all(read > merge.find("griddepcontrol.wait") for read in reads)
    assert "ld.global.nc" not in merge  # for what nobody writes while the kernel runs
