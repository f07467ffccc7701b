"""The configuration on its own: whatever a user writes is either a Config or one ConfigError that names the place."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay import config, registry
from overlay.errors import ConfigError

PATCHES = list(registry.declarations())
IDS = [patch.id for patch in PATCHES]

names = st.sampled_from(["overlay", "patches", "enabled", "strict", "log", *IDS]) | st.text(max_size=8)
plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["auto", "info"])
)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))


def written(value: object) -> str:
    """A TOML value; None, which TOML lacks, becomes an empty string."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(k)} = {written(v)}" for k, v in value.items()) + "}"
    return quoted(value or "")


def quoted(text: str) -> str:
    return '"' + "".join(f"\\U{ord(c):08x}" if not c.isalnum() or ord(c) > 127 else c for c in text) + '"'


def load(file: Path, text: str | bytes, **environ: str) -> config.Config | ConfigError:
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        return config.load(PATCHES, {"OVERLAY_CONFIG": str(file), **environ})
    except ConfigError as error:
        return error


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "my.toml"


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(names, values, max_size=4))
def test_any_document_is_read_or_refused_by_file_and_line(file: Path, document: dict[str, object]):
    text = "\n".join(f"{quoted(key)} = {written(value)}" for key, value in document.items())
    tomllib.loads(text)  # the generator writes TOML: what is refused is refused for its contents
    found = load(file, text)
    if isinstance(found, ConfigError):
        place, line, _ = str(found).split(":", 2)
        assert place == str(file) and 1 <= int(line) <= max(1, len(text.splitlines()))
    else:
        assert set(found.patches) == set(IDS)
        assert set(document) <= {"overlay", "patches"}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='[]{}="\n#.,ab1 \\', max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused(file: Path, content: bytes):
    found = load(file, content)
    assert isinstance(found, config.Config) or str(found).startswith(str(file))


@settings(max_examples=300, deadline=None)
@given(
    st.text(max_size=30) | st.lists(st.sampled_from([*IDS, "=", ",", "true", "auto", "no"]), max_size=8).map("".join)
)
def test_any_override_is_taken_or_refused(file: Path, value: str):
    found = load(file, "", OVERLAY_PATCHES=value)
    if isinstance(found, ConfigError):
        assert str(found).startswith("OVERLAY_PATCHES: ")
    else:
        given_ids = {part.partition("=")[0].strip() for part in value.split(",") if part.strip()}
        changed = {name for name, patch in found.patches.items() if patch.origin == "OVERLAY_PATCHES"}
        assert changed == given_ids


def test_an_override_wins_over_the_file(file: Path):
    found = load(
        file, "[patches.sparse_mla]\nenabled = true\n", OVERLAY_PATCHES="sparse_mla = false, process_proof=auto"
    )
    assert found.patches["sparse_mla"].switch is False
    assert found.patches["process_proof"].origin == "OVERLAY_PATCHES"


def test_the_shipped_file_sets_every_patch_and_option_with_its_default():
    """Every key stands there to be changed, with a comment above it, and changing nothing changes nothing."""
    text = config.DEFAULT_FILE.read_text()
    document = tomllib.loads(text)
    assert list(document["overlay"]) == [option.name for option in config.OVERLAY_OPTIONS]
    assert sorted(document["patches"]) == sorted(IDS)
    for patch in PATCHES:
        table = document["patches"][patch.id]
        assert table.pop("enabled") == patch.default, patch.id
        assert table == {option.name: option.default for option in patch.options}, patch.id
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line and not line.startswith(("#", "[")):
            assert lines[number - 1].startswith("#"), f"{line!r} has no comment above it"


@pytest.mark.parametrize(
    ("patch", "option", "value", "allowed"),
    [
        ("indexer_workspace", "max_logits_mb", "0", "from 1 to 65536"),
        ("indexer_workspace", "max_logits_mb", "-64", "from 1 to 65536"),
        ("indexer_workspace", "max_logits_mb", "99999999999999999999", "from 1 to 65536"),
        ("integrated_memory", "reserve_gib", "-8", "from 0 to 1024"),
        ("integrated_memory", "reserve_gib", "nan", "from 0 to 1024"),
        ("integrated_memory", "reserve_gib", "inf", "from 0 to 1024"),
        ("nvfp4_moe_scales", "all_missing", "0", "from 1.17549e-38 to 10000"),
        ("nvfp4_moe_scales", "all_missing", "-1.0", "from 1.17549e-38 to 10000"),
        ("nvfp4_moe_scales", "all_missing", "1e5", "from 1.17549e-38 to 10000"),
        ("nvfp4_moe_scales", "all_missing", "nan", "from 1.17549e-38 to 10000"),
    ],
)
def test_a_number_outside_its_range_is_refused_with_the_range(
    file: Path, patch: str, option: str, value: str, allowed: str
):
    found = load(file, f"[patches.{patch}]\n{option} = {value}\n")
    assert isinstance(found, ConfigError)
    assert str(found).startswith(f"{file}:2: patches.{patch}.{option} is ") and str(found).endswith(allowed)


@pytest.mark.parametrize(
    ("patch", "option", "value"),
    [
        ("indexer_workspace", "max_logits_mb", 1),
        ("integrated_memory", "reserve_gib", 0),
        ("nvfp4_moe_scales", "all_missing", 1e4),
        ("nvfp4_moe_scales", "all_missing", 0.002),
        ("nvfp4_moe_scales", "all_missing", "refuse"),
    ],
)
def test_the_ends_of_a_range_and_words_are_taken(file: Path, patch: str, option: str, value: object):
    found = load(file, f"[patches.{patch}]\n{option} = {written(value)}\n")
    assert found.patches[patch].options[option] == value


def test_every_number_has_a_range():
    """A bool is no number; everything else that a user can count with has ends."""
    for option in [*config.OVERLAY_OPTIONS, *(option for patch in PATCHES for option in patch.options)]:
        types = option.type if isinstance(option.type, tuple) else (option.type,)
        assert bool({int, float} & set(types)) == (option.limits is not None), option.name
