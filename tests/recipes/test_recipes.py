"""The recipes as data: complete, honest about who measured what, and in agreement with the rest of the project."""

import json
import shlex
import subprocess
from dataclasses import replace

import pytest

from overlay.attention.choice import Layer, choose
from overlay.cli import main
from overlay.recipes import boxes, check, lines, page
from overlay.recipes.declare import RELEASES, RecipeError, Setting
from overlay.recipes.memory import ALLOWANCE_GIB, GIB, budget, token_bytes
from overlay.rehearsal import columns
from overlay.sources import VllmSources
from tests.conftest import ROOT

RECIPES = list(boxes.RECIPES.values())


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.name)
def recipe(request):
    return request.param


def test_the_boxes_people_have_are_there():
    assert set(boxes.RECIPES) == {"gb10-x2", "gb10-x4", "rtx-pro-6000-x2", "rtx-pro-6000-x4", "rtx-5090-x8"}
    assert all(recipe.name.endswith(f"-x{recipe.gpus}") for recipe in RECIPES)


def test_the_page_is_what_the_data_says():
    """Out of date: python -m overlay recipe --page docs/recipes.md"""
    assert (ROOT / "docs" / "recipes.md").read_text() == page.markdown()


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_every_line_is_shell_that_parses(recipe, release):
    for _, text in (*lines.launch(recipe, release), *lines.with_ray(recipe, release)):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_word_has_a_reason(recipe):
    for setting in (*recipe.environment, *recipe.flags):
        assert len(setting.why) > 15, setting


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_a_release_gets_each_setting_once(recipe, release):
    words = [setting.text.split()[0].split("=")[0] for setting in recipe.environment_for(release)]
    words += [setting.text.split()[0] for setting in recipe.flags_for(release)]
    assert sorted(words) == sorted(set(words))
    assert {"PYTHONPATH", "--kv-cache-dtype", "--tool-call-parser", "--reasoning-parser"} <= set(words)


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_breakable_graphs_are_off_where_that_boots_and_never_where_it_does_not(recipe, release):
    variables = check.variables(recipe, release)
    flags = check.arguments(recipe.flags_for(release))
    assert (variables.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "0") == (release < (0, 33))
    assert ("--compilation-config" in flags) == (release >= (0, 33))
    if release >= (0, 33):
        assert json.loads(flags[flags.index("--compilation-config") + 1])["cudagraph_mode"].startswith("FULL")


def test_figures_are_attributed_and_not_claimed(recipe):
    text = lines.reports_text(recipe)
    assert "not measured again with this overlay" in text or "nothing was measured on it here" in text
    for report in recipe.reports:
        assert report.by and report.when and report.setup


def test_nodes_get_one_rank_each_and_the_same_environment(recipe):
    steps = lines.launch(recipe, (0, 33))
    served = [text for _, text in steps if "vllm serve" in text]
    assert len(served) == recipe.nodes
    if recipe.nodes > 1:
        assert "PYTHONPATH" in steps[0][1]
        assert [f"--node-rank {rank}" in text for rank, text in enumerate(served)] == [True] * recipe.nodes
        assert ["--headless" in text for text in served] == [False] + [True] * (recipe.nodes - 1)
        assert all("PYTHONPATH" in text for _, text in lines.with_ray(recipe, (0, 33))[:2])


# What vLLM's own planner came to for this geometry: (KV dtype, tokens of a block, its bytes over all layers).
PLANNED = (
    ("fp8", 4352, 26_104_320),
    ("fp8", 2304, 13_820_928),
    ("bfloat16", 2304, 26_797_056),
    ("bfloat16", 1280, 14_902_272),
    ("fp8_ds_mla", 4352, 33_251_328),
)


@pytest.mark.parametrize(("dtype", "tokens", "block"), PLANNED)
def test_bytes_of_a_token_are_those_of_the_planner(dtype, tokens, block):
    assert token_bytes(dtype, draft_layer=False) == pytest.approx(block / tokens, rel=0.01)


def test_the_sum_adds_up_and_is_the_one_a_rehearsal_makes(recipe):
    found = budget(recipe)
    assert found.fits
    assert found.left == pytest.approx(recipe.memory * recipe.utilization - found.weights - ALLOWANCE_GIB)
    assert columns.ALLOWANCE == ALLOWANCE_GIB * GIB
    assert f"--gpu-memory-utilization {recipe.utilization:g}" in [setting.text for setting in recipe.flags]
    flags = check.arguments(recipe.flags_for((0, 33)))
    assert found.tokens > int(flags[flags.index("--max-model-len") + 1])
    drafted = json.loads(flags[flags.index("--speculative-config") + 1]) if "--speculative-config" in flags else {}
    assert drafted.get("num_speculative_tokens", 0) == recipe.draft_tokens


def chosen(dtype: str, stock_works: bool = True, **changes) -> bool | None:
    described = {
        "capability": (12, 1),
        "use_mla": True,
        "use_sparse": True,
        "head_size": 512,
        "rope_size": 0,
        "kv_cache_dtype": dtype,
        "index_topk": 2048,
        "dcp": False,
        "selected": None,
        **changes,
    }
    defect = None if stock_works else "cannot store rope-free rows"
    return choose(Layer(**described), wanted="auto", native_defect=lambda: defect, stock_refusal=lambda: None).ours


