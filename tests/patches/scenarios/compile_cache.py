"""vLLM's real cache keys, stock and with the patch, for the same overlay, another switch and another option."""

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from overlay import registry, startup
from overlay.config import PatchSettings
from tests.patches import harness


def keys() -> dict[str, str]:
    """The three keys: of the piecewise cache, of the ahead-of-time cache, of the start-up plan."""
    envs = importlib.import_module("vllm.envs")
    caching = importlib.import_module("vllm.compilation.caching")
    plan = importlib.import_module("vllm.v1.worker.startup_plan")
    hash_factors = importlib.import_module("vllm.config.utils").hash_factors
    config = SimpleNamespace(compute_hash=lambda: "the model")
    platform = SimpleNamespace(
        get_device_capability=lambda: (12, 1), get_device_name=lambda: "GB10", get_device_total_memory=lambda: 1 << 37
    )
    with mock.patch.object(plan, "current_platform", platform):
        return {
            "piecewise": hash_factors(envs.compile_factors()),
            "ahead of time": str(caching.aot_compile_hash_factors(config)),
            "plan": plan.compute_plan_fingerprint(config, 0, 2),
        }


def keys_of(changed: dict[str, PatchSettings]) -> dict[str, str]:
    """The keys of a process whose configuration differs in some patches."""
    here = startup.current()
    config = replace(here.config, patches={**here.config.patches, **changed})
    entries = registry.decide(list(registry.declarations()), config, here.sources, here.hardware)
    with mock.patch.object(startup, "_overlay", replace(here, config=config, entries=entries)):
        return keys()


def run() -> dict[str, Any]:
    settings = startup.current().config.patches
    off = replace(settings["prefill_profile"], switch=False)
    option = replace(
        settings["nvfp4_moe_scales"], options={**settings["nvfp4_moe_scales"].options, "some_bad": "refuse"}
    )
    answers = {
        "here": keys(),
        "same": keys_of({}),
        "switch": keys_of({"prefill_profile": off}),
        "option": keys_of({"nvfp4_moe_scales": option}),
    }
    with harness.without("compile_cache"):
        answers["stock"] = keys()
        answers["stock, switch"] = keys_of({"prefill_profile": off})
    return answers
