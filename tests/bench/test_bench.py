"""What the bench does with figures: bars, occupancy, selections and the table. The figures themselves need a GPU."""

import argparse
import contextlib
import inspect
import itertools
import json
from unittest import mock

import pytest
import torch

from overlay.bench import bars, cases, occupancy, peers, report, runner
from overlay.bench.cases import Case
from overlay.cli import main
from overlay.commands import bench as command
from overlay.errors import OverlayError
from overlay.kernel import plan as planning
from overlay.kernel.reference import sparse_mla_reference
from overlay.kernel.variants import VARIANTS


def row(kernel: str = "ours", us: float = 10.0, **other: object) -> dict[str, object]:
    return {
        "kernel": kernel, "heads": 16, "tokens": 4096, "columns": 2048, "valid": 2048, "kv_dtype": "bf16",
        "pattern": "uniform", "us": us, "cold_us": None, "gather_us": 8.0, "multiply_us": 4.0, "tflops": 1.0,
        "gbps": 1.0, "percent_of_limit": 80.0, **other,
    }  # fmt: skip


def found(rows: list[dict[str, object]], name: str) -> bars.Bar:
    return next(bar for bar in bars.bars(rows) if bar.name.startswith(name))


def test_a_bar_that_was_not_measured_is_not_met():
    verdict = bars.bars([])
    assert verdict and not any(bar.met for bar in verdict)
    assert len({bar.name for bar in verdict}) == len(verdict)


@pytest.mark.parametrize(("us", "met"), [(10.4, True), (10.5, False)])
def test_prefill_is_judged_by_the_gather_of_its_own_run(us: float, met: bool):
    assert found([row(us=us)], "prefill H=16 K=2048/2048").met is met


@pytest.mark.parametrize(("us", "met"), [(6.8, True), (6.9, False)])
def test_64_heads_are_judged_by_the_peak_of_mma(us: float, met: bool):
    assert found([row(us=us, heads=64)], "prefill H=64 K=2048/2048").met is met


@pytest.mark.parametrize(("heads", "tokens", "factor"), [(16, 8, 3.0), (64, 1, 2.5), (32, 64, 2.0), (64, 4096, 1.4)])
def test_flashinfer_has_to_be_beaten_by_its_factor(heads: int, tokens: int, factor: float):
    ours, name = row(heads=heads, tokens=tokens), f"FlashInfer FA2 over ours, H={heads} T={tokens}"
    peer = row("flashinfer_fa2", heads=heads, tokens=tokens)
    assert found([ours, {**peer, "us": 10 * factor + 0.1}], name).met
    assert not found([ours, {**peer, "us": 10 * factor - 0.1}], name).met
    assert found([ours, {**peer, "us": None}], name).value is None


def test_fp8_short_rows_and_overlap():
    fp8 = [row(us=10.0), row(us=7.9, kv_dtype="fp8")]
    assert found(fp8, "bf16 over fp8, H=16 T=4096").met
    wide = {"columns": 2176}
    short = [row(us=10.0, valid=2051, **wide), row(us=2.1, valid=64, **wide)]
    assert not found(short, "2051 over 64 valid columns, H=16 T=4096").met
    assert found([row(us=10), row(us=9, pattern="overlap")], "overlapping over random selections, H=16").met


def test_a_full_run_measures_what_every_bar_needs():
    """With one figure for every case of the grid and for FA2, no bar is left unmeasured."""
    rows = [{**row(), **vars(case)} for case in cases.grid()]
    rows += [{**r, "kernel": "flashinfer_fa2"} for r in rows]
    assert all(bar.value is not None for bar in bars.bars(rows))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("available", [100, 164, 228])
def test_padding_gives_the_occupancy_of_sm120(variant, available: int):
    blocks = occupancy.blocks_on_sm120(variant.shared_bytes)
    padded = occupancy.padded(variant.shared_bytes, blocks, available * 1024)
    assert blocks == variant.blocks
    assert padded >= variant.shared_bytes
    assert available * 1024 // (padded + occupancy.RESERVED) == blocks


