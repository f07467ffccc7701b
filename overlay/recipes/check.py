"""Whether the installed vLLM takes a recipe: its parser, its parsers' names, its variables, and its own plan."""

import ast
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay.attention.choice import BACKEND_NAME
from overlay.recipes.boxes import parse_release
from overlay.recipes.declare import Recipe, RecipeError, Release, Setting
from overlay.recipes.lines import launch, with_ray
from overlay.rehearsal import driver
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
    findings = [*_accepted(recipe, release), *_names(recipe, release, sources)]
    column = rehearse(recipe, release, model, progress)
    return [*findings, *_plan(recipe, column)]


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
    from overlay.rehearsal import columns

    chosen = recipe.flags_for(release)
    flags = [s for s in chosen if not s.text.startswith("--tensor-parallel-size")]
    given = dict(s.text.split("=", 1) for s in recipe.environment_for(release) if s.text.startswith("VLLM_"))
    given.pop("VLLM_HOST_IP", None)  # an address of the real node
    question = columns.Question(
        model=model or GEOMETRY,
        capability=recipe.capability,
        tp=recipe.gpus,
        flags=arguments(flags),
        memory=int(recipe.memory * columns.GIB),
    )
    return columns.ask(question, progress, columns=("overlay",), base={**os.environ, **given})["overlay"]


def _plan(recipe: Recipe, column: dict[str, Any]) -> Iterator[Finding]:
    """What the rehearsal must have come to."""
    failure = column["failure"]
    told = f"stopped at {failure['stage']}: {failure['error']}" if failure else "every stage up to the weights"
    yield Finding("boots", column["boots"], told)
    if "attention_backend" in column:
        backend = column["attention_backend"]
        dtype = column.get("kv_cache_dtype", "?")
        yield Finding("attention backend", backend == BACKEND_NAME, f"{backend}, KV {dtype}")
    if "moe_backend" in column:
        yield Finding("experts", column["moe_quantization"] != "NVFP4", f"{column['moe_backend']}")
    if "kv_tokens" in column:
        longest = column["max_model_len"]
        detail = f"{column['kv_tokens']:,} tokens in blocks of {column['block_size']:,}, max_model_len {longest:,}"
        yield Finding("KV cache", column["kv_tokens"] >= longest, detail)
