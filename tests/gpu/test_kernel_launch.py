"""Launching on the GPU: repeatability, CUDA graphs, splits, streams, refusals and the sanitizers."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import os  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402

from overlay.kernel.launch import SparseMLA  # noqa: E402
from overlay.kernel.variants import variants_for  # noqa: E402
from tests.gpu import kernel_cases as cases  # noqa: E402

pytestmark = pytest.mark.gpu
every_shape = pytest.mark.parametrize(("heads", "kv_dtype"), cases.SHAPES)


def launcher(case, splits=None):
    """A call with fixed addresses: (run, out, lse)."""
    kernel = cases.load(case)
    out = torch.full_like(case.q, torch.nan)
    lse = torch.full(case.q.shape[:2], torch.nan, device=case.q.device)
    workspace = cases.workspace_for(kernel, case, splits)

    def run():
        kernel(
            *(case.q, case.kv_rows, case.indices, case.scale, out, workspace),
            **dict(k_scale=case.k_scale, lse=lse, splits=splits),
        )

    return run, out, lse


def capture(run):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@pytest.mark.parametrize("tokens", [1, 8, 200])
@every_shape
def test_repeats_give_the_same_bits(heads, kv_dtype, tokens):
    case = cases.make_case(tokens, heads, kv_dtype, 2176, valid=2051)
    run, out, lse = launcher(case)
    run()
    first, first_lse = out.clone(), lse.clone()
    cases.check(case, first, first_lse)
    for _ in range(100):
        out.fill_(torch.nan)
        run()
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


@pytest.mark.parametrize("tokens", [1, 8, 150])
@every_shape
def test_graph_replay_with_changed_contents(heads, kv_dtype, tokens):
    case = cases.make_case(tokens, heads, kv_dtype, 700, valid=600)
    run, out, lse = launcher(case)
    graph = capture(run)
    for seed in range(3):
        fresh = cases.make_case(tokens, heads, kv_dtype, 700, valid=200 * (seed + 1), seed=seed + 1)
        for name in ("q", "kv_rows", "indices"):
            getattr(case, name).copy_(getattr(fresh, name))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        cases.check(case, replayed, lse)
        run()
        assert torch.equal(out, replayed)


@every_shape
def test_two_launches_replay_as_they_run(heads, kv_dtype):
    tokens = 2 * torch.cuda.get_device_properties(cases.gpu()).multi_processor_count + 8
    case = cases.make_case(tokens, heads, kv_dtype, 2048)
    assert len(cases.load(case).parts(tokens, 2048)) == 2
    run, out, lse = launcher(case)
    run()
    eager, eager_lse = out.clone(), lse.clone()
    cases.check(case, eager, eager_lse)
    graph = capture(run)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager) and torch.equal(lse, eager_lse)


@every_shape
def test_stale_rows_of_a_padded_graph(heads, kv_dtype):
    case = cases.make_case(8, heads, kv_dtype, 300)
    run, out, _ = launcher(case)
    graph = capture(run)
    graph.replay()
    torch.cuda.synchronize()
    live = out[:5].clone()
    case.indices[5:] = torch.randint(-(2**31), 2**31, (3, 300), device=case.q.device).to(torch.int32)
    case.q[5:] = torch.nan
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out[:5], live)
    cases.check(cases.some_tokens(case, slice(0, 5)), out[:5])


@every_shape
def test_split_counts_agree(heads, kv_dtype):
    case = cases.make_case(5, heads, kv_dtype, 2176, valid=2051)
    case.indices[1, 64:] = -1  # most splits of this token are empty
    case.indices[2, :2000] = -1
    case.indices[3] = -1
    whole, whole_lse = cases.run_and_check(case, splits=1)
    for splits in (2, 3, 8, 32, 72):
        out, lse = cases.run_and_check(case, splits=splits)
        assert (out.float() - whole.float()).abs().max() <= 1e-2 * whole.float().abs().max()
        live = ~whole_lse.isneginf()
        assert (lse - whole_lse)[live].abs().max() <= 2e-5


@pytest.mark.parametrize("heads", [8, 12, 24, 64, 80])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_every_variant_that_serves_a_head_count_agrees(heads, kv_dtype):
    for tokens, columns in ((1, 2176), (9, 300), (140, 1030)):
        case = cases.make_case(tokens, heads, kv_dtype, columns, valid=columns - columns // 16)
        results = [
            cases.run_and_check(case, splits, variant)
            for variant in variants_for(heads, kv_dtype)
            for splits in (1, 2, 5)
        ]
        first, first_lse = results[0]
        for out, lse in results[1:]:
            assert (out.float() - first.float()).abs().max() <= 1e-2 * first.float().abs().max()
            assert (lse - first_lse).abs().max() <= 2e-5


@every_shape
def test_back_to_back_launches_share_a_workspace(heads, kv_dtype):
    one, two = (cases.make_case(4, heads, kv_dtype, 600, seed=seed) for seed in (1, 2))
    kernel = cases.load(one)
    workspace = cases.workspace_for(kernel, one, 8)
    outs = [torch.full_like(one.q, torch.nan) for _ in range(20)]
    for i, out in enumerate(outs):
        case = (one, two)[i % 2]
        kernel(case.q, case.kv_rows, case.indices, case.scale, out, workspace, k_scale=case.k_scale, splits=8)
    torch.cuda.synchronize()
    cases.check(one, outs[0])
    cases.check(two, outs[1])
    assert all(torch.equal(out, outs[i % 2]) for i, out in enumerate(outs))


@pytest.mark.parametrize(("heads", "kv_dtype"), [(16, "bf16"), (64, "fp8")])
def test_ten_thousand_launches(heads, kv_dtype):
    case = cases.make_case(1, heads, kv_dtype, 512)
    run, out, lse = launcher(case)
    graph = capture(lambda: [run() for _ in range(100)])
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    cases.check(case, out, lse)


def test_runs_on_torchs_current_stream():
    """A copy that the same stream has yet to make must be seen."""
    case = cases.make_case(2, 16, "bf16", 2048)
    expected, _ = cases.call(case)
    run, out, _ = launcher(case)
    indices = case.indices.clone()
    case.indices.fill_(-1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        case.indices.copy_(indices)
        run()
    stream.synchronize()
    assert torch.equal(out, expected)


def test_neither_allocates_nor_synchronises():
    case = cases.make_case(8, 32, "bf16", 2176)
    run, *_ = launcher(case)
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_loading_again_is_free():
    device = cases.gpu()
    assert SparseMLA.load(device, 16, "bf16") is SparseMLA.load(device, 16, "bf16")


def test_misaligned_and_wrong_arguments_are_refused():
    case = cases.make_case(4, 16, "bf16", 100)
    kernel = cases.load(case)
    out, workspace = torch.full_like(case.q, 3.0), cases.workspace_for(kernel, case, 4)
    shifted = torch.zeros(4 * 16 * 512 + 1, dtype=torch.bfloat16, device=out.device)[1:].view(4, 16, 512)
    wrong = [
        (replace(case, q=shifted), workspace, {}, "multiple of 16"),
        (replace(case, q=case.q.half()), workspace, {}, "q has dtype"),
        (replace(case, indices=case.indices.long()), workspace, {}, "indices has dtype"),
        (replace(case, kv_rows=case.kv_rows[:, :511]), workspace, {}, "kv_rows has shape"),
        (case, workspace[:64], dict(splits=4), "needs"),
        (case, workspace, dict(splits=73), "splits"),
        (case, workspace, dict(k_scale=torch.ones(1, device=out.device)), "k_scale"),
        (replace(case, q=case.q.cpu()), workspace, {}, "q is on cpu"),
    ]
    for bad, room, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            kernel(bad.q, bad.kv_rows, bad.indices, bad.scale, out, room, **options)
    torch.cuda.synchronize()
    assert (out == 3).all()


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    root = Path(__file__).resolve().parents[2]
    # Of the driver's own answers only ours count: NVIDIA's bindings ask it for functions that it may not have.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    program = [sys.executable, "-m", "tests.gpu.sanitize", *(["--one-group"] if tool == "synccheck" else [])]
    done = subprocess.run(
        [sanitizer, "--tool", tool, *options, "--error-exitcode", "9", *program],
        **dict(cwd=root, env=os.environ, capture_output=True, text=True, timeout=300),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards" in done.stdout
    assert "sanitize: done" in done.stdout
