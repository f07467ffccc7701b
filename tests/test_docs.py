"""Documents that repeat what the code says must say the same."""

import itertools
import json
import re
from pathlib import Path

import pytest

from overlay import commands, registry
from overlay.bench import projection
from overlay.commands.explain import as_markdown, summary_table
from overlay.kernel.plan import plan
from overlay.kernel.variants import VARIANTS

ROOT = Path(__file__).resolve().parent.parent
BENCH = json.loads((ROOT / "docs/measurements/bench-nvidia-h200.json").read_text())
PEERS = {
    "FlashInfer FA2": "flashinfer_fa2",
    "FlashInfer FA3 (Hopper only)": "flashinfer_fa3",
    "vLLM Triton": "vllm_triton",
}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_patches_page_is_what_the_declarations_say():
    page = (ROOT / "docs/patches.md").read_text()
    assert page == as_markdown(registry.declarations()) + "\n", "python -m overlay explain --markdown > docs/patches.md"


def test_the_readmes_table_is_the_same():
    readme = (ROOT / "README.md").read_text()
    table = readme.split("-->\n", 1)[1].split("<!-- end of patches", 1)[0]
    assert table.splitlines() == summary_table(registry.declarations())


def test_the_readme_has_two_set_up_and_go_commands_and_ci_runs_the_test_command():
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^make (\w+)", readme, re.M) == ["demo", "test"]
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_every_command_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for file in sorted(Path(commands.__path__[0]).glob("[!_]*.py")):
        name = file.stem.replace("_", "-")
        assert f"python -m overlay {name}" in readme, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_files_lead_somewhere(document: Path):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_table_has_its_head(document: Path):
    """A blank line in the middle of a table makes plain text of the rest."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert [table for table in tables if not re.match(r"\|.*\n\|(?: *:?-+:? *\|)+\n", table)] == []


def table(document: str, head: str) -> list[list[str]]:
    """The cells of the table whose head line begins with `head`, without the head."""
    lines = (ROOT / document).read_text().split(f"\n{head}", 1)[1].splitlines()[2:]
    rows = lines[: next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def measured(heads: int, tokens: int, kv: str = "bf16", kernel: str = "ours") -> dict:
    wanted = {"kernel": kernel, "heads": heads, "tokens": tokens, "kv_dtype": kv, "pattern": "uniform"}
    wanted |= {"columns": 2048, "valid": 2048}
    return next(row for row in BENCH["rows"] if all(row[key] == value for key, value in wanted.items()))


def microseconds(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


@pytest.mark.parametrize(
    ("document", "head", "tokens"),
    [
        ("README.md", "| heads | KV | T=1 | T=64 | T=4096 |", (1, 64, 4096)),
        ("docs/kernel.md", "| heads | KV | T=1 | 8 |", (1, 8, 64, 128, 1024, 4096)),
    ],
)
def test_times_are_those_of_the_kept_run(document: str, head: str, tokens: tuple[int, ...]):
    rows = table(document, head)
    assert len(rows) == 8
    for heads, kv, *cells in rows:
        assert cells == [microseconds(measured(int(heads), count, kv)["us"]) for count in tokens]


@pytest.mark.parametrize(
    ("head", "kv", "count"), [("| heads | peer |", "bf16", 12), ("| heads, fp8 | peer |", "fp8", 8)]
)
def test_ratios_are_those_of_the_kept_run(head: str, kv: str, count: int):
    ratios = table("docs/kernel.md", head)
    assert len(ratios) == count
    for heads, peer, *cells in ratios:
        pairs = [
            (measured(int(heads), tokens, kv, PEERS[peer]), measured(int(heads), tokens, kv))
            for tokens in (1, 8, 64, 128, 1024, 4096)
        ]
        assert cells == [f"{theirs['us'] / ours['us']:.2f}" for theirs, ours in pairs]


def test_ranges_of_ratios_in_prose_are_those_of_the_kept_run():
    def ratios(peer: str, kv: str, heads: tuple[int, ...] = (8, 16, 32, 64), least: int = 1) -> list[float]:
        counts = (tokens for tokens in (1, 8, 64, 128, 1024, 4096) if tokens >= least)
        pairs = itertools.product(heads, counts)
        return [measured(*pair, kv, PEERS[peer])["us"] / measured(*pair, kv)["us"] for pair in pairs]

    readme, issues = ((ROOT / name).read_text() for name in ("README.md", "docs/known-issues.md"))
    bf16, long = ratios("FlashInfer FA2", "bf16"), ratios("FlashInfer FA2", "bf16", (64,), 64)
    fp8 = ratios("FlashInfer FA2", "fp8") + ratios("FlashInfer FA3 (Hopper only)", "fp8")
    assert f"For bf16 rows it is {min(bf16):.2f} to {max(bf16):.2f} times as fast as FlashInfer's FA2" in readme
    assert f"For fp8 rows it is {min(fp8):.1f} to {max(fp8):.0f} times as fast as either" in readme
    assert f"for bf16 rows, {min(long):.2f} to {max(long):.2f} times as fast as FlashInfer's FA2" in issues


def test_launches_are_those_of_the_code():
    launches = table("docs/kernel.md", "| heads | KV | T=1 | T=8 |")
    assert len(launches) == 8
    for heads, kv, *cells in launches:
        cuts = [plan(int(heads), kv, tokens, 2048, 132) for tokens in (1, 8, 64, 128, 1024, 4096)]
        names = [cut.variant.name.removeprefix("sparse_mla_h").replace(f"_{kv}", "").replace("_", " ") for cut in cuts]
        assert cells == [f"{name} x {cut.splits}" for name, cut in zip(names, cuts, strict=True)]


def test_times_of_few_tokens_are_those_of_the_launches_that_a_call_takes():
    kept = json.loads((ROOT / "docs/measurements/tune-nvidia-h200.json").read_text())
    names = ("heads", "tokens", "kv_dtype", "variant", "splits")
    times = {tuple(row[name] for name in names): row["us"] for row in kept["rows"]}
    rows = table("docs/kernel.md", "| heads | KV | 1 token | 2 |")
    assert len(rows) == 8
    for heads, kv, *cells in rows:
        for tokens, cell in zip((1, 2, 4, 8, 16, 64), cells, strict=True):
            cut = plan(int(heads), kv, tokens, 2048, kept["sm_count"])
            assert cell == microseconds(times[int(heads), tokens, kv, cut.variant.name, cut.splits])


def test_variants_are_those_of_the_code():
    rows = table("docs/kernel.md", "| heads | KV | tile rows |")
    assert [[*row[:6], row[8]] for row in rows] == [
        [
            f"{variant.heads}{' deep' if variant.deep else ' few' if variant.few else ''}",
            variant.kv_dtype,
            str(variant.tile_rows),
            f"{variant.ring} of {variant.tile_rows // 8} KB",
            str(variant.threads),
            f"{variant.shared_bytes:,}",
            str(variant.blocks),
        ]
        for variant in VARIANTS
    ]


def test_the_profile_is_the_kept_one():
    kept = json.loads((ROOT / "docs/measurements/profile-nvidia-h200.json").read_text())["rows"]
    rows = table("docs/kernel.md", "| kernel, of a call with | T |")
    assert rows
    for name, tokens, us, tensor, shared, l2, issue, _ in rows:
        kernel, heads = re.fullmatch(r"(\w+), (\d+) heads", name).groups()
        found = [
            row for row in kept if (row["kernel"], row["heads"], row["tokens"]) == (kernel, int(heads), int(tokens))
        ]
        names = ("tensor_percent", "shared_percent", "l2_percent", "issue_percent")
        assert [tensor, shared, l2, issue] == [f"{found[0][key]:.0f} %" for key in names], name
        assert us == microseconds(found[0]["us"])


def test_calls_of_two_launches_are_those_of_the_kept_run():
    kept = json.loads((ROOT / "docs/measurements/two-launches-nvidia-h200.json").read_text())["rows"]
    plain = [row for row in kept if row["columns"] == row["valid"] == 2048 and row["pattern"] == "uniform"]
    times = {tuple(row[key] for key in ("kernel", "heads", "tokens", "kv_dtype")): row["us"] for row in plain}
    rows = table("docs/kernel.md", "| heads | KV, one launch to two | T=140 |")
    assert len(rows) == 8
    for heads, kv_dtype, *cells in rows:
        for tokens, cell in zip((140, 272, 536, 1064, 2120), cells, strict=True):
            shape = (int(heads), tokens, kv_dtype)
            alone = times.get(("ours_one_launch", *shape))
            shown = [] if alone is None else [microseconds(alone)]
            assert cell == " to ".join([*shown, microseconds(times["ours", *shape])])


def test_percents_are_those_of_the_kept_run():
    tokens = (1, 8, 64, 128, 1024, 4096)
    percents = table("docs/kernel.md", "| heads | T=1 | 8 |")
    assert len(percents) == 4
    for heads, *cells in percents:
        rows = [[measured(int(heads), count, kv)["percent_of_limit"] for kv in ("bf16", "fp8")] for count in tokens]
        assert cells == [f"{bf16:.0f} / {fp8:.0f}" for bf16, fp8 in rows]


def test_the_engines_are_those_of_the_kept_run():
    kept = json.loads((ROOT / "docs/measurements/engine-nvidia-h200.json").read_text())["cases"]
    assert table("README.md", "| configuration | generated tokens compared |") == [
        [
            case["name"],
            str(case["generated_tokens"]),
            f"{case['largest_generated_difference']:.4f}",
            f"{case['prompt_tokens']:,}",
            f"{case['mean_logprob_difference']:.4f}",
            str(len(case["jumps"])),
        ]
        for case in kept
    ]


def test_bars_met_are_those_of_the_kept_run():
    met, of = sum(bar["met"] for bar in BENCH["bars"]), len(BENCH["bars"])
    assert f"**{met} of the {of} bars are met**" in (ROOT / "docs/kernel.md").read_text()
    assert f"it meets {met} of {of};" in (ROOT / "README.md").read_text()
    assert f"it meets {met} of {of}." in (ROOT / "docs/known-issues.md").read_text()


def test_the_projection_is_what_the_command_prints():
    _, cells = projection.table(projection.projections(BENCH["rows"]))
    assert table("docs/kernel.md", "| part | heads |") == [[str(cell) for cell in row] for row in cells]


@pytest.mark.parametrize("document", ["README.md", "docs/install.md"])
def test_the_example_of_a_status_line_counts_every_patch(document: str):
    """On a GB10 with vLLM 0.33, as docs/versions.md has it: the last column, left of the slash."""
    states = [
        row[-1].split(" / ")[0] if not row[0].endswith("*") else "off" for row in table("docs/versions.md", "| patch |")
    ]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("armed", "retired", "off"))
    assert len(states) == len(list(registry.declarations()))
    assert f": {counts} (vllm 0.33.0, sm_121)" in (ROOT / document).read_text()


def test_the_architecture_page_names_every_package():
    page = (ROOT / "docs/architecture.md").read_text()
    missing = [folder.name for folder in (ROOT / "overlay").iterdir() if (folder / "__init__.py").exists()]
    assert [name for name in missing if f"`overlay/{name}/`" not in page] == []
