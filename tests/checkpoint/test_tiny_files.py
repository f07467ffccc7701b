"""The folder that `overlay tiny` writes: its files, its tokenizer, what it refuses."""

import json

import pytest
import torch
from safetensors import safe_open

from overlay import cli
from overlay.checkpoint import tiny
from overlay.checkpoint.tiny_config import SPECIAL_TOKENS, VOCABULARY, CheckpointError, TinyModel, model_config
from overlay.checkpoint.tiny_weights import PRINTABLE, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny") / "model"
    assert cli.main(["tiny", str(out), "--heads", "8", "--nested", "--mtp"]) == 0
    return out


def test_the_same_seed_gives_the_same_files_bit_for_bit(folder, tmp_path):
    again = tmp_path / "again"
    tiny.write(TinyModel(heads=8, nested=True, mtp=True), again)
    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in again.iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (again / name).read_bytes(), name


def test_a_seed_is_a_model_and_options_change_only_the_shapes_they_must():
    first = dict(weights(TinyModel(heads=8)))
    other_seed = dict(weights(TinyModel(heads=8, seed=1)))
    assert {name for name, tensor in first.items() if torch.equal(tensor, other_seed[name])} == set()
    more_heads = dict(weights(TinyModel(heads=16, mtp=True)))
    differing = {name.split(".")[-2] for name in first if not torch.equal(first[name], more_heads[name])}
    assert differing == {"q_b_proj", "kv_b_proj", "o_proj"}


def test_shards_and_index_agree(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found, size = {}, 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                found[name] = file.name
                size += shard.get_tensor(name).nbytes
    assert len(set(found.values())) > 1
    assert index == {"metadata": {"total_size": size}, "weight_map": found}


def test_a_checkpoint_is_small(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) < 200e6


def test_every_byte_is_a_token_and_any_text_comes_back(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("plain text\n", "  two  blanks\t", "héllo, wörld: 你好 🙂", "".join(map(chr, range(256))), ""):
        ids = tokenizer(text).input_ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(256, 256 + len(SPECIAL_TOKENS)))
    assert len(tokenizer) <= VOCABULARY
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256


def test_chat_template_takes_strings_and_parts(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [{"type": "text", "text": "Look: "}, {"type": "image"}]
    messages = [{"role": "user", "content": "Hello"}, {"role": "user", "content": parts}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    assert text == f"[gMASK]<sop><|user|>\nHello<|user|>\nLook: {image}<|assistant|>\n"


def test_the_vision_path_finds_its_processor(folder):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert processor.image_token_id == config["image_token_id"]
    assert processor.image_processor.merge_size == config["vision_config"]["spatial_merge_size"]


def test_only_printable_tokens_have_a_chance():
    tensors = dict(weights(TinyModel(heads=8)))
    held = [token for token in range(VOCABULARY) if token not in PRINTABLE]
    assert (tensors["lm_head.weight"][held, 0] < -90).all()
    assert (tensors["lm_head.weight"][PRINTABLE, 0] == 0).all()
    assert (tensors["model.embed_tokens.weight"][:, 0] == 1).all()


@pytest.mark.parametrize("nested", [False, True])
def test_config_keeps_the_geometry_of_the_model_family(nested):
    config = model_config(TinyModel(heads=32, layers=9, nested=nested))
    text = config.get("text_config", config)
    assert text["layer_types"].index("deepseek_sparse_attention") == 3
    assert text["layer_types"].count("deepseek_sparse_attention") == 2
    wanted = {
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 256,
        "v_head_dim": 256,
        "kv_lora_rank": 512,
        "index_topk": 2048,
        "index_kpool": 4,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "num_attention_heads": 32,
    }
    assert {key: text[key] for key in wanted} == wanted
    assert text["max_position_embeddings"] >= 16384


def test_a_failure_leaves_nothing_behind(tmp_path):
    def broken():
        yield "a", torch.zeros(1)
        raise RuntimeError("disk on fire")

    model = TinyModel(heads=8)
    with pytest.raises(RuntimeError, match="disk on fire"):
        tiny.write_folder(tmp_path / "out", model, {"config.json": model_config(model)}, broken())
    assert list(tmp_path.iterdir()) == []


REFUSED = {
    "heads": (["--heads", "12"], "12 heads: this model family has 8, 16, 32, 64 per rank"),
    "layers": (["--layers", "3"], "at least 4 are needed"),
    "seed": (["--seed", "-1"], "seed -1 is outside"),
    "no case": (["--quant", "modelopt"], "--quant modelopt needs --case, one of: flat_null, "),
    "unknown case": (["--quant", "modelopt", "--case", "flat_nul"], "unknown case 'flat_nul' for modelopt; there are"),
    "case of the other format": (
        ["--quant", "compressed-tensors", "--case", "flat_null"],
        "there are: weight_only, w4a4, w4a4_linears",
    ),
    "unknown fault": (
        ["--quant", "modelopt", "--case", "genuine_w4a4", "--fault", "one_zer"],
        "unknown fault 'one_zer'; there are: one_zero, ",
    ),
    "no scales to spoil": (
        ["--quant", "modelopt", "--case", "flat_null", "--fault", "one_zero"],
        "ships no activation scales that 'one_zero' could spoil; use one of: genuine_w4a4, ",
    ),
    "no linears to spoil": (
        ["--quant", "modelopt", "--case", "genuine_w4a4", "--fault", "linear_missing"],
        "quantises no linears; 'linear_missing' needs one of: mixed_groups_experts_null, genuine_w4a4_linears",
    ),
    "two faults": (
        ["--quant", "modelopt", "--case", "w4a4_all_zero_shipped", "--fault", "one_nan"],
        "is a fault itself (all_zero); leave --fault out",
    ),
    "fault of BF16": (["--fault", "one_nan"], "--fault goes with --quant"),
    "twin of BF16": (["--twin", "elsewhere"], "--twin goes with --quant"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_way_out(name, tmp_path, capsys):
    arguments, message = REFUSED[name]
    assert cli.main(["tiny", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(["tiny", str(tmp_path)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="not an empty folder"):
        tiny.require_free(tmp_path / "notes.txt")


def test_a_twin_that_cannot_be_written_stops_before_the_checkpoint(tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "x").touch()
    quantised = ["--quant", "modelopt", "--case", "flat_null"]
    assert cli.main(["tiny", str(tmp_path / "out"), *quantised, "--twin", str(taken)]) == 2
    assert cli.main(["tiny", str(tmp_path / "out"), *quantised, "--twin", str(tmp_path / "out")]) == 2
    assert "give it one of its own" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
