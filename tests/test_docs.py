"""Documents that repeat what the code says must say the same."""

import re
from pathlib import Path

import pytest

from overlay import commands, registry
from overlay.commands.explain import as_markdown, summary_table

ROOT = Path(__file__).resolve().parent.parent
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