def test_the_takeover_table_is_what_the_patch_decides():
    table = {(vllm, dtype): backend for vllm, dtype, backend in boxes.TAKEOVER}
    assert table["0.30", "any it supports"] == "ours"
    assert chosen("auto", stock_works=False) is chosen("fp8", stock_works=False) is True
    assert table["0.31 and newer", "auto, fp8_ds_mla"].startswith("vLLM's own")
    assert chosen("auto") is chosen("fp8_ds_mla") is False
    assert table["0.31 and newer", "bfloat16, fp8, fp8_e4m3"] == "ours"
    assert chosen("bfloat16") is chosen("fp8") is chosen("fp8_e4m3") is True
    assert chosen("auto", dcp=True) is chosen("auto", index_topk=1024) is True
    assert chosen("fp8", selected="FLASHINFER_MLA_SPARSE_SM120") is False


def test_the_installed_vllm_knows_every_name(recipe):
    sources = VllmSources.find()
    findings = list(check._names(recipe, boxes.parse_release(sources.version), sources))
    assert {finding.name for finding in findings} >= {"--tool-call-parser glm47", "--reasoning-parser glm47"}
    assert all(finding.ok for finding in findings), findings


def test_a_name_that_it_does_not_know_is_found(recipe):
    wrong = replace(
        recipe,
        flags=(Setting("--tool-call-parser glm99", "not there"),),
        environment=(Setting("VLLM_NO_SUCH_THING=1", "not there"), Setting("NCCL_DEBUG=INFO", "not vLLM's")),
    )
    findings = list(check._names(wrong, (0, 33), VllmSources.find()))
    assert [(finding.name, finding.ok) for finding in findings] == [
        ("--tool-call-parser glm99", False),
        ("VLLM_NO_SUCH_THING", False),
    ]


def test_a_table_that_vllm_moved_is_an_error_not_a_pass():
    with pytest.raises(RecipeError, match="not a table of names"):
        check._keys(VllmSources.find(), "vllm.envs", "no_such_table")


GOOD = {
    "failure": None,
    "boots": True,
    "attention_backend": "OVERLAY_SPARSE_MLA",
    "kv_cache_dtype": "fp8",
    "moe_backend": "MARLIN",
    "moe_quantization": "ModelOptNvFp4FusedMoE (W4A16)",
    "kv_tokens": 300_000,
    "max_model_len": 262_144,
    "block_size": 4608,
}
BAD = {
    "boots": {"boots": False, "failure": {"stage": "the KV cache plan", "error": "no memory"}},
    "attention backend": {"attention_backend": "FLASHINFER_MLA_SPARSE_SM120"},
    "experts": {"moe_quantization": "ModelOptNvFp4FusedMoE (W4A4)"},
    "KV cache": {"kv_tokens": 100_000},
}


def test_a_good_plan_passes_and_each_bad_one_fails_where_it_is_bad():
    assert all(finding.ok for finding in check.plan(GOOD, published=True))
    for name, changes in BAD.items():
        findings = check.plan({**GOOD, **changes}, published=True)
        assert [finding.name for finding in findings if not finding.ok] == [name]


def test_somebodys_own_w4a4_checkpoint_is_no_fault():
    column = {**GOOD, **BAD["experts"]}
    assert all(finding.ok for finding in check.plan(column, published=False))


def test_command_lines_carry_every_flag(recipe):
    asked = check.commands(recipe, (0, 33))
    assert len(asked) == recipe.nodes + 1  # and the one over Ray
    for words in asked:
        assert words[0] == boxes.MODEL
        assert "$" not in shlex.join(words)
        assert set(check.arguments(recipe.flags_for((0, 33)))) <= set(words)


def test_the_command_lists_shows_and_writes(tmp_path, capsys):
    assert main(["recipe"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in boxes.RECIPES)
    assert main(["recipe", "gb10-x2", "--vllm", "0.30", "--model", "/models/glm"]) == 0
    shown = capsys.readouterr().out
    assert "vllm serve /models/glm" in shown and "VLLM_USE_BREAKABLE_CUDAGRAPH=0" in shown
    assert main(["recipe", "rtx-5090-x8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tensor_parallel_size"] == 8 and told["memory"]["kv_cache_gib"] > 0 and told["reports"] == []
    assert main(["recipe", "--page", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == page.markdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rtx-5090"], "did you mean 'rtx-5090-x8'"),
        (["gb10-x2", "--vllm", "0.27.1"], "recipes for vLLM 0.30"),
        (["gb10-x2", "--vllm", "nightly"], "not for nightly"),
        (["--check"], "needs the NAME"),
        (["gb10-x2", "--check", "--vllm", "0.30"], "run it where that is installed"),
        (["gb10-x2", "--check", "--model", "zai-org/GLM"], "nothing is downloaded"),
    ],
)
def test_what_cannot_be_done_is_said(capsys, arguments, message):
    assert main(["recipe", *arguments]) == 2
    assert message in capsys.readouterr().err
