"""What is done around a measurement; the times themselves need a GPU."""

import pytest

from overlay.bench import timing


@pytest.mark.parametrize(("count", "rests"), [(timing.CALLS, []), (2, [timing.REST_SECONDS])])
def test_the_gpu_rests_before_long_calls(monkeypatch, count, rests):
    """Between the capture, which runs them, and the replays that are timed."""
    seen = []
    monkeypatch.setattr(timing, "_calls_for", lambda call: count)
    monkeypatch.setattr(timing, "_capture", lambda calls, count: seen.append("captured") or ("graph", count))
    monkeypatch.setattr(timing.time, "sleep", seen.append)
    monkeypatch.setattr(timing, "_replay", lambda graph: seen.append(graph) or 40.0)
    assert timing.warm([lambda: None], repeats=3) == 40.0 / count
    assert seen == ["captured", *rests, *["graph"] * 3]
