"""The fingerprint sees every byte that this process may run, and the software's sees no GPU."""

import shutil
from pathlib import Path

import pytest

from overlay import config, fingerprint, registry
from overlay.config import ROOT
from overlay.hardware import Device, Hardware
from overlay.patches.process_proof import differences
from overlay.sources import VllmSources

PATCHES = list(registry.declarations())


def entries(*devices: Device, **environ: str) -> list[registry.Entry]:
    hardware = Hardware()
    hardware.devices = devices
    return registry.decide(PATCHES, config.load(PATCHES, environ), VllmSources.find(), hardware)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "overlay", tmp_path / "overlay")
    shutil.copy(ROOT / "sitecustomize.py", tmp_path)
    return tmp_path


def code(root: Path) -> str:
    return fingerprint.code.__wrapped__(root)


def test_a_copy_has_the_same_code_and_what_python_compiled_is_none(checkout: Path):
    compiled = checkout / "overlay/__pycache__/planted.pyc"
    compiled.parent.mkdir(exist_ok=True)
    compiled.write_bytes(b"x")
    assert code(checkout) == code(ROOT) == fingerprint.code()


@pytest.mark.parametrize("name", ["sitecustomize.py", "overlay/attention/impl.py", "overlay/nvfp4/settle.py"])
def test_one_changed_byte_is_another_code(checkout: Path, name: str):
    before = code(checkout)
    with (checkout / name).open("a") as file:
        file.write("#")
    assert code(checkout) != before


def test_what_editors_and_file_systems_leave_is_no_code(checkout: Path):
    """Emacs links an unsaved buffer to nowhere, macOS keeps attributes: neither may stop vLLM or part two nodes."""
    before = code(checkout)
    (checkout / "overlay/.#cli.py").symlink_to("somebody@somewhere.1234")
    (checkout / "overlay/patches/._sparse_mla.py").write_bytes(b"\0")
    assert code(checkout) == before


def test_a_file_more_less_or_moved_is_another_code(checkout: Path):
    seen = {code(checkout)}
    (checkout / "overlay/one.py").write_text("x = 1\n")
    seen.add(code(checkout))
    (checkout / "overlay/one.py").rename(checkout / "overlay/two.py")
    seen.add(code(checkout))
    (checkout / "overlay/cli.py").unlink()
    seen.add(code(checkout))
    assert len(seen) == 4


def test_other_code_is_another_fingerprint_and_is_named(monkeypatch: pytest.MonkeyPatch):
    ours = entries()
    own, parts = fingerprint.fingerprint(ours), fingerprint.parts(ours)
    monkeypatch.setattr(fingerprint, "code", lambda: "0123456789abcdef")
    assert fingerprint.fingerprint(ours) != own and fingerprint.software(ours) != own
    (difference,) = differences(fingerprint.parts(ours), parts)
    assert difference == f"overlay code: 0123456789abcdef, not {parts['overlay code']}"


def test_the_softwares_fingerprint_sees_no_gpu_and_every_switch():
    none, hopper = entries(), entries(Device("NVIDIA H200", (9, 0), False))
    assert fingerprint.fingerprint(none) != fingerprint.fingerprint(hopper)
    assert fingerprint.software(none) == fingerprint.software(hopper) == fingerprint.fingerprint(none)
    off = entries(Device("NVIDIA H200", (9, 0), False), OVERLAY_PATCHES="sparse_mla=false")
    assert fingerprint.software(off) != fingerprint.software(hopper)


def test_deciding_again_changes_nothing():
    ours = entries(Device("NVIDIA H200", (9, 0), False))
    before = [(entry.state, entry.decided, entry.reason) for entry in ours]
    registry.decide_again(ours, Hardware.none())
    assert [(entry.state, entry.decided, entry.reason) for entry in ours] == before
