"""One digest for what this process's vLLM runs with: equal on every rank that may serve together, and a cache key."""

import hashlib
import json
from collections.abc import Iterable

from overlay import __version__
from overlay.kernel import source
from overlay.registry import Entry


def parts(entries: Iterable[Entry]) -> dict[str, object]:
    """What the digest is made of. States are those of `import vllm`: what was imported since differs by rank."""
    entries = list(entries)
    return {
        "overlay": __version__,
        "vllm": entries[0].context.vllm_version if entries else "unknown",
        "kernel": source.digest(),
        "patches": {
            entry.patch.id: {"state": str(entry.decided), "options": dict(entry.context.options)} for entry in entries
        },
    }


def fingerprint(entries: Iterable[Entry]) -> str:
    """The first 16 hexadecimal digits of SHA-256 over `parts`."""
    return hashlib.sha256(json.dumps(parts(entries), sort_keys=True).encode()).hexdigest()[:16]
