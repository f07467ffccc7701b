"""Child process: what vLLM's real selector answers, stock and with the patch applied, for many layers and GPUs.

Prints one JSON object {case: {"stock": answer, "wrapped": answer, "said": [log lines]}}; an answer is the backend's
class name, or the exception as text.
"""

import json
import logging
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from overlay.checkpoint import tiny_config
from tests.attention import models
from tests.gpu import engine_cases

CAPABILITIES = ((12, 0), (12, 1), (9, 0), (10, 0))
KV_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")


@dataclass(frozen=True)
class Case:
    """One question to the selector. `parallel` and `attention` are set on vLLM's configuration while it is asked."""

    name: str
    model: str = "flat"
    capability: tuple[int, int] = (12, 1)
    kv_dtype: str | None = "auto"
    explicit: str | None = None
    block_size: int | None = None
    wanted: object = "auto"
    other_capabilities: str = ""
    parallel: dict = field(default_factory=dict)
    changed: dict = field(default_factory=dict)  # fields of the selector's own question
    flashinfer: bool = True
    hisparse: bool = False


def cases() -> Iterator[Case]:
    for capability in CAPABILITIES:
        for kv_dtype in KV_DTYPES:
            for model in ("flat", "nested"):
                name = "{}.{} {} {}".format(*capability, kv_dtype, model)
                yield Case(name, model, capability, kv_dtype)
            for model in ("rope", "dense"):
                if kv_dtype != "fp8_ds_mla" or model == "rope":
                    yield Case("{}.{} {} {}".format(*capability, kv_dtype, model), model, capability, kv_dtype)
    yield Case("no dtype", kv_dtype=None)
    for kv_dtype in ("auto", "bfloat16", "fp8_ds_mla"):
        yield Case(f"true {kv_dtype}", kv_dtype=kv_dtype, wanted=True)
        yield Case(f"dcp {kv_dtype}", kv_dtype=kv_dtype, parallel={"decode_context_parallel_size": 2})
        yield Case(f"topk 1024 {kv_dtype}", "topk1024", kv_dtype=kv_dtype)
        yield Case(f"no flashinfer {kv_dtype}", kv_dtype=kv_dtype, flashinfer=False)
        yield Case(f"9.0 opened {kv_dtype}", capability=(9, 0), kv_dtype=kv_dtype, other_capabilities="9.0")
        yield Case(
            f"9.0 opened true {kv_dtype}", capability=(9, 0), kv_dtype=kv_dtype, other_capabilities="9.0", wanted=True
        )
    yield Case("9.0 opened 10.0", capability=(9, 0), kv_dtype="bfloat16", other_capabilities="10.0")
    yield Case(
        "9.0 opened explicit sm90",
        capability=(9, 0),
        kv_dtype="bfloat16",
        other_capabilities="9.0",
        explicit="FLASHINFER_MLA_SPARSE_SM90",
    )
    yield Case("explicit stock bfloat16", kv_dtype="bfloat16", explicit="FLASHINFER_MLA_SPARSE_SM120")
    yield Case("explicit stock fp8", kv_dtype="fp8", explicit="FLASHINFER_MLA_SPARSE_SM120")
    yield Case("explicit ours auto", explicit="CUSTOM")
    yield Case("explicit ours fp8", kv_dtype="fp8", explicit="CUSTOM")
    yield Case("explicit ours fp8_ds_mla", kv_dtype="fp8_ds_mla", explicit="CUSTOM")
    yield Case("explicit ours 9.0", capability=(9, 0), kv_dtype="bfloat16", explicit="CUSTOM")
    yield Case("explicit ours rope", "rope", kv_dtype="bfloat16", explicit="CUSTOM")
    yield Case("explicit ours dense", "dense", kv_dtype="bfloat16", explicit="CUSTOM")
    for name, change in {
        "pcp": {"use_pcp": True},
        "rswa": {"use_rswa": True},
        "nvfp4": {"kv_cache_dtype": "nvfp4"},
        "block size 96": {"block_size": 96},
        "block size 128": {"block_size": 128},
        "float16": {"dtype": "float16"},
    }.items():
        yield Case(name, kv_dtype="bfloat16", changed=change)
    yield Case("hisparse", kv_dtype="bfloat16", hisparse=True)
    for engine in engine_cases.CASES:
        name = f"engine {engine.name}"
        yield Case(name, name, (9, 0), engine.row_dtype, other_capabilities="9.0")


