"""A recipe as something to paste into a shell, and as the tables that say why."""

from collections.abc import Iterable, Sequence

from overlay.recipes.boxes import MODEL
from overlay.recipes.declare import Recipe, Release, Setting, dotted
from overlay.recipes.memory import DRAFT_GIB, WHOLE_GIB, budget
from overlay.table import table


def export(settings: Iterable[Setting]) -> list[str]:
    return [f"export {setting.text}" for setting in settings]


def serve(recipe: Recipe, release: Release, *extra: str, model: str = MODEL) -> str:
    """One `vllm serve` command over several lines."""
    flags = [setting.text for setting in recipe.flags_for(release)]
    return " \\\n    ".join((f"vllm serve {model}", *flags, *extra))


def launch(recipe: Recipe, release: Release, model: str = MODEL) -> list[tuple[str, str]]:
    """What to type where, in order: (where, shell lines)."""
    exports = "\n".join(export(recipe.environment_for(release)))
    if recipe.nodes == 1:
        return [("in one shell", f"{exports}\n{serve(recipe, release, model=model)}")]
    nodes = [f"--nnodes {recipe.nodes}", "--node-rank {rank}", "--master-addr $HEAD"]
    head = [part.format(rank=0) for part in nodes]
    steps = [
        (
            "on every node first (FABRIC: the interface between them, ADDRESS: this node's, HEAD: the first node's)",
            exports,
        ),
        ("on the first node", serve(recipe, release, *head, model=model)),
    ]
    for rank in range(1, recipe.nodes):
        others = [part.format(rank=rank) for part in nodes]
        steps.append((f"on node {rank + 1}", serve(recipe, release, *others, "--headless", model=model)))
    return steps


def with_ray(recipe: Recipe, release: Release, model: str = MODEL) -> list[tuple[str, str]]:
    """The same over Ray, whose workers have the environment that `ray start` was given and no other."""
    exports = "\n".join(export(recipe.environment_for(release)))
    return [
        ("on the first node", f"{exports}\nray start --head --node-ip-address $ADDRESS --port 6379"),
        ("on every other node", f"{exports}\nray start --address $HEAD:6379 --node-ip-address $ADDRESS"),
        ("then on the first", serve(recipe, release, "--distributed-executor-backend ray", model=model)),
    ]


def memory_lines(recipe: Recipe) -> list[str]:
    """The sum for one GPU, with the KV types side by side."""
    return [
        f"fp8 rows: {budget(recipe)}",
        f"bf16 rows: {_tokens(recipe, 'bfloat16')}; vLLM's own fp8_ds_mla rows: {_tokens(recipe, 'fp8_ds_mla')}",
        f"card: {recipe.memory:g} GiB ({recipe.memory_source}); weights: {_weights(recipe)}",
    ]


def _weights(recipe: Recipe) -> str:
    whole = f"181.3 GiB over {recipe.gpus} ranks, of which {WHOLE_GIB} GiB are on each"
    return whole if recipe.draft_tokens else f"{whole}, without the {DRAFT_GIB} GiB of the draft layer"


def _tokens(recipe: Recipe, kv_cache_dtype: str) -> str:
    found = budget(recipe, kv_cache_dtype)
    return f"{found.tokens:,} tokens of {found.token_bytes:,} bytes"


def as_text(recipe: Recipe, release: Release, model: str = MODEL) -> str:
    """Everything about one recipe for one vLLM."""
    parts = [f"{recipe.name}: {recipe.title}, vLLM {dotted(release)}", "\n".join(memory_lines(recipe))]
    parts += [f"# {where}\n{text}" for where, text in launch(recipe, release, model)]
    if recipe.nodes > 1:
        ray = "\n".join(f"# {where}\n{text}" for where, text in with_ray(recipe, release, model)[:2])
        parts.append(
            f"With Ray in place of --nnodes, --node-rank and --master-addr:\n{ray}\n"
            "# then on the first node the same vllm serve with --distributed-executor-backend ray"
        )
    settings = [*recipe.environment_for(release), *recipe.flags_for(release)]
    parts.append(table(("setting", "why"), ((setting.text, setting.why) for setting in settings)))
    parts.append(reports_text(recipe))
    parts.append("\n".join(f"- {note}" for note in recipe.notes))
    parts.append(f"Afterwards: python -m overlay accept --url http://localhost:8000 --json {recipe.name}.json")
    return "\n\n".join(parts)


def reports_text(recipe: Recipe) -> str:
    """What others reported, or that nobody did."""
    if not recipe.reports:
        return "Nobody's figures for this box are known, and nothing was measured on it here."
    lines = [f"- {report.figure}: {report.setup} ({report.by}; {report.when})" for report in recipe.reports]
    return "\n".join(("Reported by others with their own kernels, not measured again with this overlay:", "", *lines))


def as_json(recipe: Recipe, release: Release, model: str = MODEL) -> dict[str, object]:
    """The shape of `recipe NAME --json`."""
    found = budget(recipe)
    return {
        "name": recipe.name,
        "title": recipe.title,
        "vllm": dotted(release),
        "model": model,
        "tensor_parallel_size": recipe.gpus,
        "nodes": recipe.nodes,
        "capability": dotted(recipe.capability),
        "environment": [_setting(setting) for setting in recipe.environment_for(release)],
        "flags": [_setting(setting) for setting in recipe.flags_for(release)],
        "launch": [{"where": where, "lines": text} for where, text in launch(recipe, release, model)],
        "memory": {
            "gib": found.memory,
            "utilization": found.utilization,
            "weights_gib": round(found.weights, 2),
            "allowance_gib": found.allowance,
            "kv_cache_gib": round(found.left, 2),
            "bytes_per_token": found.token_bytes,
            "tokens": found.tokens,
        },
        "reports": [vars(report) for report in recipe.reports],
        "notes": list(recipe.notes),
    }


def _setting(setting: Setting) -> dict[str, str]:
    return {"text": setting.text, "why": setting.why}


def listing(recipes: Sequence[Recipe], takeover: Iterable[Sequence[str]]) -> str:
    """The recipes, and which flags make the overlay's backend the one in use."""
    rows = [(r.name, f"TP {r.gpus}", f"{budget(r).left:.1f} GiB", f"{budget(r).tokens:,}", r.title) for r in recipes]
    return "\n\n".join(
        (
            table(("recipe", "ranks", "left for KV", "tokens (fp8)", "box"), rows),
            table(("vLLM", "KV dtype asked for", "backend"), takeover),
            "python -m overlay recipe NAME [--vllm 0.30] [--check]",
        )
    )
