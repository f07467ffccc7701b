"""The kit and vLLM's own API classes: requests are what vLLM reads, and what vLLM writes is what the kit reads."""

import json
import os

import pytest

from overlay.acceptance.client import Stream, body
from tests.conftest import run_python, without_overlay

SCENARIO = """
import json, sys
from vllm.entrypoints.openai.chat_completion import protocol as api
from vllm.entrypoints.serve.engine.protocol import ModelCard, UsageInfo

known = set(api.ChatCompletionRequest.model_fields)
read = []
for text in sys.argv[1:]:
    request = api.ChatCompletionRequest(**json.loads(text))
    sampling = request.to_sampling_params(request.max_tokens, {})
    read.append({
        "unknown": sorted(set(json.loads(text)) - known),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "seed": sampling.seed,
        "usage": request.stream_options.include_usage,
        "template": request.chat_template_kwargs,
    })


def event(text=None, reasoning=None, finish=None, usage=None, logprob=None):
    logprobs = None
    if logprob is not None:
        top = [api.ChatCompletionLogProb(token=text, logprob=logprob), api.ChatCompletionLogProb(token="?", logprob=-3)]
        content = api.ChatCompletionLogProbsContent(token=text, logprob=logprob, top_logprobs=top)
        logprobs = api.ChatCompletionLogProbs(content=[content])
    delta = api.DeltaMessage(content=text, reasoning=reasoning)
    choice = api.ChatCompletionResponseStreamChoice(index=0, delta=delta, logprobs=logprobs, finish_reason=finish)
    choices = [] if usage else [choice]
    return api.ChatCompletionStreamResponse(model="glm", choices=choices, usage=usage)


usage = UsageInfo(prompt_tokens=7, completion_tokens=4, total_tokens=11)
events = [event(""), event(None, "hm "), event("Paris", logprob=-0.1), event("!", logprob=-0.2)]
events += [event(None, finish="stop"), event(usage=usage)]
lines = [f"data: {made.model_dump_json(exclude_unset=True)}" for made in events] + ["", "data: [DONE]"]
print(json.dumps({"read": read, "lines": lines, "card": sorted(ModelCard.model_fields)}))
"""


@pytest.fixture(scope="module")
def vllm() -> dict:
    requests = [body("glm", "Hello", 24), body("glm", "Hello", 9, temperature=0.7, ignore_eos=True, top=5)]
    return run_python(SCENARIO, without_overlay(os.environ), *map(json.dumps, requests))


def test_vllm_reads_the_requests_as_they_are_meant(vllm):
    plain, rich = vllm["read"]
    assert plain["unknown"] == rich["unknown"] == []
    assert (plain["max_tokens"], plain["temperature"], plain["ignore_eos"], plain["logprobs"]) == (24, 0.0, False, None)
    assert (rich["max_tokens"], rich["temperature"], rich["ignore_eos"], rich["logprobs"]) == (9, 0.7, True, 5)
    assert plain["usage"] is True and plain["template"] == {"enable_thinking": False} and plain["seed"] == 0


def test_the_kit_reads_the_stream_that_vllm_writes(vllm):
    stream = Stream(0.0)
    ends = [stream.take(line.encode()) for line in vllm["lines"]]
    assert ends == [False] * (len(ends) - 1) + [True]
    answer = stream.answer()
    assert (answer.text, answer.finish) == ("hm Paris!", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 4)
    assert [token.text for token in answer.tokens] == ["Paris", "!"]
    assert answer.tokens[0].top == {"Paris": -0.1, "?": -3}


def test_the_model_card_tells_the_context_length(vllm):
    assert {"id", "max_model_len"} <= set(vllm["card"])
