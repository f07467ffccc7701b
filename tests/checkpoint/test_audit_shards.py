"""Shards and index: whether they tell the same story, and which files vLLM would load."""

import json

import pytest

from overlay.checkpoint import audit_shards
from tests.checkpoint import small

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return small.write(tmp_path / "model", small.config(), small.plain("a") | small.plain("b"))


def checks(folder):
    return {finding.check: finding.severity for finding in audit_shards.read(folder).findings}


def rewrite_index(folder, change):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | change}))


def test_a_sound_folder(folder):
    found = audit_shards.read(folder)
    assert found.findings == ()
    assert set(found.tensors) == {"a.weight", "b.weight"}
    assert [file.name for file in found.files] == [FIRST, SECOND]


def test_an_absent_file(folder):
    (folder / SECOND).unlink()
    found = audit_shards.read(folder)
    assert checks(folder) == {"absent_file": "error"} and not found.complete
    assert found.findings[0].what == f"the index names 1 files with 1 tensors that are not there: {SECOND}"


def test_a_tensor_in_none(folder):
    rewrite_index(folder, {"c.weight": FIRST})
    assert checks(folder) == {"tensor_in_none": "error"}
    assert audit_shards.read(folder).complete


def test_a_tensor_in_two(folder):
    small.write_file(folder / SECOND, small.plain("a") | small.plain("b"))
    assert checks(folder) == {"tensor_twice": "error"}


def test_a_tensor_in_another_shard(folder):
    rewrite_index(folder, {"a.weight": SECOND})
    (folder / FIRST).rename(folder / "x.safetensors")
    rewrite_index(folder, {"b.weight": "x.safetensors", "a.weight": SECOND})
    assert checks(folder) == {"tensor_misplaced": "warning"}


def test_a_tensor_outside_the_index(folder):
    small.write_file(folder / SECOND, small.plain("b") | small.plain("c"))
    assert checks(folder) == {"tensor_outside_index": "info"}
    assert "c.weight" in audit_shards.read(folder).tensors


def test_a_file_outside_the_index(folder):
    small.write_file(folder / "extra.safetensors", small.plain("c"))
    assert checks(folder) == {"file_outside_index": "warning"}
    assert "c.weight" not in audit_shards.read(folder).tensors


def test_a_consolidated_set_beside_the_shards(folder):
    small.write_file(folder / "consolidated.safetensors", small.plain("layers.0.a"))
    assert checks(folder) == {"two_weight_sets": "error"}
    assert set(audit_shards.read(folder).tensors) == {"layers.0.a.weight"}


def test_mistrals_own_releases_have_both_sets(folder):
    small.write_file(folder / "consolidated.safetensors", small.plain("layers.0.a"))
    (folder / "params.json").write_text("{}")
    assert checks(folder) == {"two_weight_sets": "warning"}


def test_a_consolidated_set_alone(tmp_path):
    small.write_file(tmp_path / "consolidated.safetensors", small.plain("a"))
    assert checks(tmp_path) == {}


def test_two_sets_without_an_index(folder):
    (folder / INDEX).unlink()
    assert checks(folder) == {}
    small.write_file(folder / "model.safetensors", small.plain("a") | small.plain("b"))
    assert checks(folder) == {"two_weight_sets": "error", "tensor_twice": "error"}


def test_a_missing_shard_without_an_index(folder):
    (folder / INDEX).unlink()
    (folder / FIRST).unlink()
    assert checks(folder) == {"absent_file": "error"}


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index(folder, content):
    (folder / INDEX).write_text(content)
    assert checks(folder) == {"bad_index": "error"}


def test_a_shard_that_was_cut_off(folder):
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:-5])
    assert checks(folder) == {"unreadable_shard": "error"}
    (folder / SECOND).write_bytes(content[:5])
    assert "unreadable_shard" in checks(folder)


def test_no_weights(tmp_path):
    assert checks(tmp_path) == {"no_safetensors": "error"}
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in audit_shards.read(tmp_path).findings[0].what
