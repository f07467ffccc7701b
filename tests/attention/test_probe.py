"""What the patch's probe reads out of an installed vLLM, without importing it."""

from importlib import metadata
from pathlib import Path

import pytest

from overlay import registry
from overlay.attention import native
from overlay.context import Context
from overlay.hardware import Device, Hardware
from overlay.patches.sparse_mla import PATCH, STOCK, STOCK_CLASS
from overlay.sources import VllmSources


@pytest.fixture(scope="module")
def installed():
    sources = VllmSources.find()
    assert sources is not None
    return sources


def hardware(*capabilities):
    found = Hardware()
    vars(found)["devices"] = tuple(Device("GPU", capability, False) for capability in capabilities)
    return found


def verdict(sources, *capabilities, other_capabilities=""):
    options = {"other_capabilities": other_capabilities}
    return PATCH.probe(Context(PATCH.id, options, "auto", sources, hardware(*capabilities)))


def fake_vllm(root: Path, **modules: str) -> VllmSources:
    """A tree of sources with the given module texts, dots written as double underscores."""
    for name, text in modules.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return VllmSources(root)


def stock_module(dtypes: str) -> dict:
    name = STOCK.removeprefix("vllm.").replace(".", "__")
    text = f"class {STOCK_CLASS}:\n    supported_kv_cache_dtypes: ClassVar[list[str]] = {dtypes}\n"
    return {name: text, "models__glm5next": ""}


def test_targets_are_as_they_were_written_for(installed):
    assert [registry._mismatch(target, installed) for target in PATCH.targets] == [None] * len(PATCH.targets)


@pytest.mark.parametrize(
    ("capabilities", "opened", "kind"),
    [
        ([(12, 0)], "", "present"),
        ([(12, 1), (12, 1)], "", "present"),
        ([], "", "present"),  # no driver: nothing selects a GPU backend, and nothing must fail
        ([(9, 0)], "", "absent"),
        ([(12, 0), (8, 6)], "", "present"),  # a card for the screen beside the one that serves
        ([(8, 6), (12, 0)], "", "present"),
        ([(8, 6), (9, 0)], "9.0", "present"),
        ([(10, 0)], "9.0", "absent"),
        ([(9, 0)], "9.0", "present"),
        ([(12, 0)], "hopper", "impossible"),
    ],
)
def test_the_hardware_decides(installed, capabilities, opened, kind):
    assert verdict(installed, *capabilities, other_capabilities=opened).kind == kind


def test_a_vllm_before_the_model_needs_nothing(tmp_path):
    found = verdict(fake_vllm(tmp_path, version=""), (12, 1))
    assert (found.kind, "0.30.0" in found.reason) == ("absent", True)


@pytest.mark.parametrize(
    ("dtypes", "kind"), [('["auto", "fp8", "fp8_ds_mla"]', "present"), ('["auto", "bfloat16", "fp8"]', "absent")]
)
def test_it_retires_when_vllms_own_backend_takes_bf16_rows(tmp_path, dtypes, kind):
    assert verdict(fake_vllm(tmp_path, **stock_module(dtypes)), (12, 1)).kind == kind


@pytest.fixture
def no_flashinfer(monkeypatch):
    monkeypatch.setattr(native, "_flashinfer_version", lambda: None)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        (b"pe_dim must be 64 for fp8_ds_mla", True),
        (b"pe_dim must be 64 or 0 for fp8_ds_mla", False),
        (b"pe_dim must be 64 for ", False),  # another operator's message, in 0.30 and after
    ],
)
def test_the_cache_writers_own_refusal_tells(tmp_path, no_flashinfer, text, broken):
    (tmp_path / "_C_stable_libtorch.abi3.so").write_bytes(b"\0" * 5000 + text + b"\0rest")
    found = native.defect(tmp_path)
    assert (found is not None) is broken
    assert not broken or "refuses rows without rope" in found


@pytest.mark.parametrize(
    ("version", "broken"),
    [("0.6.18.post1", True), ("0.7.0.post1", False), ("0.7.2", False), ("1.0.0", False), ("0.7.0rc1", False)],
)
def test_a_flashinfer_without_kernels_for_these_rows(tmp_path, monkeypatch, version, broken):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    found = native.defect(tmp_path)
    assert (found is not None) is broken
    assert not broken or "FlashInfer 0.6.18 has no kernel" in found


def test_no_flashinfer_is_left_to_vllms_own_words(tmp_path, monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert native.defect(tmp_path) is None


@pytest.fixture(autouse=True)
def fresh_answers():
    native.defect.cache_clear()
    yield
    native.defect.cache_clear()
