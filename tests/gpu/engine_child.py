"""Child process: real vLLM engines, one after the other, in this process; their answers as JSON files.

    python -m tests.gpu.engine_child stock|ours CHECKPOINTS OUT CASE [CASE ...]

Every case writes OUT/SIDE-CASE.json as soon as it is through; a case that fails writes its error there instead.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.engine_cases import BY_NAME, NEW_TOKENS, EngineCase, prompts


def kv_cache_dtype(case: EngineCase, side: str) -> str:
    """What is asked for; capability 12.x has no backend of vLLM's own for these rows, only fp8_ds_mla."""
    from vllm.platforms import current_platform

    if side == "stock" and current_platform.get_device_capability().major == 12:
        return "fp8_ds_mla"
    return case.row_dtype


def generate(llm: Any, prompt_logprobs: bool, asked: Sequence[list[int]] | None = None) -> list[dict]:
    """Greedy answers to all prompts at once, with the log-probability of every token and the margin to the second."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=0 if prompt_logprobs else None,
        detokenize=False,
    )
    requests = [{"prompt_token_ids": tokens} for tokens in asked or prompts()]
    answers = []
    for output in llm.generate(requests, parameters, use_tqdm=False):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in completion.logprobs]
        prompt = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=False)
        answers.append(
            {
                "tokens": tokens,
                "logprobs": [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)],
                "margins": [values[0] - values[1] for values in best],
                "prompt_logprobs": [step[token].logprob for token, step in prompt],
            }
        )
    return answers


def describe(llm: Any) -> dict:
    """Which backend serves, on which cache, in which graph mode."""

    def layers(model: Any) -> list[dict]:
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        return [
            {
                "backend": layer.attn_backend.get_name(),
                "kv_cache_dtype": layer.kv_cache_dtype,
                "cache_shape": list(layer.kv_cache.shape),
                "cache_strides": list(layer.kv_cache.stride()),
                "heads": layer.num_heads,
            }
            for layer in model.modules()
            if isinstance(layer, MLAAttention)
        ]

    config = llm.llm_engine.vllm_config
    return {"layers": llm.apply_model(layers)[0], "graph_mode": str(config.compilation_config.cudagraph_mode)}


def zeroed(llm: Any, prompt_logprobs: bool) -> list[dict]:
    """The same engine with our attention's output replaced by zeros: what a broken kernel would do to the answers."""
    from unittest import mock

    import torch

    from overlay.attention.impl import SparseMLAImpl

    forward = SparseMLAImpl.forward_mqa

    def zeros(self: Any, *args: Any, **kwargs: Any) -> tuple:
        out, lse = forward(self, *args, **kwargs)
        return torch.zeros_like(out), lse

    with mock.patch.object(SparseMLAImpl, "forward_mqa", zeros):
        return generate(llm, prompt_logprobs)


def run(case: EngineCase, side: str, checkpoints: Path) -> dict:
    from vllm import LLM

    started = time.monotonic()
    arguments = case.engine_arguments(str(checkpoints / case.checkpoint), kv_cache_dtype(case, side))
    llm = LLM(**arguments)
    loaded = time.monotonic()
    prompt_logprobs = not case.speculative_tokens
    result = {"case": case.name, "side": side, **describe(llm), "answers": generate(llm, prompt_logprobs)}
    if side == "stock":
        result["again"] = generate(llm, prompt_logprobs)
    result["seconds"] = {"load": round(loaded - started, 1), "generate": round(time.monotonic() - loaded, 1)}
    if case.control and side == "ours":
        result["zeroed"] = zeroed(llm, prompt_logprobs)
    return result


def clean_up() -> None:
    """Leave nothing of an engine behind for the next one in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
    gc.collect()
    cleanup_dist_env_and_memory()


def main(side: str, checkpoints: Path, out: Path, names: list[str]) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    failed = 0
    for name in names:
        try:
            result = run(BY_NAME[name], side, checkpoints)
        except Exception as error:
            traceback.print_exc()
            result = {"case": name, "side": side, "error": f"{type(error).__name__}: {error}"}
            failed = 1
        (out / f"{side}-{name}.json").write_text(json.dumps(result))
        clean_up()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
