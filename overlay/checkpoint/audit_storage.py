"""What vLLM builds from the configuration, against what the tensors are."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from overlay.checkpoint import audit_modules as kinds
from overlay.checkpoint.audit_config import UNQUANTISED, QuantConfig, Scheme
from overlay.checkpoint.audit_modules import Module
from overlay.checkpoint.audit_names import (
    ALWAYS_PLAIN,
    Conflict,
    Family,
    Runtime,
    built,
    excluding_entry,
    exclusions,
    matches,
    meant_to_be_excluded,
    rename_entry,
)
from overlay.checkpoint.findings import Finding, counted, info, layers_text, some

# Formats whose packed weights have no place in a module that vLLM builds unquantised. FP8 is left out: the loader of
# this model family converts some FP8 attention weights by itself.
PACKED = {"nvfp4", "mxfp4", "int4", "packed"}
# Formats that tensors can be told by. Others (IQ2, Q8_0, unsigned or six-bit ones) are bytes like any.
TOLD = {"plain", "nvfp4", "mxfp4", "fp8", "mxfp8", "int4", "int8"}
# Kinds that some families build unquantised whatever the list says: vision towers mostly, attention (glm5next), Mamba-1
# (mamba_mixer.py), the head (qwen3_next.py, gpt_oss.py), indexers in part. No error where it is not known.
UNSURE = {kinds.VISION, kinds.ATTENTION, kinds.LINEAR_ATTENTION, kinds.MAMBA, kinds.INDEXER, kinds.HEAD, kinds.OTHER}
# Methods whose rules audit_names knows. vLLM has many more.
JUDGED = ("modelopt", "compressed-tensors", "quark")


@dataclass(frozen=True)
class Planned:
    """A module as vLLM builds it, with its scheme (None: unquantised)."""

    runtime: Runtime
    scheme: Scheme | None


@dataclass(frozen=True)
class _Fault:
    """One module's fault. Equal faults of several layers become one finding."""

    check: str
    severity: str
    subject: str
    what: str
    consequence: str
    cure: str
    layer: int | None


def plan(config: QuantConfig | None, runtime: Iterable[Runtime], model: Family) -> tuple[list[Planned], list[Finding]]:
    """Scheme of every module, and findings where that and the tensors, or the configuration and itself, disagree."""
    if config and config.method not in JUDGED:
        return [Planned(module, None) for module in runtime], _other_method(config)
    entries = exclusions(config, model) if config else ()
    planned, faults = [], []
    for module in runtime:
        try:
            scheme = built(config, module, model, entries) if config else None
            scheme = None if scheme and scheme.weights == UNQUANTISED else scheme
        except Conflict as conflict:
            faults.append(_conflict(module, conflict))
            continue
        planned.append(Planned(module, scheme))
        faults += _storage_faults(config, module, scheme, model, entries)
    return planned, _merged(faults)


def _storage_faults(
    config: QuantConfig | None, module: Runtime, scheme: Scheme | None, model: Family, entries: Sequence[str]
) -> Iterator[_Fault]:
    stored = Counter(member.format for member in module.members)
    wanted = scheme.weights if scheme else "plain"
    converted = len(stored) == 1 or module.name.endswith(ALWAYS_PLAIN)
    if converted and not PACKED & stored.keys() and model.builds_plain(module):
        return
    if len(stored) > 1:
        yield _siblings(module, stored)
        return
    (form,) = stored
    if form == wanted or (form != "plain" and wanted not in TOLD):
        return
    if (form, wanted) == ("int4", "int8"):  # integers of either width are packed into I32
        return
    if config is None:
        yield _fault(
            module,
            "no_quantisation_config",
            f"stored as {form.upper()}, and neither config.json nor hf_quant_config.json describes a quantisation",
            "vLLM takes the checkpoint for unquantised and stops at the first packed weight",
            "get the quantisation configuration of this export",
        )
    elif model.builds_plain(module):
        where = "this architecture" if model.known else "most architectures"
        yield _fault(
            module,
            "stored_quantised_built_plain",
            f"stored as {form.upper()}; vLLM builds it unquantised in {where}, whatever the list says",
            "loading stops: its scales have no parameter to go to",
            "no patch helps: export this part unquantised",
            unsure=not model.known,
        )
    elif wanted == "plain":
        yield _fault(module, "excluded_but_quantised", *_why_excluded(config, module, model, entries, form))
    elif form == "plain":
        unsure = not model.known and module.kind in UNSURE
        yield _fault(module, "unquantised_but_not_excluded", *_why_included(config, module, wanted), unsure)
    else:
        yield _fault(
            module,
            "format_mismatch",
            f"stored as {form.upper()}, {config.file} says {wanted.upper()}",
            "loading stops at a shape or dtype, or the bytes are read as the wrong format",
            f"correct {config.file}: what is stored decides",
        )


