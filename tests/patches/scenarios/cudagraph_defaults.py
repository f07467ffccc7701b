"""vLLM's real VllmConfig for the full-size model, and the graphs that its real CudaGraphManager would capture."""

import importlib
import os
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from overlay.hardware import Device, Hardware
from overlay.patches.cudagraph_defaults import ENV
from tests.attention import models
from tests.patches import harness


def plan(model: str, **options: Any) -> dict[str, Any]:
    """The configuration's graph mode, compilation mode, custom operators, and how many graphs of each kind."""
    from vllm.config import CacheConfig, CompilationConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    inherited = os.environ.pop(ENV, None) if options.pop("as_vllm_left_it", True) else os.environ.get(ENV)
    mode = options.pop("cudagraph_mode", None)
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=16384,
            enforce_eager=options.pop("enforce_eager", False),
        ),
        cache_config=CacheConfig(),
        compilation_config=CompilationConfig(cudagraph_mode=mode and CUDAGraphMode[mode]),
        scheduler_config=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=16384,
                                         is_encoder_decoder=False),
        **options,
    )  # fmt: skip
    compilation = config.compilation_config
    # The linear-attention layers allow uniform batches at most; nothing of this model is compiled.
    resolved = compilation.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.UNIFORM_BATCH, "GDN_ATTN", 1, use_v2_model_runner=True,
        piecewise_capture_available=os.environ.get(ENV) == "1",
    )  # fmt: skip
    answer = {
        "mode": resolved.name,
        "compiled": int(compilation.mode),
        "custom_ops": [op for op in compilation.custom_ops if op in ("all", "none")],
        "graphs": graphs(config, resolved),
        "env": os.environ.get(ENV),
    }
    os.environ.pop(ENV, None)
    if inherited is not None:
        os.environ[ENV] = inherited
    return answer


def graphs(config: Any, mode: Any) -> dict[str, int]:
    module = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    with (
        mock.patch.object(module, "get_pp_group", lambda: group),
        mock.patch.object(type(module.current_platform), "get_global_graph_pool", lambda *a: None),
    ):
        manager = module.CudaGraphManager(config, None, mode, 1)
    return {kind.name: len(descriptions) for kind, descriptions in manager._capture_descs.items()}


def run() -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    glm = models.write(models.full_size(), folder / "glm")
    nested = models.write(models.full_size(nested=True), folder / "nested")
    llama = models.write(models.LLAMA, folder / "llama")

    def cases() -> dict[str, Any]:
        return {
            "glm": plan(glm),
            "nested": plan(nested),
            "llama": plan(llama),
            "mode given": plan(glm, cudagraph_mode="PIECEWISE"),
            "eager": plan(glm, enforce_eager=True),
            "O1": plan(glm, optimization_level=1),
        }

    answers = {"wrapped": cases()}
    other = Device("NVIDIA GeForce RTX 5090", (12, 0), False)
    with mock.patch.object(Hardware, "devices", ()):
        with unittest.TestCase().assertLogs("overlay.cudagraph_defaults", "WARNING") as said:
            answers["no GPU"] = plan(glm)
        answers["no GPU, said"] = said.output
        harness.entry("cudagraph_defaults").context.wanted = True
        answers["no GPU, true"] = plan(glm)
        harness.entry("cudagraph_defaults").context.wanted = "auto"
    with mock.patch.object(Hardware, "devices", (other,)):
        answers["own memory"] = plan(glm)
    with harness.without("cudagraph_defaults"):
        answers["stock"] = cases()
        os.environ[ENV] = "0"
        answers["stock, breakable off"] = plan(glm, as_vllm_left_it=False)
    # Put back while the variable is there: the user asked.
    os.environ[ENV] = "1"
    with harness.without("cudagraph_defaults"):
        pass
    answers["asked"] = plan(glm, as_vllm_left_it=False)
    os.environ.pop(ENV)
    return answers
