"""docs/recipes.md, generated from the data."""

from collections.abc import Iterable, Sequence

from overlay.recipes.boxes import MODEL, RECIPES, TAKEOVER
from overlay.recipes.declare import Recipe, Release, Setting, dotted
from overlay.recipes.lines import launch, memory_lines, reports_text, with_ray

SHOWN: tuple[Release, ...] = ((0, 30), (0, 31), (0, 33))
NEWEST = SHOWN[-1]

HEAD = f"""\
# Recipes

<!-- Written by `python -m overlay recipe --page docs/recipes.md`; edit overlay/recipes/ and run that again. -->

Launch lines for `{MODEL}` on the boxes people have.
`python -m overlay recipe NAME` prints one for the installed vLLM, `--vllm 0.30` for another, and `--check` lets the
installed vLLM take it without a GPU: its argument parser, its tables of parser names and variables, its backend
selection and its KV cache planner.

What is known and what is not:

- The settings come from what others reported and from vLLM's own code. **No figure on this page was measured with this
  overlay**: how its kernel and vLLM's native one compare on 12.x is unmeasured until somebody with such a card runs
  `python -m overlay bench` and `python -m overlay accept`.
- Every line was given to the argument parsers of vLLM 0.30.0, 0.31.0 and 0.33.0; `recipe NAME --check` rehearses it
  with the installed release.
  The test suite does both for the installed one, for every box.
- The memory sums are arithmetic: 181.3 GiB of weights over the ranks, 3 GiB for activations, CUDA graphs, CUDA, NCCL,
  the rest for the KV cache.
- `--block-size` is in none of them: vLLM resolves it (in 0.33 with fp8 rows, 4,352 tokens at TP 2 and 2,304 at TP 4,
  somewhat more with drafting). On 0.30 and 0.31 the patch `kpool_block_size` sees to it; without the overlay, people
  gave `--block-size 2304` by hand.
- `--moe-backend` is in none of them either: the checkpoint is weight-only, so vLLM takes it for W4A16 and runs Marlin.
  Marlin's remark that the GPU has no native support for FP4 is false on Blackwell and harmless.
- In a container, and over Ray, `PYTHONPATH` must be in the environment of every node before anything starts
  ([install.md](install.md)).
"""


def markdown() -> str:
    """The whole page."""
    parts = [HEAD.rstrip(), takeover()]
    parts += [section(recipe) for recipe in RECIPES.values()]
    return "\n\n".join(parts) + "\n"


def takeover() -> str:
    rows = [(vllm, f"`{dtype}`" if " " not in dtype else dtype, backend) for vllm, dtype, backend in TAKEOVER]
    text = table(("vLLM", "KV dtype asked for", "backend"), rows)
    return f"## Which flags make the overlay's backend the one in use\n\n{text}"


def section(recipe: Recipe) -> str:
    """One box: memory, launch lines for the newest release, what differs for older ones, why, reports, notes."""
    parts = [f"## {recipe.name}: {recipe.title}"]
    parts.append("\n".join(f"- {line}" for line in memory_lines(recipe)))
    parts += [
        f"{where[0].upper()}{where[1:]} (vLLM {dotted(NEWEST)}):\n\n{shell(text)}" for where, text in _steps(recipe)
    ]
    if recipe.nodes > 1:
        ray = with_ray(recipe, NEWEST)
        steps = "\n\n".join(f"# {where}\n{text}" for where, text in ray)
        parts.append(f"<details><summary>With Ray instead</summary>\n\n{shell(steps)}\n\n</details>")
    parts.append(differences(recipe))
    settings = [*recipe.environment, *recipe.flags]
    rows = [(f"`{setting.text}`", _range(setting), setting.why) for setting in settings]
    parts.append(table(("setting", "vLLM", "why"), rows))
    parts.append(reports_text(recipe))
    parts.append("\n".join(f"- {note}" for note in recipe.notes))
    return "\n\n".join(parts)


def _steps(recipe: Recipe) -> list[tuple[str, str]]:
    """Launch steps; the nodes after the second differ in their rank alone."""
    steps = launch(recipe, NEWEST)
    return [*steps[:2], ("on each other node, with its own --node-rank", steps[2][1])] if recipe.nodes > 1 else steps


def differences(recipe: Recipe) -> str:
    """What older releases need instead."""
    newest = {setting.text for setting in [*recipe.environment_for(NEWEST), *recipe.flags_for(NEWEST)]}
    lines = []
    for release in SHOWN[:-1]:
        older = [*recipe.environment_for(release), *recipe.flags_for(release)]
        texts = {setting.text for setting in older}
        more = [f"`{setting.text}`" for setting in older if setting.text not in newest]
        less = [f"`{text}`" for text in sorted(newest - texts)]
        lines.append(f"- vLLM {dotted(release)}: with {', '.join(more) or 'nothing more'}; without {', '.join(less)}")
    return "\n".join(lines)


def _range(setting: Setting) -> str:
    if setting.since and setting.before:
        return f"{dotted(setting.since)} to before {dotted(setting.before)}"
    if setting.since:
        return f"{dotted(setting.since)} and newer"
    return f"before {dotted(setting.before)}" if setting.before else "all"


def shell(text: str) -> str:
    return f"```sh\n{text}\n```"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", f"|{' --- |' * len(headers)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)])
