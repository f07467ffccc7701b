"""vLLM's real question about FlashInfer, with FlashInfer whole, broken in three ways, or absent."""

import importlib
import logging
import sys
from types import ModuleType
from typing import Any
from unittest import mock

from overlay.patches.flashinfer_probe import FLASHINFER
from tests.patches import harness


class Broken(ModuleType):
    """flashinfer.decode of an installation whose dependency cannot be loaded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            raise OSError("libnvrtc.so.12: cannot open shared object file")
        except OSError as error:
            raise ImportError(f"cannot import name {name!r}") from error


def module_with(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(attributes)
    return module


WHOLE = {"trtllm_batch_decode_sparse_mla_dsv4": print, "trtllm_batch_decode_with_kv_cache_mla": print}
CASES = {
    "whole": module_with("flashinfer.decode", **WHOLE),
    "broken dependency": Broken("flashinfer.decode"),
    "too old": module_with("flashinfer.decode", trtllm_batch_decode_with_kv_cache_mla=print),
    "not callable": module_with("flashinfer.decode", **{**WHOLE, "trtllm_batch_decode_sparse_mla_dsv4": None}),
}


def ask(decode: ModuleType | None) -> dict[str, Any]:
    """The answer, twice, and what was said. None: FlashInfer is not installed."""
    module = importlib.import_module(FLASHINFER)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("overlay.flashinfer_probe")
    logger.addHandler(handler)
    cached = module.has_flashinfer_sparse_mla_sm120
    autotuner = module_with("flashinfer.autotuner", autotune=print)
    modules = {"flashinfer.decode": decode, "flashinfer.autotuner": autotuner} if decode else {}
    cached.cache_clear()
    try:
        with (
            mock.patch.dict(sys.modules, {"flashinfer": module_with("flashinfer", __path__=[]), **modules}),
            mock.patch.object(module, "has_flashinfer", lambda: decode is not None),
        ):
            answers = [bool(cached()), bool(module.has_flashinfer_sparse_mla_sm120())]
    finally:
        logger.removeHandler(handler)
        cached.cache_clear()
    return {"answers": answers, "said": said}


def run() -> dict[str, Any]:
    importlib.import_module(FLASHINFER)
    answers: dict[str, Any] = {"wrapped": {}, "stock": {}}
    for name, decode in (*CASES.items(), ("absent", None)):
        with harness.without("flashinfer_probe"):
            answers["stock"][name] = ask(decode)
        answers["wrapped"][name] = ask(decode)  # put on again: it has said nothing yet
    return answers
