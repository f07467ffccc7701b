"""What the tests of the audit share: a small checkpoint with one fault, its audit, and that in short."""

from overlay.checkpoint.audit import Audit, audit
from tests.checkpoint import small

EXPERT = "model.layers.1.mlp.experts.2"
SOUND = small.config(small.modelopt())


def weight_only(name: str) -> small.Tensors:
    return small.nvfp4(name, input_scale=None)


def findings(result: Audit) -> dict[str, list[str]]:
    """Check -> what was found."""
    found: dict[str, list[str]] = {}
    for finding in result.findings:
        found.setdefault(finding.check, []).append(finding.what)
    return found


def served(result: Audit) -> dict[str, str]:
    return {row.kind: row.summary for row in result.activations}


def examine(tmp_path, settings=SOUND, tensors=None, **more) -> Audit:
    return audit(small.write(tmp_path / "model", settings, small.model() if tensors is None else tensors, **more))
