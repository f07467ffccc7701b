"""The fit of the model behind the choice of a launch; what it is fitted to needs a GPU."""

import contextlib
import random
import types

import pytest
import torch

from overlay.bench import tune
from overlay.kernel import launch
from overlay.kernel.plan import MODEL, Cost, plan
from overlay.kernel.variants import VARIANTS, variants_for

OTHER = MODEL._replace(  # a part whose blocks disturb each other more, and whose merge is dear
    blocks={name: Cost(cost.fixed * 2, cost.column, 0.9) for name, cost in MODEL.blocks.items()}, merge=6.0
)


def rows(model, sm_count, noise=0.0):
    generator = random.Random(1)
    return [
        {**vars(one), "us": 2.0 + one.modelled(model, sm_count) * (1 + noise * generator.uniform(-1, 1))}
        for one in tune.launches(sm_count)
    ]


@pytest.mark.parametrize("sm_count", [48, 132, 188])
def test_every_launch_is_one_that_a_call_may_take(sm_count):
    found = list(tune.launches(sm_count))
    assert len(found) == len(set(found)) > 400
    by_name = {variant.name: variant for variant in VARIANTS}
    for one in found:
        cut = plan(one.heads, one.kv_dtype, one.tokens, tune.COLUMNS, sm_count, one.splits, by_name[one.variant])
        assert (cut.splits, cut.variant.name) == (one.splits, one.variant)
    shapes = {one.shape for one in found}
    assert len(shapes) == 4 * len(tune.TOKENS) * 2
    for heads, tokens, kv_dtype in shapes:  # every variant that serves the heads is tried
        tried = {one.variant for one in found if one.shape == (heads, tokens, kv_dtype)}
        assert tried == {variant.name for variant in variants_for(heads, kv_dtype)}


def test_the_model_is_kept_where_it_is_right():
    measured = rows(MODEL, 132)
    judge = tune.Fit(measured, 132)
    assert max(judge.losses(judge.modelled(MODEL)).values()) == 0
    fitted = tune.fit(measured, 132, steps=30)
    assert max(judge.losses(judge.modelled(fitted)).values()) == 0


def test_another_parts_constants_are_found():
    measured = rows(OTHER, 132, noise=0.01)
    judge = tune.Fit(measured, 132)
    before = judge.losses(judge.modelled(MODEL))
    fitted = tune.fit(measured, 132, steps=1500)
    after = judge.losses(judge.modelled(fitted))
    assert max(before.values()) > 0.1
    assert sum(after.values()) < sum(before.values()) / 4
    assert fitted == tune.fit(measured, 132, steps=1500)
    assert fitted.launch == MODEL.launch, "no single launch tells what a second one costs"
    headers, cells = tune.cells(measured, 132, fitted)
    assert len(cells) == len(before) and all(len(cell) == len(headers) for cell in cells)


def test_what_is_printed_is_source():
    names = {"Model": type(MODEL), "Cost": Cost}
    exec(tune.source(OTHER), names)
    assert names["MODEL"] == OTHER


def test_each_launch_is_forced_and_has_its_workspace(monkeypatch):
    calls = []

    def load(device, heads, kv_dtype):
        functions = {
            variant: lambda grid, block, args, name=variant.name, **_: calls.append((name, grid[1]))
            for variant in variants_for(heads, kv_dtype)
        }
        return launch.SparseMLA(device, heads, kv_dtype, functions, lambda *_, **__: None)

    monkeypatch.setattr(launch.SparseMLA, "load", staticmethod(load))
    monkeypatch.setattr(launch, "cupy_stream", lambda pointer: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tune, "as_on_sm120", lambda kernel: contextlib.nullcontext())
    monkeypatch.setattr(
        tune.timing, "warm", lambda timed, repeats, captures: [call() for call in timed] and float(len(calls))
    )
    monkeypatch.setattr("overlay.bench.cases.POOL_ROWS", 4096)
    chosen = list(tune.launches(132, (16,), (1, 8)))
    measured = list(tune.measure(chosen, "cpu"))
    assert [{key: row[key] for key in vars(chosen[0])} for row in measured] == [vars(one) for one in chosen]
    assert calls == [(one.variant, one.splits) for one in chosen for _ in range(4)]
