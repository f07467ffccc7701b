"""overlay/children.py: a child takes along what it has started, however it ends."""

import subprocess
import time

import psutil
import pytest

from overlay import children

STARTS_ANOTHER = "sleep 300 2>/dev/null & echo $!; "


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_what_a_child_started_ends_with_it(tmp_path):
    with (tmp_path / "out").open("w") as out:
        done = children.finish(["sh", "-c", STARTS_ANOTHER + "echo why >&2; exit 3"], 30, stdout=out)
    assert (done.returncode, done.stderr) == (3, "why\n")
    assert gone(int((tmp_path / "out").read_text()))


def test_and_where_the_child_is_not_through_in_time(tmp_path):
    with (tmp_path / "out").open("w") as out, pytest.raises(subprocess.TimeoutExpired) as slow:
        children.finish(["sh", "-c", STARTS_ANOTHER + "echo why >&2; wait"], 1, stdout=out)
    assert slow.value.stderr == b"why\n"
    assert gone(int((tmp_path / "out").read_text()))
