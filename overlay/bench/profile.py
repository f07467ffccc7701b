"""Where the time of a call goes: each of its kernels under Nsight Compute, with the reasons why its warps wait."""

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from overlay import children
from overlay.bench.bars import Row
from overlay.bench.cases import HEADS, KV_DTYPES, grid, inputs, pool
from overlay.bench.occupancy import as_on_sm120
from overlay.config import ROOT
from overlay.errors import OverlayError
from overlay.kernel.launch import SparseMLA

TOKENS = (1, 8, 64, 4096)
# Sections exist on every part; the names of single metrics change, so whatever the sections hold is looked through.
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats")
METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.avg.per_second",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
)
STALLED = "smsp__average_warps_issue_stalled_"
TIME_S = 600
NANOSECONDS = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
HERTZ = {"hz": 1, "cycle/second": 1, "cycle/nsecond": 1e9, "cycle/usecond": 1e6, "khz": 1e3, "mhz": 1e6, "ghz": 1e9}


def rows(heads: Sequence[int] = HEADS, tokens: Sequence[int] = TOKENS) -> list[Row]:
    """A row for each kernel of each call: its time, clock, use of the units in percent, and stalls by reason.

    Raises:
        OverlayError: Nsight Compute is missing, or the machine does not let it read the counters.
    """
    tool = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if not Path(tool).exists():
        raise OverlayError("--profile needs Nsight Compute (ncu), which comes with the CUDA toolkit")
    command = [tool, "--csv", "--page", "raw", "--profile-from-start", "off", "--clock-control", "none"]
    command += [word for section in SECTIONS for word in ("--section", section)]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "overlay.bench.profile"]
    command += [",".join(map(str, heads)), ",".join(map(str, tokens))]
    try:
        done = children.finish(command, TIME_S, cwd=ROOT, stdout=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        raise OverlayError(f"ncu is not through within {TIME_S} s: ask for fewer --heads and --tokens") from None
    if done.returncode:
        raise OverlayError(f"ncu ends with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}")
    return list(parse(done.stdout))


def parse(text: str) -> Iterator[Row]:
    """Rows of ncu's raw page: lines of its own, then names, then units, then a line for each kernel.

    The case of a kernel is what the profiled process prints before it.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise OverlayError(f"ncu reports no kernel: {text.strip()[-2000:]}")
    cases = [line.split()[1:] for line in text.splitlines() if line.startswith("case ")]
    names, units, *found = csv.reader(io.StringIO("\n".join(lines)))
    if len(found) != len(cases):
        raise OverlayError(f"ncu reports {len(found)} kernels where {len(cases)} were launched")
    for case, values in zip(cases, found, strict=True):
        heads, tokens, kv_dtype = case
        of = {name: (value, unit) for name, value, unit in zip(names, values, units, strict=True)}
        stalls = {
            name.removeprefix(STALLED).split("_per_issue")[0]: _number(value)
            for name, (value, _) in of.items()
            if name.startswith(STALLED) and name.endswith("_per_issue_active.ratio")
        }
        total = sum(stalls.values()) or 1.0
        tensor = [
            _number(value) for name, (value, _) in of.items() if "pipe_tensor" in name and ".pct" in name and value
        ]
        yield {
            "kernel": of["Kernel Name"][0].split("(")[0],
            "heads": int(heads),
            "tokens": int(tokens),
            "kv_dtype": kv_dtype,
            "us": _scaled(of, METRICS[0], NANOSECONDS) / 1e3,
            "clock_ghz": _scaled(of, METRICS[1], HERTZ) / 1e9,
            "tensor_percent": max(tensor, default=None),
            "issue_percent": _number(of[METRICS[2]][0]),
            "shared_percent": _number(of[METRICS[3]][0]),
            "l2_percent": _number(of[METRICS[4]][0]),
            "stalls_percent": {
                name: round(100 * value / total, 1)
                for name, value in sorted(stalls.items(), key=lambda one: -one[1])
                if value / total >= 0.03
            },
        }


def cells(found: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and rows of the table."""
    headers = ("kernel", "H", "T", "KV", "us", "GHz", "tensor %", "shared %", "L2 %", "issue %", "warps wait for")
    table = []
    for row in found:
        waits = ", ".join(f"{name} {share:.0f}" for name, share in list(row["stalls_percent"].items())[:5])
        tensor = "-" if row["tensor_percent"] is None else f"{row['tensor_percent']:.0f}"
        percents = (f"{row[name]:.0f}" for name in ("shared_percent", "l2_percent", "issue_percent"))
        place = (row["kernel"], str(row["heads"]), str(row["tokens"]), row["kv_dtype"])
        table.append((*place, f"{row['us']:.1f}", f"{row['clock_ghz']:.2f}", tensor, *percents, waits))
    return headers, table


def _number(text: str) -> float:
    return float(text.replace(",", "")) if text else 0.0


def _scaled(of: dict[str, tuple[str, str]], name: str, factors: dict[str, float]) -> float:
    value, unit = of[name]
    if unit.lower() not in factors:
        raise OverlayError(f"ncu reports {name} in {unit!r}, which is none of {', '.join(factors)}")
    return _number(value) * factors[unit.lower()]


def main(heads: str, tokens: str) -> None:
    """The profiled process: every call once, warm, with a line on stdout for each kernel of it."""
    numbers = ([int(part) for part in text.split(",")] for text in (heads, tokens))
    runtime = torch.cuda.cudart()
    pools = {kv_dtype: pool(kv_dtype, torch.device("cuda")) for kv_dtype in KV_DTYPES}
    for case in filter(lambda case: case.plain, grid(*numbers)):
        kernel = SparseMLA.load(torch.device("cuda"), case.heads, case.kv_dtype)
        call = inputs(case, pools[case.kv_dtype], seed=0)
        workspace = torch.empty(kernel.workspace_bytes(case.tokens, case.columns), dtype=torch.uint8, device="cuda")
        launches = sum(2 if part.plan.splits > 1 else 1 for part in kernel.parts(case.tokens, case.columns))
        print("\n".join([f"case {case.heads} {case.tokens} {case.kv_dtype}"] * launches), flush=True)
        with as_on_sm120(kernel):
            for profiled in (False, False, True):
                torch.cuda.synchronize()
                if profiled:
                    runtime.cudaProfilerStart()
                kernel(call.q, call.kv, call.indices, call.scale, call.out, workspace)
                torch.cuda.synchronize()
                if profiled:
                    runtime.cudaProfilerStop()


if __name__ == "__main__":
    main(*sys.argv[1:])
