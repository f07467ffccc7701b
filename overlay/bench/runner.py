"""One run: every case checked, then timed, beside the limits and the peers.

A call that takes two launches is also timed as one launch: `ours_one_launch`, a row like a peer's.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import torch

from overlay.bench import ceilings, timing
from overlay.bench.bars import Row
from overlay.bench.cases import Case, Inputs, pool, rotation
from overlay.bench.occupancy import as_on_sm120
from overlay.bench.peers import Unavailable, peers
from overlay.errors import OverlayError
from overlay.kernel.launch import SparseMLA
from overlay.kernel.reference import sparse_mla_reference

CHECKED_TOKENS = 4  # at either end: a call may be two launches
WORST_ERROR = 3e-3  # relative Frobenius norm against fp64
PEER_ERROR = 0.1  # of a peer, which may take its queries in fp8: beyond it, it computes something else
COLD_TOKENS = 128  # a larger call brings its own rows in: its time does not depend on what the L2 held


class WrongResult(OverlayError):
    """The kernel's answer is wrong: there is nothing to time."""


def measure(cases: Iterable[Case], with_peers: bool = True) -> Iterator[Row]:
    """Rows of the table: ours for every case, others for uniform full-width ones, and why where a peer has none."""
    cases = list(cases)
    peak = ceilings.multiply_tflops()
    pools = {dtype: pool(dtype, torch.device("cuda")) for dtype in {case.kv_dtype for case in cases}}
    started = time.monotonic()
    for number, case in enumerate(cases, 1):
        progress(f"{number}/{len(cases)} {_name(case)} ({time.monotonic() - started:.0f} s)")
        calls = rotation(case, pools[case.kv_dtype])
        yield from _ours(case, calls, peak)
        if with_peers and case.plain:
            yield from _peer_rows(case, calls)
    progress("")


def _ours(case: Case, calls: list[Inputs], peak: float) -> Iterator[Row]:
    kernel = SparseMLA.load(torch.device("cuda"), case.heads, case.kv_dtype)
    parts = kernel.parts(case.tokens, case.columns)
    one = kernel.plan(case.tokens, case.columns)
    workspace = torch.empty(kernel.workspace_bytes(case.tokens, case.columns), dtype=torch.uint8, device="cuda")

    def attend(call: Inputs, **forced: object) -> None:
        kernel(call.q, call.kv, call.indices, call.scale, call.out, workspace, **forced)

    with as_on_sm120(kernel) as blocks:
        error = _check(case, calls[0], attend)
        timed = [lambda call=call: attend(call) for call in calls]
        us = timing.warm(timed, captures=timing.CAPTURES)
        cold = timing.cold(timed) if case.tokens <= COLD_TOKENS else None
        alone = None
        if case.plain and len(parts) > 1:

            def whole(call: Inputs) -> None:
                attend(call, splits=one.splits, variant=one.variant)

            alone = {
                "kernel": "ours_one_launch",
                **asdict(case),
                "reason": None,
                "error": _check(case, calls[0], whole),
                "us": timing.warm([lambda call=call: whole(call) for call in calls], captures=timing.CAPTURES),
                "variant": one.variant.name,
                "splits": one.splits,
            }
    gather = ceilings.gather_us(case, calls)
    multiply = case.flop / peak / 1e6
    yield {
        "kernel": "ours",
        **asdict(case),
        "us": us,
        "cold_us": cold,
        "gather_us": gather,
        "multiply_us": multiply,
        "percent_of_limit": 100 * max(gather, multiply) / us,
        "tflops": case.flop / us / 1e6,
        "gbps": case.gathered_bytes / us / 1e3,
        "error": error,
        "variant": parts[0].plan.variant.name,
        "splits": parts[0].plan.splits,
        "rest": [[part.tokens, part.plan.variant.name, part.plan.splits] for part in parts[1:]],
        "merge_starts_early": kernel.merge_starts_early,
        "blocks_per_sm": blocks[parts[0].plan.variant],
    }
    if alone is not None:
        yield alone


def _check(case: Case, call: Inputs, attend) -> float:
    """Our relative error; raises before anything wrong is timed."""
    error = _error(call, lambda: attend(call))
    if not error <= WORST_ERROR:
        raise WrongResult(f"{_name(case)}: relative error {error:.2e} against fp64 (at most {WORST_ERROR:.0e})")
    return error


def _peer_rows(case: Case, calls: list[Inputs]) -> Iterator[Row]:
    for peer in peers():
        row = {"kernel": peer.name, **asdict(case), "us": None, "reason": None}
        try:
            timed = peer.prepare(case, calls)
            row["error"] = _difference(case, calls[0], timed[0])
            row["us"] = timing.warm(timed, captures=timing.CAPTURES)
        except Unavailable as reason:
            row["reason"] = str(reason)
        except Exception as error:  # a peer's own failure is a finding, and must not end the run
            row["reason"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if row["us"] is None:
            progress(f"{peer.name}: {row['reason']}\n")
        yield row


def _difference(case: Case, call: Inputs, attend) -> float:
    """A peer's own relative error. Raises Unavailable where it is wrong: a fast wrong answer is no comparison."""
    error = _error(call, attend)
    if not error <= PEER_ERROR:
        raise Unavailable(f"relative error {error:.2g} against fp64 (at most {PEER_ERROR})")
    return error


def _error(call: Inputs, attend) -> float:
    """Relative error of the first and the last tokens against fp64; NaN where any output was left as it was."""
    call.out.fill_(float("nan"))
    attend()
    tokens = len(call.q)
    few = sorted({*range(min(CHECKED_TOKENS, tokens)), *range(max(0, tokens - CHECKED_TOKENS), tokens)})
    expected, _ = sparse_mla_reference(call.q[few], call.kv, call.indices[few], call.scale)
    return (
        float("nan")
        if call.out.isnan().any()
        else ((call.out[few].double() - expected).norm() / expected.norm()).item()
    )


def _name(case: Case) -> str:
    return f"H={case.heads} T={case.tokens} K={case.columns}/{case.valid} {case.kv_dtype} {case.pattern}"


def progress(text: str) -> None:
    """The line of the person who waits, on stderr: written over on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
    elif text:
        sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
