"""Which modules vLLM builds quantised, and whether the checkpoint stores them so.

A configuration names modules as the checkpoint does; vLLM matches those names against its own modules, which are
renamed (`model.language_model.` becomes `language_model.model.`) and fused (q, k, v, b, f_a and g_a of a
linear-attention layer are one `in_proj_qkvbfg_a`). The rules below are those of vLLM 0.33.0 (`is_layer_skipped`,
`is_layer_excluded` of modelopt.py, `find_matching_patterns` of config_utils.py); a test holds them against the
installed release.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch, fnmatchcase

from overlay.checkpoint import audit_modules as kinds
from overlay.checkpoint.audit_config import ALGORITHMS, W4A16, QuantConfig, Scheme, architecture
from overlay.checkpoint.audit_modules import Module

# Fused module -> the checkpoint's modules, the first set that is there in full.
FUSIONS = {
    "in_proj_qkvbfg_a": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "wk_weights_proj": ("wk", "weights_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
RENAMED = {
    "model.language_model.": "language_model.model.",
    "model.visual.": "visual.",
    "lm_head.": "language_model.lm_head.",
}


class Conflict(Exception):
    """vLLM raises for this module: its configuration treats parts of one fused module differently."""


@dataclass(frozen=True)
class Family:
    """How vLLM builds one architecture.

    `renames`: names are mapped as above. `packed`: the fusions that its quantisation support knows of. `plain`: kinds
    that are built unquantised whatever the configuration says.
    """

    renames: bool
    packed: Mapping[str, tuple[str, ...]]
    plain: frozenset[str]


@dataclass(frozen=True)
class Runtime:
    """A module as vLLM builds it, with the checkpoint's modules that are loaded into it."""

    name: str
    kind: str
    mtp: bool
    members: tuple[Module, ...]

    @property
    def layer(self) -> int | None:
        return self.members[0].layer


def family(config: Mapping) -> Family:
    """The architecture named by config.json. Other families than glm5_next are taken to know every fusion they have."""
    plain = {kinds.ROUTER, kinds.EMBEDDING, kinds.OTHER, kinds.INDEXER}
    renames = isinstance(config.get("text_config"), Mapping)
    if architecture(config).startswith("Glm5Next"):
        # models/glm5next/common/model.py and kda.py: attention, vision and router get no quantisation configuration.
        plain |= {kinds.ATTENTION, kinds.LINEAR_ATTENTION, kinds.VISION}
        return Family(renames, {"gate_up_proj": FUSIONS["gate_up_proj"]} if renames else {}, frozenset(plain))
    return Family(renames, FUSIONS, frozenset(plain))


def runtime_modules(modules: Iterable[Module], model: Family) -> list[Runtime]:
    """What vLLM builds from the checkpoint's matrices: fused, and all experts of a layer as one module."""
    matrices = [module for module in modules if module.matrix]
    present = {module.name for module in matrices}
    members: dict[tuple[str, str, bool], list[Module]] = {}
    for module in matrices:
        members.setdefault((_runtime_name(module, present, model), module.kind, module.mtp), []).append(module)
    return [Runtime(name, kind, mtp, tuple(group)) for (name, kind, mtp), group in members.items()]


def _runtime_name(module: Module, present: Collection[str], model: Family) -> str:
    name = module.name
    if module.kind == kinds.ROUTED:
        name = re.sub(r"\.(experts\.\d+\.\w+|experts\.\w+|(gate|up|down)_proj)$", ".experts", name)
    else:
        parent, _, last = name.rpartition(".")
        name = next(
            (
                f"{parent}.{fused}"
                for fused, parts in FUSIONS.items()
                if last in parts and all(f"{parent}.{part}" in present for part in parts)
            ),
            name,
        )
    if module.mtp:
        # The draft layer is a text model of its own, without the outer model's prefix (common/mtp.py).
        return name.replace("model.language_model.", "model.", 1)
    return rename(name) if model.renames else name


def rename(name: str) -> str:
    """vLLM's name of a module of a vision-language checkpoint."""
    padded = f"{name}."
    old = next((old for old in RENAMED if padded.startswith(old)), None)
    return name if old is None else (RENAMED[old] + padded[len(old) :]).removesuffix(".")


def exclusions(config: QuantConfig, model: Family) -> tuple[str, ...]:
    """The exclusion list as vLLM keeps it: `x*` split into `x` and `x.*` for ModelOpt, then renamed."""
    entries: list[str] = []
    for entry in config.exclude:
        split = config.method == "modelopt" and len(entry) >= 2 and entry[-1] == "*" and entry[-2] != "."
        entries += [entry[:-1], f"{entry[:-1]}.*"] if split and model.renames else [entry]
    return tuple(map(rename_entry, entries)) if model.renames else tuple(entries)


def rename_entry(entry: str) -> str:
    """An entry of an exclusion list or map, renamed as vLLM does; `re:` patterns stay."""
    if entry.startswith("re:"):
        return entry
    old = next((old for old in RENAMED if entry.startswith(old)), None)
    return entry if old is None else RENAMED[old] + entry[len(old) :]


def built(config: QuantConfig, module: Runtime, model: Family, entries: Sequence[str]) -> Scheme | None:
    """The scheme vLLM gives a module, None for unquantised; `entries` come from `exclusions`. Raises Conflict."""
    if module.kind in model.plain:
        return None
    experts = module.kind == kinds.ROUTED
    if config.method == "modelopt":
        if excluded_by(module.name, entries, model.packed):
            return None
        if config.layers:
            return _listed(config, module, model)
        if re.search("vision_tower|vision_model|vit_large_projector", module.name):
            return None
        return W4A16 if config.promoted and config.algorithm == "NVFP4" else ALGORITHMS.get(config.algorithm)
    if config.method in ("compressed-tensors", "quark"):
        names = [f"{module.name}.0.{part}" for part in _expert_parts(module)] if experts else [module.name]
        if all(ignored(name, entries, model.packed) for name in names):
            return None
        return next(
            (g.scheme for g in config.groups if not g.targets or _targeted(names, module, g.targets, model)), None
        )
    return None


