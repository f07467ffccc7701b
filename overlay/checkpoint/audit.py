"""What is wrong with a checkpoint: told in seconds from its JSON files, headers and smallest tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from overlay.checkpoint import (
    audit_activations,
    audit_claims,
    audit_extent,
    audit_scales,
    audit_shards,
    audit_storage,
)
from overlay.checkpoint.audit_activations import Activation
from overlay.checkpoint.audit_config import (
    CONFIG,
    SIDE_FILE,
    QuantConfig,
    Statement,
    architecture,
    in_effect,
    load_json,
    read,
    state,
)
from overlay.checkpoint.audit_headers import HeaderError
from overlay.checkpoint.audit_modules import Module, Total, modules, shape, totals
from overlay.checkpoint.audit_names import family, runtime_modules
from overlay.checkpoint.findings import Finding, error, info
from overlay.checkpoint.tiny_config import CheckpointError

SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Audit:
    """The result. `bytes` is what vLLM would load; `findings` the worst first."""

    path: Path
    architecture: str
    config: QuantConfig | None
    statement: Statement
    totals: tuple[Total, ...]
    activations: tuple[Activation, ...]
    findings: tuple[Finding, ...]

    @property
    def bytes(self) -> int:
        return sum(total.bytes for total in self.totals)

    @property
    def failed(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def as_json(self) -> dict[str, object]:
        """The shape of `audit --json`; sizes in bytes."""
        config = self.config
        return {
            "path": str(self.path),
            "architecture": self.architecture,
            "quantization": {
                "file": config.file if config else None,
                "method": config.method if config else None,
                "label": self.statement.label,
                "activation_scales": self.statement.activation_scales,
                "kv_cache": config.kv_cache if config else None,
            },
            "bytes": self.bytes,
            "totals": [
                {"kind": row.kind, "parameters": row.parameters, "bytes": row.bytes, "formats": dict(row.formats)}
                for row in self.totals
            ],
            "nvfp4": [
                {
                    "kind": row.kind,
                    "claimed": row.claimed,
                    "served": dict(row.served),
                    "usable_scales": row.usable,
                    "projections": row.projections,
                }
                for row in self.activations
            ],
            "findings": [finding.as_json() for finding in self.findings],
        }


def audit(path: Path | str) -> Audit:
    """Audit the checkpoint in the folder `path` (or beside that config.json). Raises CheckpointError for none."""
    folder = Path(path).parent if Path(path).name == CONFIG else Path(path)
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file: name the folder of a checkpoint")
    config = load_json(folder / CONFIG)
    if config is None:
        raise CheckpointError(f"{folder} has no {CONFIG}: name the folder of a checkpoint")
    main, side = read(config), read(load_json(folder / SIDE_FILE), SIDE_FILE)
    used = in_effect(main, side)
    found = audit_claims.findings(main, side)

    weights = audit_shards.read(folder)
    found += weights.findings
    present = modules(weights.tensors.values(), shape(config))
    found += audit_extent.processor(folder, config)
    activations: list[Activation] = []
    if weights.complete:
        activations, shown = _judged(config, used, present)
        found += shown
    elif present:
        found.append(
            info(
                "not_judged",
                "what the files hold that are absent or unreadable is not known",
                "layers, experts, names and scales were not judged",
                "run the audit again with all files",
            )
        )
    return Audit(
        path=folder,
        architecture=architecture(config) or "unknown",
        config=used,
        statement=state(used),
        totals=tuple(totals(present)),
        activations=tuple(activations),
        findings=tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
    )


def _judged(config: Mapping, used: QuantConfig | None, present: list[Module]) -> tuple[list[Activation], list[Finding]]:
    """How the NVFP4 modules are to be served, and what all modules show. Presumes that every file was read."""
    found = [*audit_extent.incomplete(present, shape(config)), *audit_extent.vision(config, present)]
    model = family(config)
    runtime = runtime_modules(present, model)
    planned, mismatches = audit_storage.plan(used, runtime, model)
    found += [*mismatches, *audit_storage.idle_entries(used, present, runtime, model)]
    try:
        scales = audit_scales.read(planned)
    except (HeaderError, OSError) as problem:
        return [], [*found, error("unreadable_scales", str(problem), "scales were not judged", "run the audit again")]
    activations, missing = audit_activations.examine(scales)
    return activations, [*found, *missing, *audit_scales.findings(scales)]
