"""A patch's declaration in words."""

import argparse
import json
import textwrap
from collections.abc import Iterable

from overlay import registry
from overlay.config import nearest
from overlay.declare import Option, Patch
from overlay.errors import OverlayError
from overlay.table import table

HELP = "why a patch exists, how it works, its options, and when it goes away"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patch", metavar="ID", nargs="?", help="a patch id (default: list them)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of text")
    form.add_argument("--markdown", action="store_true", help="print docs/patches.md: every patch's declaration")


def run(options: argparse.Namespace) -> int:
    patches = {patch.id: patch for patch in registry.declarations()}
    if options.markdown:
        print(as_markdown(patches.values()))
        return 0
    if options.patch is None:
        every = patches.values()
        listed = table(("patch", "what it cures"), ((patch.id, patch.title) for patch in every))
        print(json.dumps({"patches": [as_json(patch) for patch in every]}, indent=2) if options.json else listed)
        return 0
    if options.patch not in patches:
        raise OverlayError(f"{options.patch!r} is not a patch{nearest(options.patch, patches)}")
    patch = patches[options.patch]
    print(json.dumps(as_json(patch), indent=2) if options.json else as_text(patch))
    return 0


def as_json(patch: Patch) -> dict[str, object]:
    return {
        "id": patch.id,
        "title": patch.title,
        "why": patch.why,
        "how": patch.how,
        "until": patch.until,
        "default": patch.default,
        "upstream": list(patch.upstream),
        "targets": [str(target) for target in patch.targets],
        "options": [
            {
                "name": o.name,
                "type": type_name(o),
                "default": o.default,
                "choices": list(o.choices),
                "limits": o.limits,
                "doc": o.doc,
            }
            for o in patch.options
        ],
    }


def as_text(patch: Patch) -> str:
    paragraphs = [f"{patch.id}: {patch.title}"]
    for label, text in (("why", patch.why), ("how", patch.how), ("until", patch.until)):
        paragraphs.append(textwrap.fill(f"{label}: {' '.join(text.split())}", 100, subsequent_indent="    "))
    paragraphs.append("targets:\n" + "\n".join(f"    {target}" for target in patch.targets))
    if patch.upstream:
        paragraphs.append("upstream: " + ", ".join(patch.upstream))
    paragraphs.append(
        f"default: enabled = {patch.default if isinstance(patch.default, str) else str(patch.default).lower()}"
    )
    if patch.options:
        lines = [f"    {o.name} ({type_and_limits(o)}, default {o.default!r}): {o.doc}" for o in patch.options]
        paragraphs.append("options:\n" + "\n".join(lines))
    return "\n\n".join(paragraphs)


def as_markdown(patches: Iterable[Patch]) -> str:
    """docs/patches.md. The README's table has the same titles; a test holds both against the declarations."""
    patches = list(patches)
    lines = [
        "# Patches",
        "",
        "Written by `python -m overlay explain --markdown` from the declarations in `overlay/patches/`.",
        "",
        *summary_table(patches),
    ]
    for patch in patches:
        lines += [
            "",
            f"## {patch.id}",
            "",
            f"**Fault.** {_one_line(patch.why)}",
            "",
            f"**Cure.** {_one_line(patch.how)}",
        ]
        lines += ["", f"**Until.** {_one_line(patch.until)}"]
        if patch.upstream:
            lines += ["", f"**Upstream.** {', '.join(patch.upstream)}"]
        lines += ["", "**Targets.** " + ", ".join(f"`{target}`" for target in patch.targets)]
        if patch.options:
            lines += ["", "| option | type | default | meaning |", "| --- | --- | --- | --- |"]
            lines += [
                f"| `{o.name}` | {type_and_limits(o)} | `{o.default!r}` | {_cell(o.doc)} |" for o in patch.options
            ]
    return "\n".join(lines)


def summary_table(patches: Iterable[Patch]) -> list[str]:
    """Rows of patch, default and what it cures."""
    rows = [f"| `{patch.id}` | {_default(patch)} | {_cell(patch.title)} |" for patch in patches]
    return ["| patch | default | what it cures |", "| --- | --- | --- |", *rows]


def _default(patch: Patch) -> str:
    return {False: "off", True: "on"}.get(patch.default, patch.default)


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def type_name(option: Option) -> str:
    types = option.type if isinstance(option.type, tuple) else (option.type,)
    return " or ".join(kind.__name__ for kind in types)


def type_and_limits(option: Option) -> str:
    """`float from 0 to 1024`."""
    limits = " from {:g} to {:g}".format(*option.limits) if option.limits else ""
    return type_name(option) + limits
