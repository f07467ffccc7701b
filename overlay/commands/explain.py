"""A patch's declaration in words."""

import argparse
import json
import textwrap

from overlay import registry
from overlay.config import nearest
from overlay.declare import Option, Patch
from overlay.errors import OverlayError

HELP = "why a patch exists, how it works, its options, and when it goes away"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patch", metavar="ID", help="a patch id, as `python -m overlay status` lists them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    patches = {patch.id: patch for patch in registry.declarations()}
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
            {"name": o.name, "type": type_name(o), "default": o.default, "choices": list(o.choices), "doc": o.doc}
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
        lines = [f"    {o.name} ({type_name(o)}, default {o.default!r}): {o.doc}" for o in patch.options]
        paragraphs.append("options:\n" + "\n".join(lines))
    return "\n\n".join(paragraphs)


def type_name(option: Option) -> str:
    types = option.type if isinstance(option.type, tuple) else (option.type,)
    return " or ".join(kind.__name__ for kind in types)
