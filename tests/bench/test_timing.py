"""What is done around a measurement; the times themselves need a GPU."""

import pytest

from overlay.bench import timing


@pytest.mark.parametrize(("count", "rests", "graphs"), [(timing.CALLS, [], 3), (2, [timing.REST_SECONDS], 1)])
def test_the_gpu_rests_before_long_calls(monkeypatch, count, rests, graphs):
    """Between the capture, which runs them, and the replays that are timed; short calls are captured again."""
    seen = []
    monkeypatch.setattr(timing, "_calls_for", lambda call: count)
    monkeypatch.setattr(timing, "_capture", lambda calls, count: seen.append("captured") or "graph")
    monkeypatch.setattr(timing.time, "sleep", seen.append)
    monkeypatch.setattr(timing, "_replay", lambda graph: seen.append(graph) or 40.0)
    assert timing.warm([lambda: None], repeats=3, captures=3) == 40.0 / count
    assert seen == ["captured", *rests, *["graph"] * 3] * graphs


def test_the_median_is_of_graphs_each_by_the_median_of_its_replays(monkeypatch):
    times = iter((9.0, 1.0, 2.0, 3.0, 4.0, 90.0, 8.0, 7.0, 6.0))  # medians 2, 4, 7; of all nine 6; least 1, 3, 6
    monkeypatch.setattr(timing, "_calls_for", lambda call: timing.CALLS)
    monkeypatch.setattr(timing, "_capture", lambda calls, count: "graph")
    monkeypatch.setattr(timing, "_replay", lambda graph: timing.CALLS * next(times))
    assert timing.warm([lambda: None], repeats=3, captures=3) == 4.0
