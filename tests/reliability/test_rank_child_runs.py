"""The child of a case from beginning to end, with an engine that stands in for vLLM's: every case, every branch."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.gpu import rank_child
from tests.gpu.rank_cases import cases, judge

BY_NAME = {case.name: case for case in cases(4)}
VOCABULARY = 320


class Layer:
    """Stands for MLAAttention."""

    def __init__(self, case):
        name = "FLASHINFER_MLA_SPARSE_SM90" if case.stock else "OVERLAY_SPARSE_MLA"
        self.attn_backend = SimpleNamespace(get_name=lambda: name)
        self.kv_cache_dtype, self.num_heads = "bfloat16", case.heads // case.tp
        self.kv_cache = SimpleNamespace(shape=(9, 64, 512))
        self.impl = SimpleNamespace(dcp_world_size=case.dcp)


class Engine:
    """Stands for vllm.LLM: answers alike whatever its ranks are, unless a share was lost."""

    made: list[dict]

    def __init__(self, case, **arguments):
        if case.refusal:
            raise RuntimeError(f"{case.refusal} 7) and so on")
        self.case, self.lost = case, False
        Engine.made.append(arguments)

    def collective_rpc(self, function):
        worker = SimpleNamespace(get_model=lambda: SimpleNamespace(modules=lambda: [Layer(self.case)]))
        self.lost |= function is rank_child.lose_a_share
        return [function(worker) for _ in range(self.case.tp)]

    def generate(self, requests, parameters, use_tqdm):
        return [self.answer(request["prompt_token_ids"], parameters) for request in requests]

    def answer(self, prompt, parameters):
        shift = 5.0 if self.lost else 0.0

        def step(token):
            return {token: SimpleNamespace(logprob=-0.5 - shift), token + 1: SimpleNamespace(logprob=-2.0 - shift)}

        tokens = [(sum(prompt) + i) % VOCABULARY for i in range(parameters.max_tokens)]
        completion = SimpleNamespace(token_ids=tokens, logprobs=[step(token) for token in tokens])
        of_prompt = [None, *(step(token) for token in prompt[1:])]
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[completion], prompt_logprobs=of_prompt)


@pytest.fixture
def vllm(monkeypatch):
    """`vllm(case)`: the modules that the child imports, as that case meets them."""

    def install(case):
        capability = SimpleNamespace(major=9)
        platform = SimpleNamespace(get_device_capability=lambda: capability)
        worker_proc = type("WorkerProc", (), {"make_worker_process": staticmethod(lambda **kwargs: None)})
        impl = type("SparseMLAImpl", (), {"forward_mqa": None})
        modules = {
            "vllm": {"LLM": lambda **arguments: Engine(case, **arguments), "SamplingParams": SimpleNamespace},
            "vllm.platforms": {"current_platform": platform},
            "vllm.v1.executor.multiproc_executor": {"WorkerProc": worker_proc},
            "vllm.model_executor.layers.attention.mla_attention": {"MLAAttention": Layer},
            "overlay.attention.impl": {"SparseMLAImpl": impl},
        }
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("tests.gpu.engine_child.prompts", lambda: [[65] * 7, list(range(40))])
        pids = iter(range(1000))
        monkeypatch.setattr(rank_child.os, "getpid", lambda: next(pids))
        said = None if case.stock else {"fingerprint": "f00d"}
        monkeypatch.setattr("overlay.patches.process_proof.answer", lambda worker: said)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "")  # what the child sets is taken back
    Engine.made = []
    return install


def test_every_case_runs_and_all_is_judged_well(vllm, tmp_path):
    results = {}
    for name, case in BY_NAME.items():
        vllm(case)
        assert rank_child.main(name, tmp_path) == 0
        results[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert [problem for case in BY_NAME.values() for problem in judge(case, results)["problems"]] == []
    served = [case for case in BY_NAME.values() if not case.refusal]
    for case, arguments in zip(served, Engine.made, strict=True):
        assert arguments["model"] == str(tmp_path / case.checkpoint)
        assert arguments["kv_cache_dtype"] == {"bf16": "bfloat16", "fp8": "fp8"}[case.rows]
        assert arguments["tensor_parallel_size"] == case.tp


def test_an_engine_that_fails_is_written_down(vllm, tmp_path, monkeypatch):
    case = BY_NAME["tp1 64 bf16"]
    vllm(case)
    monkeypatch.setattr(Engine, "generate", lambda *args, **kwargs: 1 / 0)
    assert rank_child.main(case.name, tmp_path) == 1
    assert json.loads((tmp_path / f"{case.name}.json").read_text()) == {"error": "ZeroDivisionError: division by zero"}
