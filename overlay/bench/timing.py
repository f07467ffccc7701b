"""Time of a call on the device: CUDA graphs, rotated inputs, medians."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

CALLS = 20  # in one graph, as many as a decode step of a model has layers: launch gaps are those of a real step
FLUSH_BYTES = 256 * 2**20  # larger than any L2 of the family
# Before a long call: after seconds of full load the power cap lowers the clock. H200, 32 heads at 4,096 tokens, one
# call after the other: 1,761 to 1,934 us; with 1.5 s of rest before each 1,760 to 1,780.
REST_SECONDS = 1.5
# Graphs of the same calls differ by more than the replays of one. H200, one token, six graphs of the same call: 5.30 to
# 5.56 us with 16 heads, 5.82 to 6.09 with 32.
CAPTURES = 5


def warm(calls: Sequence[Callable[[], None]], repeats: int = 9, captures: int = 1) -> float:
    """Microseconds a call, the median over `repeats` replays of a graph that runs `calls` in turn, CALLS in all.

    Of `captures` such graphs the median again. A long call is repeated less often within a graph, and has one: a replay
    is enough to time it. The GPU rests before it.
    """
    count = _calls_for(calls[0])
    long = count < CALLS
    return statistics.median(_of_capture(calls, count, repeats, long) for _ in range(1 if long else captures))


def _of_capture(calls: Sequence[Callable[[], None]], count: int, repeats: int, rests: bool) -> float:
    graph = _capture(calls, count)
    if rests:
        time.sleep(REST_SECONDS)
    return statistics.median(_replay(graph) / count for _ in range(repeats))


def cold(calls: Sequence[Callable[[], None]], repeats: int = 9) -> float:
    """Microseconds of one call after the L2 was filled with other data, the median over `repeats` replays."""
    graph = _capture(calls[:1], 1)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for repeat in range(repeats):
        flush.fill_(repeat)
        times.append(_replay(graph))
    return statistics.median(times)


def _calls_for(call: Callable[[], None]) -> int:
    call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return CALLS if start.elapsed_time(end) < 0.5 else 2


def _capture(calls: Sequence[Callable[[], None]], count: int) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000
