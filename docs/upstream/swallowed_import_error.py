"""What is left of FlashInfer's own ImportError when vLLM probes it. CPU only: python swallowed_import_error.py"""

import io
import logging
import sys
from importlib.metadata import version
from types import ModuleType

CAUSE = "libcudart.so.13: cannot open shared object file"  # for example


class BrokenModule(ModuleType):
    """A module of an installed package whose import fails, as with a library that is missing."""

    def __getattr__(self, name: str):
        raise ImportError(CAUSE)


def reproduce() -> dict[str, object]:
    """Whether the probe says no, and whether anything that vLLM logs names the cause."""
    from vllm.utils import flashinfer as probes

    said, probe = io.StringIO(), probes.has_flashinfer_sparse_mla_sm120
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("vllm")
    level, installed = logger.level, sys.modules.get("flashinfer.decode")
    has_flashinfer = probes.has_flashinfer
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    sys.modules["flashinfer.decode"] = BrokenModule("flashinfer.decode")
    probes.has_flashinfer = lambda: True  # installed; whether nvcc is there is not the question
    probe.cache_clear()
    try:
        answer = probe()
    finally:
        probes.has_flashinfer = has_flashinfer
        sys.modules.pop("flashinfer.decode")
        if installed is not None:
            sys.modules["flashinfer.decode"] = installed
        probe.cache_clear()
        logger.removeHandler(handler)
        logger.setLevel(level)
    told = CAUSE in said.getvalue()
    return {"answer": answer, "told": told, "wrong": [] if told or answer else ["the cause is lost"]}


if __name__ == "__main__":
    result = reproduce()
    print(f"vllm {version('vllm')}: flashinfer.decode raises ImportError({CAUSE!r})")
    print(f"has_flashinfer_sparse_mla_sm120() = {result['answer']}; the log names the cause: {result['told']}")