def _other_method(config: QuantConfig) -> list[Finding]:
    """A method with rules of its own. Where none is named, audit_claims says so."""
    if not config.method:
        return []
    return [
        info(
            "method_not_judged",
            f"{config.file} names the quantisation method {config.method}, whose rules are not known here",
            "whether the exclusion list and the tensors agree was not judged",
            "nothing to do: the overlay's patches are for NVFP4 by ModelOpt, compressed-tensors and Quark",
        )
    ]


def _fault(module: Runtime, check: str, what: str, consequence: str, cure: str, unsure: bool = False) -> _Fault:
    if unsure:
        consequence = f"this architecture may do otherwise; if not: {consequence}"
    if module.mtp:
        consequence += " (as soon as MTP is switched on by --speculative-config)"
    severity = "warning" if unsure else "error"
    return _Fault(check, severity, _subject(module), what, consequence, cure, module.layer)


def _conflict(module: Runtime, conflict: Conflict) -> _Fault:
    return _fault(
        module,
        "fused_siblings",
        f"{conflict} ({', '.join(member.name.rpartition('.')[2] for member in module.members)})",
        "vLLM raises ValueError: all shards of a fused layer must have the same precision",
        "list all parts of the fused module, or none",
    )


def _siblings(module: Runtime, stored: Mapping[str, int]) -> _Fault:
    """Modules that vLLM fuses into one and the checkpoint stores in different formats."""
    if module.kind == kinds.ROUTED:
        rare = min(stored, key=lambda form: stored[form])
        odd = [member for member in module.members if member.format == rare]
        experts = {member.expert for member in odd if member.expert is not None}
        where = counted("expert", experts) if experts else ", ".join(sorted(_last(member) for member in odd))
        what = f"{where} stored as {rare}, the others as {', '.join(sorted(set(stored) - {rare}))}"
    else:
        what = ", ".join(f"{_last(member)} is {member.format}" for member in module.members)
    return _fault(
        module,
        "fused_siblings",
        f"{what}: one fused module for vLLM",
        "loading stops at a shape, or some parts are never loaded",
        "no patch helps: export all parts in the same format",
    )


def _why_excluded(
    config: QuantConfig, module: Runtime, model: Family, entries: Sequence[str], form: str
) -> tuple[str, str, str]:
    stored = f"stored as {form.upper()}"
    consequence = "vLLM builds it unquantised and loading stops: the packed weights do not fit"
    entry = excluding_entry(config, module, model, entries)
    if entry and not any(meant_to_be_excluded(member, config) for member in module.members):
        what = f"{stored}; the exclusion entry {_quoted(entry)} is meant for another module, but vLLM finds it inside"
        cure = f"write the entry so that it fits its own module only, or export {_last(module.members[0])} unquantised"
        return f"{what} {_starred(module.name)}", consequence, cure
    if entry:
        return (
            f"{stored}; the exclusion list names it",
            consequence,
            f"take {_quoted(entry)} off the list in {config.file}",
        )
    if config.layers:
        listed = next((config.layers[member.name] for member in module.members if member.name in config.layers), None)
        said = f"lists it as {listed}, which vLLM does not know" if listed else "does not list it in quantized_layers"
        return f"{stored}; {config.file} {said}", consequence, "list it in quantized_layers with what it is stored as"
    return f"{stored}; no group targets it", consequence, f"correct the targets in {config.file}"


