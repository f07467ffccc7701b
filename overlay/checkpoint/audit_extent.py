"""What config.json announces against what the checkpoint has: layers, experts, the draft layer, the vision path."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlay.checkpoint import audit_modules as kinds
from overlay.checkpoint.audit_config import architecture
from overlay.checkpoint.audit_modules import Module, Shape
from overlay.checkpoint.findings import Finding, counted, error, warning


def incomplete(modules: Sequence[Module], extent: Shape) -> list[Finding]:
    """Layers, experts and the draft layer that config.json announces and the checkpoint lacks, and the reverse."""
    found = []
    layers = {
        module.layer
        for module in modules
        if module.layer is not None and not module.mtp and module.kind != kinds.VISION
    }
    missing = set(range(extent.layers or 0)) - layers
    if layers and missing:  # families that do not call them `layers` are not judged
        found.append(
            error(
                "missing_layers",
                f"{counted('layer', missing)} of {extent.layers} not in the checkpoint",
                "vLLM checks that of unquantised models only: these layers compute with uninitialised memory",
                "download the missing shards",
            )
        )
    found += _missing_experts(modules, extent)
    draft = {module.layer for module in modules if module.mtp}
    if extent.mtp_layers and modules and not draft:
        found.append(
            warning(
                "mtp_missing",
                f"config.json announces {extent.mtp_layers} MTP layer(s); the checkpoint has no tensor of one",
                "speculative decoding with the method mtp fails or drafts garbage; without it nothing is wrong",
                "serve without --speculative-config, or get the export that has them",
            )
        )
    # What stands below `mtp.` is left out of the main model (qwen3_5.py, nemotron_h.py); layers after its last are not.
    numbered = any(module.mtp and not re.search(r"(^|\.)mtp\.", module.name) for module in modules)
    if numbered and not extent.mtp_layers:
        found.append(
            warning(
                "mtp_not_announced",
                "the checkpoint has tensors of an MTP layer; num_nextn_predict_layers is 0 or missing",
                "vLLM takes them for layers of the main model and stops at a name it does not know",
                "set num_nextn_predict_layers in config.json",
            )
        )
    return found


def _missing_experts(modules: Sequence[Module], extent: Shape) -> list[Finding]:
    present: dict[tuple[int | None, str], set[int]] = {}
    for module in modules:
        if module.kind == kinds.ROUTED and module.expert is not None:
            present.setdefault((module.layer, module.name.rpartition(".")[2]), set()).add(module.expert)
    groups: dict[tuple[str, str], set[int]] = {}
    for (layer, projection), experts in present.items():
        absent = set(range(extent.experts or 0)) - experts
        if absent and layer is not None:
            groups.setdefault((projection, counted("expert", absent)), set()).add(layer)
    return [
        error(
            "missing_experts",
            f"{counted('layer', layers)}: {projection} of {experts} not in the checkpoint",
            "vLLM checks that of unquantised models only: these experts compute with uninitialised memory",
            "download the missing shards, or export again",
        )
        for (projection, experts), layers in groups.items()
    ]


def processor(folder: Path, config: Mapping) -> list[Finding]:
    """The image processor's file, where config.json announces a vision tower."""
    if not _sees(config) or not architecture(config).startswith("Glm5Next"):
        return []
    if (folder / "processor_config.json").exists():
        return []
    cure = "copy it from the model that was quantised, or --language-model-only"
    if (folder / "preprocessor_config.json").exists():
        # transformers 5.20 reads that file's top level for both halves; older ones stop. Settings below
        # "image_processor" are not looked for there.
        what = "processor_config.json is missing, and preprocessor_config.json stands in its place"
        consequence = "images and videos share its settings, or get defaults; older transformers stop"
        return [warning("processor_config", what, consequence, cure)]
    consequence = "the vision path does not load, and vLLM stops at start-up"
    return [error("processor_config", "processor_config.json is missing", consequence, cure)]


def vision(config: Mapping, present: Sequence[Module]) -> list[Finding]:
    """The tensors of the vision tower, where config.json announces one."""
    if not _sees(config) or not present or any(module.kind == kinds.VISION for module in present):
        return []
    return [
        warning(
            "vision_missing",
            "config.json announces a vision tower; the checkpoint has no tensor of one",
            "the tower computes with uninitialised memory",
            "--language-model-only",
        )
    ]


def _sees(config: Mapping) -> bool:
    return isinstance(config.get("vision_config"), Mapping)
