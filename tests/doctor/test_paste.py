"""A report fit for an issue says nothing about who wrote it, and still says what is wrong."""

import os
import re
import socket
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlay.doctor import paste
from tests.conftest import ROOT, with_overlay

PERSON = {"HOME": "/home/zaphod", "USER": "zaphod", "LOGNAME": "zaphod", "HOSTNAME": "heartofgold"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("read /home/zaphod/models/GLM/config.json", "read <home>"),
        ("read '/data/zaphod models/x', then", "read '<path> models/x', then"),
        ("~/overlay and ~trillian/overlay", "<path> and <path>"),
        (f"{ROOT}/sitecustomize.py", "<overlay>/sitecustomize.py"),
        ("/usr/lib/x86_64-linux-gnu/libnccl.so.2", "/usr/lib/x86_64-linux-gnu/libnccl.so.2"),
        ("/usrlocal/secret", "<path>"),
        ("zaphod@heartofgold: Zaphod's box", "<name>@<name>: <name>'s box"),
        ("zaphod@betelgeuse.example wrote", "<mail> wrote"),
        ("trillian@betelgeuse.example wrote", "<mail> wrote"),
        ("http://10.0.0.5:8000/health", "<url>"),
        ("bind 192.168.1.20:29500", "bind <address>"),
        ("fe80:0:0:0:204:61ff:fe9d:f156 up", "<address> up"),
        ("02:42:ac:11:00:02", "<address>"),
        ("GPU-8f7a6c1e-1b2c-4d3e-9f00-1234567890ab", "<uuid>"),
        ("token hf_abcdefghijklmnop", "token <token>"),
        # What a reader needs stays.
        ("torch 2.14.0, nvidia-cudnn-cu13==9.24.0.43", "torch 2.14.0, nvidia-cudnn-cu13==9.24.0.43"),
        ("INFO 09-02 11:57:54 [shm_broadcast.py:801]", "INFO 09-02 11:57:54 [shm_broadcast.py:801]"),
        ("sm_120 and sm_121, 101,376 bytes", "sm_120 and sm_121, 101,376 bytes"),
        ("127.0.0.1", "127.0.0.1"),
        ("16.3 GiB of 121.7 GiB/s", "16.3 GiB of 121.7 GiB/s"),
    ],
)
def test_clean(text, expected):
    assert paste.clean(text, PERSON) == expected


def test_accounts_that_images_come_with_are_no_names():
    assert (
        paste.clean("vllm serve as root", {"USER": "vllm", "LOGNAME": "root", "HOME": "/root"}) == "vllm serve as root"
    )


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=40))
@example("/home/zaphod/")
@example("'/home/zaphod'")
@example("=/home/zaphod:/x")
@example("//home//zaphod")
def test_the_name_and_the_home_folder_never_stay(text):
    cleaned = paste.clean(f"{text} /home/zaphod/{text} zaphod {text}", PERSON)
    assert not re.search(r"(?<![A-Za-z0-9])zaphod(?![A-Za-z0-9])", cleaned, re.I)


def test_the_whole_report(tmp_path):
    home = tmp_path / "zaphod"
    home.mkdir()
    env = with_overlay({**os.environ, **PERSON, "HOME": str(home)})
    env |= {
        "OVERLAY_CONFIG": str(home / "mine.toml"),
        "VLLM_CACHE_ROOT": str(home / "cache"),
        "LD_LIBRARY_PATH": f"{home}/lib",
        "COLUMNS": "60",
    }
    names = (
        "sitecustomize",
        "child",
        "pythonpath",
        "flags",
        "config",
        "vllm",
        "kernel_cache",
        "autotune_cache",
        "nccl",
    )
    for format in ([], ["--json"]):
        chosen = [part for name in names for part in ("--check", name)]
        line = [sys.executable, "-m", "overlay", "doctor", "--paste", *format, *chosen]
        done = subprocess.run(line, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 1  # the configuration is not there
        report = re.sub(r"\s", "", done.stdout)  # the table breaks long words
        assert "zaphod" not in report
        assert "heartofgold" not in report
        assert socket.gethostname() not in report
        assert str(tmp_path) not in report
        assert str(ROOT) not in report
        assert "<overlay>/sitecustomize.py" in report


def test_a_log(tmp_path):
    log = tmp_path / "boot.log"
    log.write_text("(zaphod) pe_dim must be 64 for fp8_ds_mla' in /home/zaphod/x.py on 10.1.2.3\n")
    line = [sys.executable, "-m", "overlay", "doctor", "--paste", "--log", str(log)]
    done = subprocess.run(
        line, env={**os.environ, **PERSON}, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "line 1: (<name>) pe_dim must be 64 for fp8_ds_mla' in <home> on <address>" in done.stdout