@pytest.mark.parametrize("pattern", ["uniform", "hot", "overlap"])
def test_selections(pattern: str):
    case = Case(8, 5, 2176, 2051, "fp8", pattern)
    made = cases.inputs(case, cases.pool("fp8", torch.device("cpu")), seed=1)
    rows, tail = made.indices[:, :2051], made.indices[:, 2051:]
    assert (tail == -1).all() and (rows >= 0).all() and (rows < cases.POOL_ROWS).all()
    shared = [len(set(a.tolist()) & set(b.tolist())) / 2051 for a, b in itertools.pairwise(rows)]
    assert all(part > 0.85 for part in shared) if pattern == "overlap" else all(part < 0.5 for part in shared)
    assert (rows.max() < cases.POOL_ROWS // 16) == (pattern == "hot")
    assert made.kv.dtype == torch.float8_e4m3fn


def test_flop_and_bytes_count_valid_columns_only():
    case = Case(16, 2, 2176, 64, "bf16")
    assert case.flop == 2 * 16 * 64 * 512 * 4 and case.gathered_bytes == 2 * 64 * 1024


def test_the_table_names_missed_bars_and_unmeasured_peers():
    rows = [row(us=11.0), row("torch", us=None, reason="too many tokens"), row("flashinfer_fa2", us=33.0)]
    text = report.text(rows, bars.bars(rows))
    assert "missed: prefill H=16 K=2048/2048: time over gather: 1.38 (at most 1.3)" in text
    assert "3.00x" in text and "not measured (at most 1.25)" in text
    json.dumps([bar.as_json() for bar in bars.bars(rows)])


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(tokens=tokens, heads=heads) for tokens in (1, 64) for heads in (8, 16)]
    report.plot(rows, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_flashinfer_takes_the_call_of_its_sm120_kernel():
    """FlashInfer's own checks run; only the launch is replaced, by the reference over the rows that it was given."""
    core = pytest.importorskip("flashinfer.mla._core")
    case = Case(16, 2, 2048, 2048, "fp8")
    call = cases.inputs(case, cases.pool("fp8", torch.device("cpu")), seed=1)

    def launch(query, kv_cache, sparse_mla_segments, out, sm_scale, **_):
        rows = kv_cache.flatten(0, 2)
        codes = rows[:, :512].contiguous().view(torch.float8_e4m3fn)
        assert rows[:, 512:528].contiguous().view(torch.float32).eq(1).all()
        out[:, 0] = sparse_mla_reference(query[:, 0], codes, sparse_mla_segments[0].indices[:, 0], sm_scale)[0]
        return out

    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda *device: (12, 1)),
        mock.patch.object(core, "get_compute_capability", lambda device: (12, 1)),
        mock.patch.object(core, "_trtllm_batch_decode_sparse_mla_sm120", launch),
    ):
        (attend,) = next(peer for peer in peers.peers() if peer.name == "flashinfer_sm120").prepare(case, [call])
        assert runner._difference(case, call, attend) < 5e-3


def test_flashinfer_takes_the_scales_of_fp8_rows():
    wrapper = pytest.importorskip("flashinfer.mla").BatchMLAPagedAttentionWrapper
    assert {"ckv_scale", "kpe_scale"} <= inspect.signature(wrapper.run).parameters.keys()


@pytest.mark.parametrize("wrong", ["other", "half", "end"])
def test_a_peer_that_computes_something_else_is_not_timed(wrong: str):
    """All of it beside the reference, nothing but the tokens that are compared first, or the last ones wrong."""
    case = Case(8, 12, 16, 16, "bf16")
    call = cases.inputs(case, cases.pool("bf16", torch.device("cpu")), seed=1)
    few = slice(0, runner.CHECKED_TOKENS)

    def attend() -> None:
        expected = sparse_mla_reference(call.q, call.kv, call.indices, call.scale)[0]
        call.out[few if wrong == "half" else slice(None)] = {
            "other": 2 * expected,
            "half": expected[few],
            "end": torch.cat([expected[:-2], 2 * expected[-2:]]),
        }[wrong].bfloat16()

    peer = peers.Peer("peer", lambda case, calls: [attend])
    with (
        mock.patch.object(runner, "peers", lambda: [peer]),
        mock.patch.object(runner.timing, "warm", lambda calls, captures: 1.0),
    ):
        (found,) = runner._peer_rows(case, [call])
    assert found["us"] is None and "against fp64" in found["reason"]


