"""The projection to parts that are not here: its counts against the machine code, its bounds against the arithmetic."""

import argparse
import json

import pytest

from overlay.bench import projection, sass
from overlay.commands import bench
from overlay.config import ROOT
from overlay.errors import OverlayError
from overlay.kernel.variants import VARIANTS

RUN = ROOT / "docs" / "measurements" / "bench-nvidia-h200.json"
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


@every_variant
def test_the_loop_that_is_counted_does_one_tile(variant):
    counts = sass.loop_counts(variant, "sm_120")
    assert counts["HMMA"] == sass.products(variant)
    element = 1 if variant.kv_dtype == "fp8" else 2
    copies = variant.tile_rows * 512 * element // 16 // 32 // variant.slices
    assert copies <= counts["LDGSTS"] <= copies + 1  # and one for the indices
    assert "LDL" not in counts and "STL" not in counts


def test_a_loop_that_is_not_there():
    with pytest.raises(OverlayError, match="no loop of 64 matrix products"):
        sass._main_loop([".L_x_0", "HMMA R0", "BRA `(.L_x_0)"], 64)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_no_bound_is_beaten(heads, kv_dtype):
    row = {"us": 2000.0, "multiply_us": 500.0}
    for part in projection.PARTS:
        found = projection.project(part, heads, kv_dtype, row, 500)
        assert found.projected >= max(found.bounds.values()) == found.bounds[found.limit]
        slower = projection.project(part, heads, kv_dtype, {**row, "us": 4000.0}, 500)
        assert slower.projected > found.projected


def bounds(heads, kv_dtype):
    return projection.project(projection.PARTS[0], heads, kv_dtype, {"us": 1.0, "multiply_us": 1.0}, 500).bounds


def test_blocks_that_share_a_token_gather_its_rows_each():
    half, whole = bounds(32, "fp8"), bounds(64, "fp8")
    assert all(whole[name] == pytest.approx(2 * half[name]) for name in half)


def test_groups_of_a_block_gather_a_tokens_rows_once():
    half, whole = bounds(32, "bf16"), bounds(64, "bf16")
    assert whole["L2"] == half["L2"] and whole["tensor cores"] == pytest.approx(2 * half["tensor cores"])
    assert half["shared memory"] < whole["shared memory"] < 2 * half["shared memory"]


def test_tensor_bound_is_flop_over_rate():
    part = projection.PARTS[0]
    found = projection.project(part, 64, "bf16", {"us": 1.0, "multiply_us": 1.0}, 1)
    flop = 2 * 2 * 512 * 2048 * 64 * 4096
    assert found.bounds["tensor cores"] == pytest.approx(flop / (part.tflops * 1e12) * 1e3)


def test_the_command_says_what_it_is(capsys):
    arguments = parsed(["--project", str(RUN)])
    assert bench.run(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("A projection, not a measurement")
    assert all(part.name in out for part in projection.PARTS)


def test_a_run_of_another_gpu_is_refused(tmp_path):
    run = json.loads(RUN.read_text())
    other = tmp_path / "run.json"
    other.write_text(json.dumps({**run, "gpu": "NVIDIA A100"}))
    with pytest.raises(OverlayError, match="starts from an NVIDIA H200"):
        bench.run(parsed(["--project", str(other)]))
    with pytest.raises(OverlayError, match="no run of this bench"):
        bench.run(parsed(["--project", str(tmp_path / "absent.json")]))


def parsed(words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_a_disassembler_that_does_not_know_the_architecture_is_named(monkeypatch, tmp_path):
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\necho 'Architecture sm_120 not recognized' >&2\nexit 255\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sass, "_nvdisasm", lambda: str(tool))
    with pytest.raises(OverlayError, match=r"nvdisasm cannot read .*: Architecture sm_120 not recognized"):
        sass.loop_counts(VARIANTS[0], "sm_120")
