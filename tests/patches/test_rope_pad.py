"""rope_pad with vLLM 0.30's real model classes; refused from 0.31 on."""

import pytest
import torch

from overlay.context import Context
from overlay.hardware import Device, Hardware
from overlay.patches.rope_pad import PATCH, keep_tail, probe
from overlay.sources import VllmSources
from tests.conftest import run_python

SOURCES = VllmSources.find()
IS_030 = SOURCES.release is not None and SOURCES.release[:2] == (0, 30)


@pytest.fixture(scope="module")
def answers(fake_driver):
    if not IS_030:
        pytest.skip(f"vllm {SOURCES.version}: rope_pad is for 0.30 alone")
    env = fake_driver((12, 1), overlay=True) | {"OVERLAY_PATCHES": "rope_pad=true,sparse_mla=false"}
    found = run_python("tests.patches.scenarios.rope_pad", env, timeout=900)
    assert "failed" not in found, found["failed"]
    return found


def test_stock_dies_at_the_first_token(answers):
    assert "pe_dim must be 64 for fp8_ds_mla" in answers["stock"]


def test_wrapped_is_served_by_the_packed_backend(answers):
    wrapped = answers["wrapped"]
    assert (wrapped["backend"], wrapped["dtype"], wrapped["row"]) == ("FLASHINFER_MLA_SPARSE_SM120", "fp8_ds_mla", 656)


def test_the_softmax_scale_and_the_model_stay(answers):
    wrapped = answers["wrapped"]
    assert wrapped["scale"] == wrapped["impl_scale"] == 256**-0.5
    assert wrapped["rope_of_the_model"] == 0
    assert wrapped["projection"] == [8 * (256 + 256), 512]


@pytest.mark.parametrize("batch", ["prefill", "decode", "mixed"])
def test_the_answer_is_dense_attention_over_the_stored_rows(answers, batch):
    assert answers["wrapped"]["error"][batch] < 0.02  # bf16 queries; a lost tail would be 0.04


def test_index_rows_keep_the_newest_tokens():
    rows = torch.full((4, 2176), -1, dtype=torch.int32)
    rows[0, :2048] = torch.arange(2048)
    rows[0, 2048:2051] = torch.tensor([9000, 9001, 9002])
    rows[1, :2048] = torch.arange(2048)
    rows[1, 2048] = 9000
    rows[2, :7] = torch.arange(7)
    kept = keep_tail(rows)
    assert kept.shape == (4, 2048)
    assert kept[0, -3:].tolist() == [9000, 9001, 9002]
    assert kept[1, -3:].tolist() == [9000, 2046, 2047]
    assert torch.equal(kept[0, :-3], rows[0, :2045])
    assert torch.equal(kept[2:], rows[2:, :2048])
    assert rows[0, 2047] == 2047  # the indexer's own buffer is not written


@pytest.mark.parametrize(("wanted", "kind"), [(True, "impossible"), ("auto", "absent")])
def test_it_is_refused_from_0_31_on(wanted, kind):
    hardware = Hardware()
    hardware.__dict__["devices"] = (Device("NVIDIA GB10", (12, 1), True),)
    if IS_030:
        kind = "present"
    elif not SOURCES.has("vllm.models.glm5next"):
        kind = "absent"
    assert probe(Context("rope_pad", {}, wanted, SOURCES, hardware)).kind == kind


def test_it_is_off_by_default():
    assert PATCH.default is False
