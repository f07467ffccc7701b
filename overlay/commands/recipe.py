"""Launch lines for the known boxes."""

import argparse
import json
import sys
from pathlib import Path

from overlay import outputs
from overlay.table import table

HELP = "complete launch lines for the known boxes, why each word is there, and whether this vLLM takes them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="one recipe in full (default: list them)")
    parser.add_argument("--vllm", metavar="X.Y", help="the release to write it for (default: the installed one)")
    parser.add_argument("--model", metavar="DIR_OR_ID", help="the checkpoint (default: the published one)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="let the installed vLLM's own code take it, without a GPU; with --model DIR, for that checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write all recipes as the documentation's page (docs/recipes.md)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the list, one recipe, or the check; 1 where the check finds something that would not work."""
    from overlay.recipes import boxes, lines, page
    from overlay.recipes.declare import RecipeError

    if options.page:
        outputs.require_file(options.page, "--page")
        options.page.write_text(page.markdown(), encoding="utf-8")
        return 0
    if options.name is None:
        if options.check:
            raise RecipeError("--check needs the NAME of a recipe")
        recipes = list(boxes.RECIPES.values())
        if options.json:
            names = [{"name": recipe.name, "title": recipe.title} for recipe in recipes]
            print(json.dumps({"recipes": names}, indent=2))
        else:
            print(lines.listing(recipes, boxes.TAKEOVER))
        return 0
    recipe = boxes.find(options.name)
    if options.check:
        return _check(recipe, options)
    release = boxes.parse_release(options.vllm) if options.vllm else _installed()
    model = options.model or boxes.MODEL
    shown = lines.as_json(recipe, release, model) if options.json else lines.as_text(recipe, release, model)
    print(json.dumps(shown, indent=2) if options.json else shown)
    return 0


def _check(recipe, options: argparse.Namespace) -> int:
    from overlay.recipes import boxes, check
    from overlay.recipes.declare import RecipeError

    if options.vllm and boxes.parse_release(options.vllm) != _installed():
        raise RecipeError(
            f"--check asks the installed vLLM; to check for {options.vllm}, run it where that is installed"
        )
    model = Path(options.model) if options.model else None
    if model is not None and not model.exists():
        raise RecipeError(f"--model {model}: --check needs a folder (or a config.json); nothing is downloaded")
    findings = check.check(recipe, model, progress=_progress)
    good = all(finding.ok for finding in findings)
    if options.json:
        print(json.dumps({"name": recipe.name, "ok": good, "findings": [vars(f) for f in findings]}, indent=2))
    else:
        print(table(("check", "ok", "detail"), ((f.name, "yes" if f.ok else "NO", f.detail) for f in findings)))
    return 0 if good else 1


def _installed() -> tuple[int, int]:
    """The installed vLLM's release, or the newest the recipes know where none is installed."""
    from overlay.recipes import boxes
    from overlay.recipes.declare import RELEASES
    from overlay.sources import VllmSources

    sources = VllmSources.find()
    return boxes.parse_release(sources.version) if sources else RELEASES[-1]


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
