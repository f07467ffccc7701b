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
# Built in 16 bits by every model that has it (deepseek_v2.py, deepseek_v32, hy_v4, glm5next): an FP8 `wk` is converted
# while it is loaded, and fused with a 16-bit `weights_proj`.
ALWAYS_PLAIN = ".indexer.wk_weights_proj"
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

    `known`: its classes were read, so that `plain` is certain and complete. `renames`: names are mapped as above.
    `packed`: the fusions that its quantisation support knows of. `plain`: kinds that are built unquantised whatever
    the configuration says.
    """

    known: bool
    renames: bool
    packed: Mapping[str, tuple[str, ...]]
    plain: frozenset[str]

    def builds_plain(self, module: "Runtime") -> bool:
        """Is the module built unquantised whatever the configuration says?"""
        return module.kind in self.plain or module.name.endswith(ALWAYS_PLAIN)


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
    """The architecture named by config.json.

    Other families than glm5_next are taken to know every fusion they have, and to build embeddings and routers
    unquantised, as most do. Indexers (deepseek_v2.py) and what the table of kinds has no name for (nemotron_h.py) get
    the quantisation configuration in some of them.
    """
    renames = isinstance(config.get("text_config"), Mapping)
    if architecture(config).startswith("Glm5Next"):
        # models/glm5next/common/model.py and kda.py: these get no quantisation configuration.
        attention = {kinds.ATTENTION, kinds.LINEAR_ATTENTION, kinds.INDEXER}
        plain = frozenset({kinds.ROUTER, kinds.EMBEDDING, kinds.OTHER, kinds.VISION} | attention)
        return Family(True, renames, {"gate_up_proj": FUSIONS["gate_up_proj"]} if renames else {}, plain)
    return Family(False, renames, FUSIONS, frozenset({kinds.EMBEDDING, kinds.ROUTER}))


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
    if model.builds_plain(module):
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
    if config.method == "quark":
        return _by_quark(config, module, model, entries)
    if config.method == "compressed-tensors":
        names = [f"{module.name}.0.{part}" for part in _expert_parts(module)] if experts else [module.name]
        if all(ignored(name, entries, model.packed) for name in names):
            return None
        # Targets that name modules go before those that name a class, whatever the order of the groups.
        by_name = (g.scheme for g in config.groups if _named(names, g.targets, model))
        linears = (g.scheme for g in config.groups if any(target.lower() == "linear" for target in g.targets))
        return next(by_name, next(linears, None) if module.kind != kinds.HEAD else None)
    return None


def _by_quark(config: QuantConfig, module: Runtime, model: Family, entries: Sequence[str]) -> Scheme | None:
    """Quark's own rules (quark.py): one literal child of the experts on the list stands for all of them, the output
    head is always built unquantised, and `layer_quant_config` goes before `global_quant_config`."""
    if module.kind == kinds.HEAD or child_listed(module, entries) or ignored(module.name, entries, model.packed):
        return None
    parent, _, last = module.name.rpartition(".")
    shards = [f"{parent}.{part}" for part in model.packed.get(last, ())] or [module.name]
    found = {next((g.scheme for g in config.groups if _quark_fits(shard, g.targets, model)), None) for shard in shards}
    if len(found) > 1:
        raise Conflict(f"layer_quant_config treats the parts of {last} differently")
    return found.pop()


def child_listed(module: Runtime, entries: Sequence[str]) -> str | None:
    """The first literal entry for a routed expert of the module, or None."""
    children = f"{module.name}."
    return next((entry for entry in entries if module.kind == kinds.ROUTED and entry.startswith(children)), None)


def _quark_fits(name: str, patterns: Sequence[str], model: Family) -> bool:
    """A pattern without a star fits every name that stands inside it; no patterns at all fit everything."""
    renamed = map(rename_entry, patterns) if model.renames else patterns
    return not patterns or any(fnmatch(name, p) if "*" in p else name in p for p in renamed)


def excluding_entry(config: QuantConfig, module: Runtime, model: Family, entries: Sequence[str]) -> str | None:
    """The entry of the exclusion list that makes vLLM build a module unquantised, or None."""
    if config.method == "modelopt":
        return excluded_by(module.name, entries, model.packed)
    parent, _, last = module.name.rpartition(".")
    names = [module.name, *(f"{parent}.{part}" for part in model.packed.get(last, ()))]
    names += [f"{module.name}.0.{part}" for part in _expert_parts(module)] if module.kind == kinds.ROUTED else []
    found = next((entry for entry in entries if any(matches(name, entry) for name in names)), None)
    return found or (child_listed(module, entries) if config.method == "quark" else None)


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


def _named(names: Sequence[str], targets: Sequence[str], model: Family) -> bool:
    """Does a group of compressed-tensors target the module by name, or by the names of all parts of a fused one?"""
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