class Selector:
    """vLLM's real selector over real model configurations."""

    def __init__(self, folder: Path) -> None:
        from vllm.config import CacheConfig, ModelConfig, VllmConfig

        configs = {
            "flat": models.full_size(),
            "nested": models.full_size(nested=True),
            "topk1024": models.full_size(index_topk=1024),
            "rope": models.DEEPSEEK_SPARSE,
            "dense": models.LLAMA,
        }
        self.configs = {}
        for name, config in configs.items():
            path = models.write(config, folder / name)
            model = ModelConfig(model=path, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=16384)
            self.configs[name] = VllmConfig(model_config=model, cache_config=CacheConfig())
        for case in engine_cases.CASES:
            self.configs[f"engine {case.name}"] = engine_config(case, folder)

    def ask(self, case: Case) -> str:
        """The selector's answer, as the class's name or the exception's text."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.platforms import current_platform
        from vllm.v1.attention import selector
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        os.environ["OVERLAY_REHEARSAL_CAPABILITY"] = "{}.{}".format(*case.capability)
        platform = type(current_platform)
        platform.get_device_capability.cache_clear()
        vllm_config = self.configs[case.model]
        model = vllm_config.model_config
        with ExitStack() as stack:
            stack.enter_context(set_current_vllm_config(vllm_config))
            for name, value in case.parallel.items():
                stack.enter_context(mock.patch.object(vllm_config.parallel_config, name, value))
            if case.hisparse:
                stack.enter_context(mock.patch.object(vllm_config.attention_config, "hisparse_config", object()))
            if not case.flashinfer:
                stack.enter_context(mock.patch("vllm.utils.flashinfer.has_flashinfer_sparse_mla_sm120", lambda: False))
            explicit = AttentionBackendEnum[case.explicit] if case.explicit else None
            stack.enter_context(mock.patch.object(vllm_config.attention_config, "backend", explicit))
            stack.enter_context(changed_question(selector, case.changed))
            selector._cached_get_attn_backend.cache_clear()
            try:
                backend = selector.get_attn_backend(
                    model.get_head_size(),
                    torch.bfloat16,
                    case.kv_dtype,
                    use_mla=model.use_mla,
                    use_sparse=case.model != "dense",
                    num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
                )
            except Exception as error:
                notes = "".join(f"\nnote: {note}" for note in getattr(error, "__notes__", ()))
                return f"{type(error).__name__}: {error}{notes}"
            return backend.__name__


def engine_config(case: engine_cases.EngineCase, folder: Path) -> object:
    """What vLLM makes of the arguments that the GPU tests start this engine with."""
    from vllm.engine.arg_utils import EngineArgs

    shape = tiny_config.TinyModel(heads=case.heads, layers=case.layers, nested=case.nested, mtp=case.nested)
    path = models.write(tiny_config.model_config(shape), folder / case.checkpoint)
    return EngineArgs(**case.engine_arguments(path, case.row_dtype), skip_tokenizer_init=True).create_engine_config()


@contextmanager
def changed_question(selector: object, changes: dict) -> Iterator[None]:
    """Let the selector ask for something that this configuration cannot express, such as an odd block size."""
    import torch

    if not changes:
        yield
        return
    changes = {k: getattr(torch, v) if k == "dtype" else v for k, v in changes.items()}
    inner = selector._cached_get_attn_backend

    def asked(backend: object, attn_selector_config: tuple, **kwargs: object) -> object:
        return inner(backend, attn_selector_config=attn_selector_config._replace(**changes), **kwargs)

    asked.cache_clear = inner.cache_clear
    with mock.patch.object(selector, "_cached_get_attn_backend", asked):
        yield


def import_cutlass_mla() -> None:
    """This module of vLLM's counts the GPU's SMs and allocates 128 MB on it when it is imported, so the selector cannot
    walk its list for 10.x without one: let it have an answer and host memory."""
    import torch

    def on_host(*shape: object, **kwargs: object) -> torch.Tensor:
        return empty(*shape, **{**kwargs, "device": "cpu"})

    empty = torch.empty
    properties = types.SimpleNamespace(multi_processor_count=148)
    with (
        mock.patch.object(torch, "empty", on_host),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
    ):
        import vllm.v1.attention.backends.mla.cutlass_mla  # noqa: F401


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def patched(case: Case) -> Iterator[Said]:
    """The patch applied as the registry does it, with a logger that is listened to."""
    from overlay.context import Context
    from overlay.hardware import Hardware
    from overlay.patches.sparse_mla import PATCH
    from overlay.sources import VllmSources

    options = {option.name: option.default for option in PATCH.options}
    options["other_capabilities"] = case.other_capabilities
    context = Context(PATCH.id, options, case.wanted, VllmSources.find(), Hardware())
    said = Said()
    logger = logging.getLogger("overlay")
    logger.setLevel(logging.INFO)
    logger.addHandler(said)
    try:
        for module, function in PATCH.apply.items():
            function(sys.modules[module], context)
        yield said
    finally:
        logger.removeHandler(said)
        context.roll_back()


def main() -> None:
    import vllm.platforms.cuda
    import vllm.v1.attention.backends.registry

    import_cutlass_mla()
    answers = {"version": vllm.__version__}
    with tempfile.TemporaryDirectory() as folder:
        selector = Selector(Path(folder))
        for case in cases():
            stock = selector.ask(case)
            with patched(case) as said:
                wrapped = selector.ask(case)
                again = selector.ask(case)
            after = selector.ask(case)
            answers[case.name] = {
                "stock": stock,
                "wrapped": wrapped,
                "said": said.lines,
                "again": again,
                "after": after,
            }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