def test_a_call_of_two_launches_is_timed_as_one_too():
    case = Case(64, 9, 1100, 1100, "bf16")
    call = cases.inputs(case, cases.pool("bf16", torch.device("cpu")), seed=1)
    asked = []

    class Kernel:
        merge_starts_early = True

        def parts(self, tokens: int, columns: int):
            return planning.parts(64, "bf16", tokens, columns, 4)

        def plan(self, tokens: int, columns: int):
            return planning.plan(64, "bf16", tokens, columns, 4)

        def workspace_bytes(self, tokens: int, columns: int) -> int:
            return 1

        def __call__(self, q, kv, indices, scale, out, workspace, splits=None, variant=None) -> None:
            asked.append((splits, variant))
            out.copy_(sparse_mla_reference(q, kv, indices, scale)[0])

    empty = torch.empty
    with (
        mock.patch.object(runner.SparseMLA, "load", lambda *_: Kernel()),
        mock.patch.object(torch, "empty", lambda *size, device, **kind: empty(*size, **kind)),
        mock.patch.object(runner, "as_on_sm120", lambda kernel: contextlib.nullcontext(dict.fromkeys(VARIANTS, 1))),
        mock.patch.object(runner.timing, "warm", lambda calls, captures: float(len(calls))),
        mock.patch.object(runner.timing, "cold", lambda calls: 1.0),
        mock.patch.object(runner.ceilings, "gather_us", lambda case, calls: 1.0),
    ):
        ours, alone = runner._ours(case, [call], 1.0)
    one = Kernel().plan(9, 1100)
    assert asked == [(None, None), (one.splits, one.variant)]
    assert ours["rest"] == [
        [part.tokens, part.plan.variant.name, part.plan.splits] for part in Kernel().parts(9, 1100)[1:]
    ]
    assert len(ours["rest"]) == 1 and alone["kernel"] == "ours_one_launch" and alone["us"] == 1.0
    assert ours["error"] < 3e-3 and alone["error"] < 3e-3


def test_what_was_measured_is_kept_while_the_run_lasts(monkeypatch, tmp_path, capsys):
    """A killed process cannot keep anything any more."""
    found = []

    def measure(chosen, with_peers):
        for _ in range(3):
            yield row()
            found.append([(file.name, len(json.loads(file.read_text())["rows"])) for file in tmp_path.iterdir()])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "measure", measure)
    monkeypatch.setattr(command, "KEEP_SECONDS", -1.0)
    assert main(["bench", "--out", str(tmp_path)]) == 0
    assert found == [[("bench-unfinished-no-gpu.json", count)] for count in (1, 2, 3)]
    assert [file.name for file in tmp_path.iterdir()] == ["bench-no-gpu.json"]


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (None, 0),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (runner.WrongResult("the second case is wrong"), 2),
    ],
)
def test_what_was_measured_is_kept_however_the_run_ends(monkeypatch, tmp_path, capsys, ending, status):
    def measure(chosen, with_peers):
        yield row()
        if ending is not None:
            raise ending

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "measure", measure)
    with pytest.raises(SystemExit) if status == 143 else contextlib.nullcontext():
        assert main(["bench", "--out", str(tmp_path / "new")]) == status
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == ("bench-no-gpu.json" if ending is None else "bench-part-no-gpu.json")
    document = json.loads(file.read_text())
    assert len(document["rows"]) == 1 and document["complete"] is (ending is None)
    assert " of 84 bars met" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", [("--out", "{file}/below"), ("--plot", "{folder}"), ("--plot", "{folder}/none/a.png")]
)
def test_what_could_not_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys, option):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "measure", lambda *_, **__: pytest.fail("measured"))
    name, where = option[0], option[1].format(file=tmp_path / "file", folder=tmp_path)
    assert main(["bench", "--out", str(tmp_path), name, where]) == 2
    assert f"overlay: {name} {where}: " in capsys.readouterr().err


def test_a_part_of_the_cases_is_kept_beside_the_whole_run(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "measure", lambda chosen, with_peers: iter([row()]))
    assert main(["bench", "--out", str(tmp_path), "--heads", "16"]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["bench-part-no-gpu.json"]


@pytest.mark.parametrize("words", [("--tokens", "0"), ("--heads", "8,-1"), ("--heads", "x")])
def test_counts_are_numbers_from_one_on(capsys, words):
    with pytest.raises(SystemExit):
        main(["bench", *words])
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "--check"], "belong to the bench"),
        (["--project", "run.json", "--no-peers"], "belong to the bench"),
        (["--project", "run.json", "--profile"], "one of --project, --profile"),
        (["--tune", "--plot", "x.png"], "not to --tune"),
    ],
)
def test_options_of_the_bench_are_not_taken_in_silence_by_what_is_none(words, message):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(OverlayError, match=message):
        command.run(parser.parse_args(words))