def excluding_entry(config: QuantConfig, module: Runtime, model: Family, entries: Sequence[str]) -> str | None:
    """The entry of the exclusion list that makes vLLM build a module unquantised, or None."""
    if config.method == "modelopt":
        return excluded_by(module.name, entries, model.packed)
    parent, _, last = module.name.rpartition(".")
    names = [module.name, *(f"{parent}.{part}" for part in model.packed.get(last, ()))]
    names += [f"{module.name}.0.{part}" for part in _expert_parts(module)] if module.kind == kinds.ROUTED else []
    return next((entry for entry in entries if any(matches(name, entry) for name in names)), None)


def excluded_by(name: str, entries: Sequence[str], packed: Mapping[str, Sequence[str]]) -> str | None:
    """ModelOpt: the entry that makes vLLM build `name` unquantised, or None. Raises Conflict.

    Three rules in this order: the exact name (of a fused module, all of its parts), the entry anywhere inside the name,
    the entry as a glob. The second is why `mlp.gate` also excludes `mlp.gate_up_proj`.
    """
    parent, _, last = name.rpartition(".")
    if name in entries:
        return name
    if last in packed:
        parts = [f"{parent}.{part}" for part in packed[last]]
        listed = [part for part in parts if part in entries]
        if listed and len(listed) < len(parts):
            raise Conflict(f"the exclusion list names {len(listed)} of the {len(parts)} parts of {last}")
        if listed:
            return listed[0]
    elif "experts" in name and (
        found := next((entry for entry in entries if "experts" in entry and name in entry), None)
    ):
        return found
    short = name.removeprefix("language_model.")
    inside = next((entry for entry in entries if entry in name or entry in short), None)
    return inside or next((entry for entry in entries if fnmatch(name, entry)), None)


def _listed(config: QuantConfig, module: Runtime, model: Family) -> Scheme | None:
    """Scheme from ModelOpt's per-layer map. Raises Conflict where the parts of a fused module differ."""
    parent, _, last = module.name.rpartition(".")
    names = {rename_entry(key) if model.renames else key: scheme for key, scheme in config.layers.items()}
    aliases = [module.name, module.name.replace("language_model.lm_head", "lm_head")]
    if module.mtp and model.renames:
        aliases.append(module.name.replace("model.", "language_model.model.", 1))
    found = next((names[alias] for alias in aliases if alias in names), None)
    if found is None and last in FUSIONS:
        parts = {part: names[f"{parent}.{part}"] for part in FUSIONS[last] if f"{parent}.{part}" in names}
        if len(set(parts.values())) > 1:
            raise Conflict(", ".join(f"{part} is listed as {scheme}" for part, scheme in parts.items()))
        found = next(iter(parts.values()), None)
    if found is None and last == "experts":
        # Exporters list either the experts or, below their parent, the stacked projections.
        below = [key for key in names if key.startswith((f"{module.name}.", f"{parent}."))]
        found = names[sorted(below, key=lambda key: not key.startswith(f"{module.name}."))[0]] if below else None
    # A linear module with an algorithm that vLLM does not know is built unquantised.
    return found if found is None or found.known else None


def ignored(name: str, entries: Sequence[str], packed: Mapping[str, Sequence[str]]) -> bool:
    """compressed-tensors and Quark: equal, or a `re:` pattern that matches; fused modules by their parts."""
    if any(matches(name, entry) for entry in entries):
        return True
    parent, _, last = name.rpartition(".")
    if last not in packed:
        return False
    ignored = [any(matches(f"{parent}.{part}", entry) for entry in entries) for part in packed[last]]
    if any(ignored) and not all(ignored):
        raise Conflict(f"the exclusion list names {sum(ignored)} of the {len(ignored)} parts of {last}")
    return all(ignored)


def matches(name: str, entry: str) -> bool:
    """compressed-tensors and Quark: equal, or a `re:` pattern that matches from the start."""
    if not entry.startswith("re:"):
        return name == entry
    try:
        return re.match(entry[3:], name) is not None
    except re.error:  # audit_claims says so
        return False


def _targeted(names: Sequence[str], module: Runtime, targets: Sequence[str], model: Family) -> bool:
    """Does a group target the module: by name, by all parts of a fused one, or by the class name `Linear`?"""
    if module.kind != kinds.HEAD and any(target.lower() == "linear" for target in targets):
        return True
    for name in names:
        parent, _, last = name.rpartition(".")
        parts = [f"{parent}.{part}" for part in model.packed.get(last, ())]
        by_name = any(matches(name, target) for target in targets)
        by_parts = bool(parts) and all(any(matches(part, target) for target in targets) for part in parts)
        if not (by_name or by_parts):
            return False
    return True


def _expert_parts(module: Runtime) -> list[str]:
    """`gate_proj`, `up_proj`, `down_proj`, or w1, w2, w3: as the checkpoint calls them."""
    return sorted({member.name.rpartition(".")[2] for member in module.members})


def meant_to_be_excluded(module: Module, config: QuantConfig) -> bool:
    """The exporter's reading of its list: a glob (or `re:` pattern) over the checkpoint's names, or a whole parent."""
    ancestors = module.name.split(".")
    names = [".".join(ancestors[:end]) for end in range(1, len(ancestors) + 1)]
    return any(
        matches(module.name, entry) if entry.startswith("re:") else any(fnmatchcase(name, entry) for name in names)
        for entry in config.exclude
    )
