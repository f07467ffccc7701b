"""How the answers of engines on a GPU are judged for single patches: what is right passes, and each fault is named."""

import copy
import json

import pytest

from tests.gpu import patches

GIB = 1 << 30
REPLAYS = [{"poison": poison, "equal": True} for poison in (None, 2250, None)]
ANSWER = {"tokens": [1, 2], "logprobs": [-1.0, -1.0], "margins": [2.0, 2.0], "prompt_logprobs": [-3.0] * 100}


def engine(backend: str = patches.OURS, **more: object) -> dict:
    planned = {"available": 8 * GIB, "total_consumed": GIB, "peak_activation_memory": 5 * GIB}
    return {"layers": [{"backend": backend}], "graph_mode": "CUDAGraphMode.NONE", "planned": planned, "active": [],
            "answers": [copy.deepcopy(ANSWER) for _ in range(8)], **more}  # fmt: skip


def step(loaded: int, saved: int, *keys: str) -> dict:
    return {"tokens": [7, 8], "loaded": loaded, "saved": saved, "keys": list(keys)}


def right() -> dict:
    """What every child should answer. The second profile's neighbour took half a GiB meanwhile."""
    gains = {"available": 8 * GIB + int(3.2e9) - GIB // 2, "total_consumed": GIB + GIB // 2}
    return {
        "kernels": {"patched": copy.deepcopy(REPLAYS), "buffer": [True] * 3,
                    "stock": [{**replay, "equal": replay["poison"] is None} for replay in REPLAYS]},
        "profile off": [engine()],
        "profile on": [engine(planned=gains, active=["prefill_profile"])],
        "fa3": [engine(patches.SM90), engine(patches.SM90)],
        "fa2": [engine(patches.SM90, active=["flashinfer_fa2"]) for _ in range(2)],
        "compile cache": [step(0, 1, "a"), step(1, 0, "a"), step(0, 1, "a", "b"), step(1, 0, "a", "b")],
        "compile cache off": [step(0, 1, "c"), step(1, 0, "c")],
        "graphs off": [engine(graph_mode="CUDAGraphMode.FULL_AND_PIECEWISE")],
        "graphs on": [engine(graph_mode="CUDAGraphMode.FULL_DECODE_ONLY")],
    }  # fmt: skip


def judged(tmp_path, answers: dict) -> dict:
    (tmp_path / patches.PROVENANCE).write_text(json.dumps({"gpu": "a GPU"}))
    for name, answer in answers.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(answer))
    return patches.report_of(tmp_path, patches.NAMES)


def test_what_is_right_passes(tmp_path):
    report = judged(tmp_path, right())
    assert report["gpu"] == "a GPU"
    assert list(report["patches"]) == list(patches.JUDGES)
    assert [verdict["problems"] for verdict in report["patches"].values()] == [[]] * len(patches.JUDGES)
    assert report["patches"]["prefill_profile"]["gained"] == int(3.2e9)


def unequal(replays, poison):
    for replay in replays:
        if replay["poison"] == poison:
            replay["equal"] = False


def change(answer, **values):
    answer.update(values)


FAULTS = {
    "indexer_bounds": [
        (lambda a: unequal(a["kernels"]["patched"], 2250), "poison 2250: not as defined"),
        (lambda a: change(a["kernels"], stock=REPLAYS), "stock is right as well"),
        (lambda a: unequal(a["kernels"]["stock"], None), "the definition is not vLLM's"),
        (lambda a: change(a["kernels"], buffer=[True, False, True]), "not -1 at every replay"),
    ],
    "prefill_profile": [
        (lambda a: change(a["profile on"][0]["planned"], available=8 * GIB), "the KV cache gains 0.50 GiB"),
        (lambda a: change(a["profile on"][0], active=[]), "the switch did not switch"),
        (lambda a: change(a["profile off"][0], layers=[{"backend": "X"}]), "served by X"),
        (lambda a: change(a["profile on"][0]["answers"][1], logprobs=[-1.0, -1.5]), "differ by up to 0.5"),
    ],
    "flashinfer_fa2": [
        (lambda a: change(a["fa2"][1], active=[]), "fp8: active: "),
        (lambda a: change(a["fa3"][0], active=["x"]), "bfloat16: active: flashinfer_fa2; in the stock engine: x"),
        (lambda a: change(a["fa2"][0]["answers"][0], tokens=[1, 3]), "bfloat16: prompt 0, token 1"),
        (lambda a: change(a["fa2"][0]["answers"][3], prompt_logprobs=[-3.0] * 98 + [-4.0] * 2), "prompt log-prob"),
        (lambda a: change(a["fa3"][0], layers=[{"backend": patches.OURS}]), f"served by {patches.OURS}"),
    ],
    "compile_cache": [
        (lambda a: change(a["compile cache"][1], loaded=0, saved=1), "the same patches do not hit"),
        (lambda a: change(a["compile cache"][2], loaded=1, saved=0), "a toggle meets the artifact of other patches"),
        (lambda a: change(a["compile cache"][2], keys=["a"]), "[1, 1, 1, 2] keys"),
        (lambda a: change(a["compile cache"][3], loaded=0, saved=1), "going back does not hit"),
        (lambda a: change(a["compile cache"][0], saved=0), "the first start did not compile and save"),
        (lambda a: change(a["compile cache off"][1], loaded=0, saved=1), "the fault is gone"),
        (lambda a: change(a["compile cache"][3], tokens=[7, 9]), "the answers differ"),
    ],
    "cudagraph_defaults": [
        (lambda a: change(a["graphs on"][0], graph_mode="CUDAGraphMode.FULL_AND_PIECEWISE"), "graph modes"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("patch", "fault", "said"), [(patch, *fault) for patch, faults in FAULTS.items() for fault in faults]
)
def test_each_fault_is_named(tmp_path, patch, fault, said):
    answers = right()
    fault(answers)
    verdicts = judged(tmp_path, answers)["patches"]
    assert any(said in problem for problem in verdicts.pop(patch)["problems"])
    assert not any(verdict["problems"] for verdict in verdicts.values())


def test_a_child_without_an_answer_is_a_problem(tmp_path):
    answers = right()
    del answers["fa2"]
    assert judged(tmp_path, answers)["patches"]["flashinfer_fa2"]["problems"] == ["no answer of 'fa2': see its log"]


def test_every_judge_has_its_children():
    assert {name for needed, _ in patches.JUDGES.values() for name in needed} == set(patches.NAMES)
