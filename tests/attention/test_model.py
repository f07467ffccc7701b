"""The real Glm5Next classes with our backend: plan, cache, metadata, forward. One child process, one claim a test.

The same tests hold for other releases: put the files of their wheel in front on PYTHONPATH.
"""

import pytest

from tests.conftest import run_python

ENGINES = {"bf16": 1024, "fp8": 512, "nested": 512, "4 heads": 1024, "16 heads": 1024, "64 heads": 1024}
FORWARDS = [
    *[("bf16", batch) for batch in ("prefill", "decode", "mixed")],
    *[("fp8", batch) for batch in ("decode", "mixed")],
    *[("nested", batch) for batch in ("decode", "speculative", "mixed")],
    *[(f"{heads} heads", "prefill") for heads in (4, 16, 64)],
]
TOKENS = {"prefill": 25, "decode": 5, "speculative": 9, "mixed": 31}
# Rounding of queries, weights and results to bf16; the accumulation is exact.
TOLERANCE = 4e-3


@pytest.fixture(scope="module")
def seen(fake_driver):
    return run_python("tests.attention.scenario_model", fake_driver((12, 1)), timeout=550)


@pytest.fixture(scope="module")
def release(seen):
    return tuple(int(part) for part in seen["version"].split(".")[:2])


def test_both_model_classes_and_the_draft_are_vllms_own(seen):
    assert seen["model_classes"] == [
        "Glm5NextForCausalLM",
        "Glm5NextForCausalLM",
        "Glm5NextForConditionalGeneration",
        "Glm5NextMTP",
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_layer_is_ours_and_no_dense_prefill_is_planned(seen, engine):
    plan = seen[engine]["plan"]
    assert plan["backend"] == "OVERLAY_SPARSE_MLA"
    assert plan["prefill_backend"] is False


@pytest.mark.parametrize("engine", ENGINES)
def test_the_kv_dtype_stays_what_was_asked_for(seen, engine):
    """vLLM's own backend would have turned it into fp8_ds_mla, for the layer and for the whole configuration."""
    plan = seen[engine]["plan"]
    asked = {"fp8": "fp8", "nested": "fp8_e4m3"}.get(engine, "bfloat16")
    assert (plan["layer_dtype"], plan["config_dtype"]) == (asked, asked)
    assert plan["cache_dtype"] == ("torch.bfloat16" if asked == "bfloat16" else "torch.uint8")


@pytest.mark.parametrize(("engine", "row_bytes"), ENGINES.items())
def test_rows_hold_the_latent_and_nothing_else(seen, engine, row_bytes):
    plan = seen[engine]["plan"]
    assert (plan["head_size"], plan["width"], plan["row_bytes"]) == (512, 512, row_bytes)


@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_are_a_whole_number_of_rows_apart(seen, engine):
    plan = seen[engine]["plan"]
    block_stride, row_stride, column_stride = plan["strides"]
    assert (row_stride, column_stride) == (512, 1)
    assert block_stride % 512 == 0
    assert block_stride >= plan["block_size"] * 512
    assert plan["block_size"] % 64 == 0


def test_the_full_sized_blocks_of_the_hybrid_layout(seen, release):
    """What 64 linear-attention heads make of the plan at TP 1, by release."""
    bf16, fp8 = seen["bf16"]["plan"], seen["fp8"]["plan"]
    assert (bf16["planned_block_size"], fp8["planned_block_size"]) == (4352, 8704)
    if release >= (0, 32):
        # Other layers' pages lie between the blocks, which nothing splits.
        assert (bf16["layout"], fp8["layout"]) == ("BLHNC", "BLHNC")
        assert (bf16["block_size"], bf16["strides"][0], bf16["offset"]) == (4352, 9009 * 512, 143616)
        assert fp8["block_size"] == 8704
    else:
        # Contiguous, and split to the 64 rows of a kernel block.
        assert (bf16["layout"], fp8["layout"]) == ("LBHNC", "LBHNC")
        assert (bf16["block_size"], bf16["strides"][0]) == (64, 64 * 512)


@pytest.mark.parametrize("engine", ENGINES)
def test_attention_and_index_share_a_block_table(seen, engine):
    plan = seen[engine]["plan"]
    own = next(group for group in plan["kv_groups"] if plan["group"][0] in group)
    assert set(plan["group"]) <= set(own)
    assert {name.replace(".attn", ".indexer.k_cache") for name in plan["group"]} <= set(own)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_declared_graph_support(seen, engine):
    assert seen[engine]["plan"]["graph_support"] == "UNIFORM_BATCH"


@pytest.mark.parametrize(("engine", "batch"), FORWARDS)
def test_forward_is_dense_attention_over_the_selected_tokens(seen, engine, batch):
    assert seen[engine]["forward"][batch]["error"] < TOLERANCE


@pytest.mark.parametrize(("engine", "batch"), FORWARDS)
def test_every_token_goes_through_one_path_with_its_whole_index_row(seen, engine, batch):
    forward = seen[engine]["forward"][batch]
    assert forward["tokens"] == TOKENS[batch]
    assert forward["width"] == 2176
    assert forward["lse"] is False


def test_draft_tokens_are_decodes(seen):
    """Uniform batches of 1 + 2 draft tokens, which graphs of UNIFORM_BATCH replay."""
    assert seen["nested"]["plan"]["reorder_threshold"] == 3
    assert seen["nested"]["forward"]["speculative"]["decodes"] == 3
    assert seen["nested"]["forward"]["speculative"]["prefills"] == 0


def test_the_draft_layer_is_in_the_group(seen):
    assert len(seen["nested"]["plan"]["group"]) == 2


def test_padding_of_a_graph_gives_zeros(seen):
    assert seen["special"]["padding"]["zeros"] is True
    assert seen["special"]["padding"]["error"] < TOLERANCE


def test_a_token_without_an_index_gives_zeros_and_disturbs_no_other(seen):
    assert seen["special"]["masked"] == {"zeros": True, "other": True}


def test_positions_out_of_bounds_count_for_nothing(seen):
    bad = seen["special"]["bad_indices"]
    assert bad["planted"] > 50
    assert bad["unchanged"] is True


def test_rows_of_nobody_are_never_read(seen, release):
    """NaN in every byte of the pool that this batch did not write."""
    foreign = seen["special"]["foreign_rows"]
    assert foreign["unchanged"] is True
    assert foreign["strided"] is (release >= (0, 32))


def test_scratch_is_one_allocation_at_one_address_from_the_profile_run_on(seen):
    scratch = seen["special"]["scratch"]
    assert scratch["addresses"] == 1
    assert scratch["inside"] is True
    needed = scratch["index_bytes"] + scratch["kernel_bytes"]
    assert needed <= scratch["bytes"] < needed + 512
    assert scratch["profile_zeroed"] is True


def test_memory_for_paths_never_taken_is_given_back(seen):
    """By vLLM's own code for 96 batched tokens and 16,384 positions; the index buffer grows with the former."""
    memory = seen["special"]["memory"]
    assert memory["stock_index_bytes_per_layer"] == 97 * (2176 + 1) * 4
    assert memory["our_index_group"] is False
    assert memory["stock_context_bytes"] == 16 << 20
    assert memory["our_context_bytes"] == 0


def test_ranks_of_decode_context_parallelism_merge_to_the_whole(seen):
    ranks = seen["special"]["ranks"]
    assert ranks["error"] < TOLERANCE
    assert ranks["heads"] == 16
    assert ranks["shapes"] == [[[4, 16, 512], [4, 16], "torch.float32"]] * 2


def test_a_rank_that_owns_no_selected_row_gives_zeros_and_minus_infinity(seen):
    assert seen["special"]["ranks"]["empty_out"] is True
    assert seen["special"]["ranks"]["empty_lse"] is True


def test_a_captured_draft_can_remake_its_metadata(seen, release):
    update = seen["special"]["draft_update"]
    assert update["declared"] is update["possible"] is (release >= (0, 32))
    if update["possible"]:
        assert update["map"] == [0, 1, 2]
        assert update["in_place"] is True


@pytest.mark.parametrize(("name", "view"), [("contiguous", [64, 16, 16, 0]), ("strided", [56, 16, 20, 0])])
def test_row_views(seen, name, view):
    assert seen["special"]["layouts"][name] == view


@pytest.mark.parametrize("name", ["part of a row", "padded rows", "576"])
def test_caches_that_are_not_rows_of_512_are_refused_by_name(seen, name):
    assert "is not made of rows of 512" in seen["special"]["layouts"][name]
    assert "OVERLAY_PATCHES=sparse_mla=false" in seen["special"]["layouts"][name]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("sliding window", "sliding_window"),
        ("soft cap", "logits_soft_cap"),
        ("encoder", "encoder"),
        ("packed rows", "fp8_ds_mla"),
        ("shared cache", "kv_sharing_target_layer_name"),
    ],
)
def test_what_the_implementation_lacks_is_refused_by_name(seen, name, word):
    assert word in seen["special"]["refusals"][name]
