"""The audit of a checkpoint of GLM-5.3-Flash's own size, in sparse files: what it reads is small, and all there is."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay.checkpoint import audit_headers
from overlay.checkpoint.audit import Audit, audit
from overlay.recipes.check import GEOMETRY
from tests.checkpoint import small

SHARDS = 40
CONFIG = json.loads(GEOMETRY.read_text())
TEXT = CONFIG["text_config"]
HIDDEN, EXPERTS, LAYERS = TEXT["hidden_size"], TEXT["n_routed_experts"], TEXT["num_hidden_layers"]
LATENT, QUERY, HEADS = TEXT["kv_lora_rank"], TEXT["q_lora_rank"], TEXT["num_attention_heads"]
HEAD = TEXT["qk_nope_head_dim"] + TEXT["v_head_dim"]
LINEAR = TEXT["linear_attn_config"]["num_heads"] * TEXT["linear_attn_config"]["head_dim"]
PREFIX = "model.language_model."
DEAD = f"{PREFIX}layers.7.mlp.experts.203.up_proj.weight_scale_2"

# name, dtype, shape, value of a scalar (None: the bytes are never written)
Entries = Iterator[tuple[str, str, tuple[int, ...], float | None]]


def plain(name: str, *shape: int) -> Entries:
    yield f"{name}.weight", "BF16", shape, None


def nvfp4(name: str, rows: int, columns: int) -> Entries:
    yield f"{name}.weight", "U8", (rows, columns // 2), None
    yield f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16), None
    yield f"{name}.weight_scale_2", "F32", (), 2e-4


def entries() -> Entries:
    """Weight-only NVFP4 experts in 45 layers and the draft layer, everything else BF16."""
    yield from plain(f"{PREFIX}embed_tokens", TEXT["vocab_size"], HIDDEN)
    yield from plain("lm_head", TEXT["vocab_size"], HIDDEN)
    yield from plain("model.visual.merger.proj", HIDDEN, HIDDEN)
    for layer in range(LAYERS + 1):
        yield from decoder_layer(f"{PREFIX}layers.{layer}.", layer)


def decoder_layer(name: str, layer: int) -> Entries:
    sparse = layer == LAYERS or TEXT["layer_types"][layer] != "linear_attention"
    if sparse:
        shapes = {"q_a_proj": (QUERY, HIDDEN), "q_b_proj": (HEADS * HEAD // 2, QUERY), "o_proj": (HIDDEN, HEADS * 256)}
        shapes |= {"kv_a_proj_with_mqa": (LATENT, HIDDEN), "kv_b_proj": (HEADS * HEAD, LATENT)}
    else:
        shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (LINEAR, HIDDEN)) | {"o_proj": (HIDDEN, LINEAR)}
        shapes |= dict.fromkeys(("f_a_proj", "g_a_proj"), (128, HIDDEN)) | {"b_proj": (64, HIDDEN)}
    for part, shape in shapes.items():
        yield from plain(f"{name}self_attn.{part}", *shape)
    if layer < TEXT["first_k_dense_replace"]:
        yield from mlp(f"{name}mlp.", TEXT["intermediate_size"], plain)
        return
    yield from plain(f"{name}mlp.gate", EXPERTS, HIDDEN)
    yield from mlp(f"{name}mlp.shared_experts.", TEXT["moe_intermediate_size"], plain)
    for expert in range(EXPERTS):
        yield from mlp(f"{name}mlp.experts.{expert}.", TEXT["moe_intermediate_size"], nvfp4)


def mlp(name: str, width: int, matrix) -> Entries:
    for part in ("gate_proj", "up_proj"):
        yield from matrix(f"{name}{part}", width, HIDDEN)
    yield from matrix(f"{name}down_proj", HIDDEN, width)


def write(folder: Path) -> None:
    everything = list(entries())
    share = math.ceil(len(everything) / SHARDS)
    where = {}
    for number in range(SHARDS):
        part = everything[number * share : (number + 1) * share]
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        write_sparse(folder / file, part)
        where |= {name: file for name, *_ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "processor_config.json").write_text("{}")


def write_sparse(file: Path, part: list) -> None:
    """Real headers and scalars; the matrices are holes."""
    header, offset, values = {}, 0, []
    for name, dtype, shape, value in part:
        size = math.prod(shape) * small.ITEM[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        if value is not None:
            values.append((offset, math.nan if name == DEAD else value))
        offset += size
    raw = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for place, value in values:
            stream.seek(8 + len(raw) + place)
            stream.write(struct.pack("<f", value))
        stream.truncate(8 + len(raw) + offset)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Audit, list[int]]:
    """The folder, its audit, and the sizes of all reads of tensor data that the audit made."""
    folder = tmp_path_factory.mktemp("big")
    write(folder)
    reads: list[int] = []
    real = audit_headers.os.pread
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_headers.os, "pread", lambda fd, size, at: reads.append(size) or real(fd, size, at))
        return folder, audit(folder), reads


def test_it_is_about_as_large_as_the_published_one(big):
    folder, result, _ = big
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 170 << 30
    assert sum(file.stat().st_blocks * 512 for file in folder.glob("*.safetensors")) < 1 << 30
    assert result.bytes > 170 << 30


def test_headers_and_scales_are_all_that_is_read(big):
    _, _, reads = big
    assert sum(reads) < 32 << 20


def test_totals_are_the_geometrys(big):
    _, result, _ = big
    totals = {row.kind: row.parameters for row in result.totals}
    layers = LAYERS - TEXT["first_k_dense_replace"]
    assert totals["routed experts"] == layers * EXPERTS * 3 * HIDDEN * TEXT["moe_intermediate_size"]
    assert totals["embeddings"] == totals["output head"] == TEXT["vocab_size"] * HIDDEN
    assert totals["MTP layer"] > EXPERTS * 3 * HIDDEN * TEXT["moe_intermediate_size"]


def test_the_one_dead_scale_of_forty_thousand_is_found(big):
    _, result, _ = big
    errors = [finding for finding in result.findings if finding.severity == "error"]
    assert [(finding.check, finding.what) for finding in errors] == [
        (
            "weight_scale_unusable",
            "routed experts, layer 7: global weight scale unusable (nan) for up_proj of expert 203",
        )
    ]
