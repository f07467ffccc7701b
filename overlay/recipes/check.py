"""Whether the installed vLLM takes a recipe: its parser, its parsers' names, its variables, and its own plan."""

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay.attention.choice import BACKEND_NAME
from overlay.recipes.boxes import parse_release
from overlay.recipes.declare import Recipe, RecipeError, Release, Setting
from overlay.recipes.lines import launch, with_ray
from overlay.rehearsal import columns, driver
from overlay.sources import VllmSources

ROOT = Path(__file__).resolve().parent.parent.parent
GEOMETRY = Path(__file__).with_name("glm53-flash.json")

# Flag -> the module of vLLM whose table lists the names it takes.
NAME_TABLES = {
    "--tool-call-parser": ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "--reasoning-parser": ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str


def check(recipe: Recipe, model: Path | None, progress: Callable[[str], None] = lambda line: None) -> list[Finding]:
    """Everything a boot would stumble over, by the installed vLLM's own code. The release is the installed one.

    `model` is a checkpoint's folder; without one the published geometry stands in. Raises RecipeError without vLLM.
    """
    sources = VllmSources.find()
    if sources is None:
        raise RecipeError("a recipe is checked against the installed vLLM, and none is installed: pip install vllm")
    release = parse_release(sources.version)
    progress("vLLM's argument parser, for every command line of the recipe")
    findings = [*_accepted(recipe, release), *_names(recipe, release, sources)]
    column = rehearse(recipe, release, model, progress)
    return [*findings, *plan(column, published=model is None)]


def commands(recipe: Recipe, release: Release) -> list[list[str]]:
    """What follows `vllm serve` in every line of the recipe, on every node and over Ray, as a shell would split it."""
    lines = [text for _, text in (*launch(recipe, release), *with_ray(recipe, release))]
    served = [text[text.index("vllm serve") :].replace("\\\n", "") for text in lines if "vllm serve" in text]
    return [[word.replace("$HEAD", "192.0.2.1") for word in shlex.split(text)[2:]] for text in served]


def objections(lines: list[list[str]], capability: tuple[int, int]) -> list[str | None]:
    """For each command line None, or what the installed vLLM's argument parser has against it. Raises RecipeError."""
    env = {**driver.environment(capability), "OVERLAY_DISABLE": "1"}
    path = [str(ROOT), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    command = [sys.executable, "-m", "overlay.recipes.parse"]
    env["PYTHONPATH"] = os.pathsep.join(path)
    done = subprocess.run(command, input=json.dumps(lines), env=env, capture_output=True, text=True)
    if done.returncode:
        raise RecipeError(f"vLLM's argument parser cannot be asked:\n{done.stderr[-1500:].strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def _accepted(recipe: Recipe, release: Release) -> Iterator[Finding]:
    asked = commands(recipe, release)
    against = [objection for objection in objections(asked, recipe.capability) if objection]
    detail = "; ".join(against) or f"{len(asked)} command lines taken by vLLM's own argument parser"
    yield Finding("flags", not against, detail)


def arguments(settings: list[Setting]) -> list[str]:
    """Flags as a shell would split them."""
    return [word for setting in settings for word in shlex.split(setting.text)]


def _names(recipe: Recipe, release: Release, sources: VllmSources) -> Iterator[Finding]:
    """The names that vLLM looks up only when it serves, read from its sources."""
    words = arguments(recipe.flags_for(release))
    for flag, (module, name) in NAME_TABLES.items():
        if flag in words:
            value, known = words[words.index(flag) + 1], _keys(sources, module, name)
            yield Finding(f"{flag} {value}", value in known, f"{module} has {len(known)} names")
    known = _keys(sources, "vllm.envs", "environment_variables")
    for setting in recipe.environment_for(release):
        variable = setting.text.partition("=")[0]
        if variable.startswith("VLLM_"):
            yield Finding(variable, variable in known, f"vllm.envs has {len(known)} variables")


def _keys(sources: VllmSources, module: str, name: str) -> set[str]:
    """Literal keys of a module-level dictionary. Raises RecipeError where there is none by that name."""
    node = sources.definition(module, name)
    value = getattr(node, "value", None)
    if not isinstance(value, ast.Dict):
        raise RecipeError(f"vllm {sources.version}: {module}.{name} is not a table of names any more")
    return {key.value for key in value.keys if isinstance(key, ast.Constant)}


def rehearse(
    recipe: Recipe, release: Release, model: Path | None, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """The overlay's column of a rehearsal with exactly the recipe's environment and flags."""
    with stand_in() if model is None else nullcontext(model) as folder:
        asked, base = question(recipe, release, folder), {**os.environ, **variables(recipe, release)}
        return columns.ask(asked, progress, columns=("overlay",), base=base)["overlay"]


def question(recipe: Recipe, release: Release, model: Path) -> columns.Question:
    """The recipe as a rehearsal takes it: one host with all ranks, whatever the nodes."""
    flags = [s for s in recipe.flags_for(release) if not s.text.startswith("--tensor-parallel-size")]
    memory = int(recipe.memory * columns.GIB)
    return columns.Question(model, recipe.capability, tp=recipe.gpus, flags=arguments(flags), memory=memory)


def variables(recipe: Recipe, release: Release) -> dict[str, str]:
    """vLLM's own variables among the recipe's; an address of a real node means nothing in a rehearsal."""
    pairs = (setting.text.split("=", 1) for setting in recipe.environment_for(release))
    return {name: value for name, value in pairs if name.startswith("VLLM_") and not value.startswith("$")}


@contextmanager
def stand_in() -> Iterator[Path]:
    """A folder with the published geometry and a small tokenizer: vLLM asks that for the thinking tokens' ids."""
    from overlay.checkpoint.tiny_tokenizer import write_tokenizer

    with tempfile.TemporaryDirectory(prefix="overlay-recipe-") as folder:
        shutil.copyfile(GEOMETRY, Path(folder) / "config.json")
        write_tokenizer(Path(folder), 1_048_576)
        yield Path(folder)


def plan(column: dict[str, Any], published: bool) -> Iterator[Finding]:
    """What the rehearsal must have come to; of the `published` checkpoint it is known that its experts are W4A16."""
    failure = column["failure"]
    told = f"stopped at {failure['stage']}: {failure['error']}" if failure else "every stage up to the weights"
    yield Finding("boots", column["boots"], told)
    if "attention_backend" in column:
        backend = column["attention_backend"]
        dtype = column.get("kv_cache_dtype", "?")
        yield Finding("attention backend", backend == BACKEND_NAME, f"{backend}, KV {dtype}")
    if "moe_backend" in column:
        detail = f"{column['moe_backend']}, {column['moe_quantization']}"
        yield Finding("experts", not published or "W4A16" in column["moe_quantization"], detail)
    if "kv_tokens" in column:
        longest = column["max_model_len"]
        detail = f"{column['kv_tokens']:,} tokens in blocks of {column['block_size']:,}, max_model_len {longest:,}"
        yield Finding("KV cache", column["kv_tokens"] >= longest, detail)
