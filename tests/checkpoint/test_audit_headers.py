"""The header reader against the safetensors library itself, and against files that are none."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from overlay.checkpoint import audit_headers
from overlay.checkpoint.audit_headers import HeaderError, read_bytes, read_header
from tests.checkpoint import small


def raw_file(folder: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return file


def entry(dtype: object = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_the_library_reads(tmp_path):
    tensors = small.model() | small.compressed("model.extra")
    small.write_file(tmp_path / "model.safetensors", tensors)
    found = read_header(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "np") as library:
        assert set(found) == set(library.keys())
        for name, tensor in found.items():
            assert list(tensor.shape) == library.get_slice(name).get_shape()
            assert tensor.dtype == library.get_slice(name).get_dtype()


def test_metadata_is_no_tensor(tmp_path):
    file = raw_file(tmp_path, {"__metadata__": {"format": "pt"}, "a": entry()}, b"ab")
    assert list(read_header(file)) == ["a"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty", b"", "ends after 0 bytes"),
        ("short", b"\x05\0\0", "ends after 3 bytes"),
        ("lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        ("enormous", struct.pack("<Q", 2**63) + b"{}", "limit 100000000"),
        ("longer than the file", struct.pack("<Q", 1000) + b"{}", "cut off"),
        ("no JSON", struct.pack("<Q", 4) + b"\xff\xfe\x00\x01", "not valid JSON"),
        ("nested too deep", struct.pack("<Q", 100_000) + b"[" * 100_000, "not valid JSON"),
        ("a list", struct.pack("<Q", 2) + b"[]", "JSON list"),
    ],
)
def test_refuses_what_is_no_safetensors(tmp_path, name, content, said):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(HeaderError, match=said):
        read_header(file)


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": entry(dtype="F7")}, b"ab", "unknown dtype"),
        ({"a": entry(dtype=["U8"])}, b"ab", "unknown dtype"),
        ({"a": entry(shape=(-2,))}, b"ab", "shape"),
        ({"a": entry(shape=(True,), offsets=(0, 1))}, b"a", "shape"),
        ({"a": entry(offsets=(2, 0))}, b"ab", "offsets"),
        ({"a": entry(offsets=(0, 2, 4))}, b"abcd", "offsets"),
        ({"a": entry(shape=(3,))}, b"ab", "2 bytes for 3 elements"),
        ({"a": 7}, b"", "no description"),
        ({"a": entry(), "b": entry(offsets=(1, 3))}, b"abc", "overlaps"),
        ({"a": entry(), "b": entry(offsets=(4, 6))}, b"abcdef", "hole"),
        ({"a": entry()}, b"a", "1 of 2|cut off"),
        ({"a": entry()}, b"abc", "1 bytes after"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
    ],
)
def test_refuses_damaged_headers(tmp_path, header, data, said):
    with pytest.raises(HeaderError, match=said):
        read_header(raw_file(tmp_path, header, data))


def test_an_unreadable_file_is_named_as_such(tmp_path):
    with pytest.raises(HeaderError, match="cannot be read"):
        read_header(tmp_path)


VALID = json.dumps({"a": entry(), "b": entry("F32", (1, 2), (2, 10))}).encode()


@settings(max_examples=300, deadline=None)
@given(
    cuts=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.binary(max_size=3)), max_size=4),
    length=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    data=st.binary(min_size=8, max_size=12),
)
def test_any_file_is_read_as_by_the_library_or_refused(tmp_path_factory, cuts, length, data):
    raw = bytearray(VALID)
    for place, text in cuts:
        raw[place : place + len(text)] = text
    file = raw_file(tmp_path_factory.getbasetemp(), bytes(raw), data, length)
    try:
        found = set(read_header(file))
    except HeaderError:
        found = None
    try:
        with safe_open(file, "np") as library:
            expected = set(library.keys())
    except (SafetensorError, OSError):
        expected = None
    if found is not None:
        assert expected is not None, "the library refuses this file"
        assert found == expected
    # The other way round: the audit is stricter in one thing only, names that stand in the header twice.
    if expected is not None and found is None:
        with pytest.raises(HeaderError, match="twice"):
            read_header(file)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=64))
def test_garbage_never_escapes_as_another_exception(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    file.write_bytes(content)
    try:
        read_header(file)
    except HeaderError:
        pass
    else:
        assert content[8:].startswith(b"{}")


def test_small_tensors_are_read_in_few_reads(tmp_path, monkeypatch):
    scalars = {f"scale.{i:03}": small.scalar(float(i)) for i in range(300)}
    far = {"weight": small.tensor("U8", 1 << 20), "last": small.scalar(7.0)}
    small.write_file(tmp_path / "a.safetensors", scalars | far)
    found = read_header(tmp_path / "a.safetensors")
    reads = []
    pread = audit_headers.os.pread
    monkeypatch.setattr(audit_headers.os, "pread", lambda *where: reads.append(where) or pread(*where))
    got = read_bytes(tensor for name, tensor in found.items() if name != "weight")
    assert [struct.unpack("<f", got[f"scale.{i:03}"])[0] for i in range(300)] == list(range(300))
    assert struct.unpack("<f", got["last"]) == (7.0,)
    assert len(reads) == 2


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path):
    file = tmp_path / "a.safetensors"
    small.write_file(file, {"a": small.scalar(1.0, 64)})
    found = read_header(file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(HeaderError, match="changed"):
        read_bytes(found.values())