def _why_included(config: QuantConfig, module: Runtime, wanted: str) -> tuple[str, str, str]:
    if wanted == "nvfp4":
        consequence = "vLLM builds it as NVFP4; loading stops at a shape, or its scales are never loaded"
    else:
        consequence = f"vLLM builds it as {wanted.upper()} and loading stops or its scales are never loaded"
    if all(meant_to_be_excluded(member, config) for member in module.members):
        names = ", ".join(sorted({_last(member) for member in module.members}))
        what = f"stored unquantised; the exclusion list covers {names}, but not vLLM's name: {_starred(module.name)}"
    else:
        what = "stored unquantised, and nothing on the exclusion list covers it"
    entry = _starred(module.name)
    if config.method != "modelopt" and entry != module.name:
        entry = f"re:{re.escape(module.name)}$".replace(rf"layers\.{module.layer}\.", r"layers\.\d+\.")
    return what, consequence, f"add {entry!r} to the exclusion list in {config.file}"


def idle_entries(
    config: QuantConfig | None, modules: Sequence[Module], runtime: Sequence[Runtime], model: Family
) -> list[Finding]:
    """Entries of the exclusion list that fit nothing in the checkpoint: a spelling that was meant for something."""
    if config is None or not modules:
        return []
    names = {module.name for module in modules} | {module.name for module in runtime}
    # Fused modules under the checkpoint's prefix: a list may name what vLLM builds in the checkpoint's words.
    fused = ((module.members[0].name.rpartition(".")[0], module.name.rpartition(".")[2]) for module in runtime)
    names |= {f"{parent}.{last}" for parent, last in fused}
    text = "\n".join(sorted(names))
    # Under the checkpoint's names, or as vLLM renames the entry.
    idle = [
        entry
        for entry in config.exclude
        if not any(_fits_any(form, names, text) for form in (entry, rename_entry(entry) if model.renames else entry))
    ]
    if not idle:
        return []
    return [
        info(
            "idle_exclusions",
            f"{len(idle)} entries of the exclusion list fit no module here: {some(idle)}",
            "none, unless such an entry was meant for a module that is stored unquantised",
            "compare with the findings on unquantised modules",
        )
    ]


def _fits_any(entry: str, names: Iterable[str], text: str) -> bool:
    if entry.startswith("re:"):
        return any(matches(name, entry) for name in names)
    # `x.*` is meant for everything below x; the stars inside stand for one or more components.
    pattern = ".*".join(re.escape(part) for part in entry.removesuffix("*").removesuffix(".").split("*"))
    return re.search(pattern, text) is not None


def _merged(faults: Iterable[_Fault]) -> list[Finding]:
    """One finding for the same fault in many layers."""
    groups: dict[tuple, list[int | None]] = {}
    for fault in faults:
        key = (fault.check, fault.severity, fault.subject, fault.what, fault.consequence, fault.cure)
        groups.setdefault(key, []).append(fault.layer)
    found = []
    for (check, severity, subject, what, consequence, cure), layers in groups.items():
        found.append(Finding(check, severity, f"{subject}{layers_text(layers)}: {what}", consequence, cure))
    return found


def _subject(module: Runtime) -> str:
    last = module.name.rpartition(".")[2]
    return f"{f'{kinds.MTP}, ' if module.mtp else ''}{module.kind}" + ("" if last == "experts" else f" ({last})")


def _starred(name: str) -> str:
    return re.sub(r"(layers\.)\d+(?=\.)", r"\1*", name)


def _quoted(entry: str) -> str:
    """An entry of an exclusion list; literal names of several layers as one, patterns as they are."""
    return repr(entry if entry.startswith("re:") else _starred(entry))


def _last(module: Module) -> str:
    return module.name.rpartition(".")[2]
