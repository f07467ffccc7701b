"""What a rehearsal pretends and what it reads off, on small objects."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from overlay.rehearsal import device, reading


def test_tensors_for_cuda_have_a_shape_and_no_memory() -> None:
    with device.model_under_construction(torch.bfloat16) as pretended:
        parameter = torch.nn.Linear(8, 8, bias=False).weight
        explicit = torch.zeros(3, device="cuda:0")
        beside = torch.zeros(5, device=explicit.device)
        moved = torch.ones(4, device="cpu").to("cuda")
        host = torch.ones(2, device="cpu")
        assert parameter.dtype == torch.bfloat16
        assert parameter.device == explicit.device == beside.device == moved.device == torch.device("cuda", 0)
        assert host.device.type == "cpu" and host.sum() == 2
    assert all(tensor.is_meta for tensor in (parameter, explicit, beside, moved))
    assert pretended.device_bytes([parameter, explicit, beside]) == 2 * (64 + 3 + 5)


def test_shared_storage_counts_once() -> None:
    with device.model_under_construction(torch.float32) as pretended:
        tensor = torch.empty(16)
    assert pretended.device_bytes([tensor, tensor[4:], tensor.view(4, 4)]) == 64


def test_what_vllm_puts_on_meta_itself_takes_no_device_memory() -> None:
    """A vision tower that is switched off is built on the meta device: it is no buffer."""
    with device.model_under_construction(torch.float32) as pretended:
        with torch.device("meta"):
            off = torch.nn.Linear(100, 100)
        on = torch.empty(4)
    assert pretended.device_bytes([*off.parameters(), on]) == 16


def config(rope: int | None) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(qk_rope_head_dim=rope)))


@pytest.mark.parametrize(
    ("backend", "rope", "found"),
    [
        ("FLASHINFER_MLA_SPARSE_SM120", 0, True),
        ("FLASHINFER_MLA_SPARSE_SM120", 64, False),
        ("OVERLAY_SPARSE_MLA", 0, False),
        (None, 0, False),
    ],
)
def test_a_cache_writer_that_refuses_rows_without_rope(
    tmp_path: Path, backend: str | None, rope: int, found: bool
) -> None:
    (tmp_path / "_C.abi3.so").write_bytes(b"\x7fELF...pe_dim must be 64 for fp8_ds_mla...")
    defect = reading.known_defect(config(rope), backend, tmp_path)
    assert (defect is not None) is found
    assert not found or "cache writer refuses rows without rope" in defect


def test_a_cache_writer_that_takes_them(tmp_path: Path) -> None:
    (tmp_path / "_C.abi3.so").write_bytes(b"\x7fELF...pe_dim must be 64 or 0...")
    assert reading.known_defect(config(0), "FLASHINFER_MLA_SPARSE_SM120", tmp_path) is None


def test_budget_is_a_sum_that_a_reader_can_redo() -> None:
    cache = SimpleNamespace(cache_config=SimpleNamespace(gpu_memory_utilization=0.5))
    fields = {"weight_bytes": 100, "buffer_bytes": 20, "prefill_workspace": 3}
    assert reading.budget(cache, fields, 1000, 77) == {
        **{"memory": 1000, "utilization": 0.5, "weights": 100, "buffers": 20},
        **{"prefill_workspace": 3, "allowance": 77, "kv_cache": 300},
    }
