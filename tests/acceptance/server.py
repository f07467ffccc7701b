"""A small OpenAI-compatible server that behaves, or misbehaves in one chosen way; its tokens are words."""

import asyncio
import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

ENGINE = web.AppKey("engine", object)
# fault -> what stands in place of an event
NO_EVENTS = {"no-json": b"data: {oops\n\n", "odd-event": b"data: [1]\n\n", "endless-line": b"data: " + b"x" * (1 << 20)}
VOCABULARY = ("amber", "basin", "cliff", "delta", "ember", "fjord", "grove", "heath", "inlet", "knoll", "ledge", "moor")


@dataclass
class Engine:
    """Answers like a trained model. `fault` names one way not to; `where` is the context in words where it begins."""

    fault: str = ""
    where: int = 0
    longest: int = 65_536
    dead: bool = False
    running: int = 0
    peak: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    last: str = ""

    def words(self, prompt: str, wanted: int, endless: bool) -> list[str]:
        """The answer to a prompt, as pieces that join to its text."""
        size = len(prompt.split())
        again = self.seen.get(prompt, 0)
        self.seen[prompt] = again + 1
        if self.fault == "crossed" and self.running > 8 and self.last:
            prompt, self.last = self.last, prompt
        else:
            self.last = prompt
        if self.fault == "one-token" and size >= self.where:
            return ["lock"] * wanted
        if self.fault == "nan-rows" and 64 <= size <= 256:
            return ["!"] * wanted
        if self.fault == "empty":
            return [""] * wanted
        text = self.reply(prompt)
        if self.fault == "wrong-needle":
            text = re.sub(r"\d{6}", lambda found: str(1_100_000 - int(found[0])), text)
        other = (self.fault == "drift" and again) or (self.fault == "wide-batch" and self.running > 32)
        draw = random.Random(prompt + ("again" if other else ""))
        pieces = [f"{word} " for word in text.split()]
        if self.fault == "drift" and again:
            pieces = []
        while len(pieces) < wanted and (endless or not text):
            pieces.append(f"{draw.choice(VOCABULARY)}{draw.randrange(1000)} ")
        if self.fault == "replacement":
            pieces.insert(len(pieces) // 2, "ca\ufffd ")
        if self.fault == "ends-early" and wanted > 100:
            wanted //= 2
        return pieces[:wanted]

    def reply(self, prompt: str) -> str:
        if found := re.match(r"Reply with this code and nothing else: (\d+)", prompt):
            return found[1]
        if asked := re.search(r"depots: (.+)\? Answer", prompt):
            code = {place: number for place, number in re.findall(r"code of the (\w+) depot is (\d+)", prompt)}
            return ", ".join(code[place] for place in asked[1].split(", "))
        return ""


async def chat(request: web.Request) -> web.StreamResponse:
    engine: Engine = request.app[ENGINE]
    body = await request.json()
    prompt = body["messages"][-1]["content"]
    if engine.fault == "locked" and request.headers.get("Authorization") != "Bearer open sesame":
        return web.json_response({"error": "Unauthorized"}, status=401)
    size = len(prompt.split())
    here = size >= engine.where
    if engine.dead or (engine.fault == "http-500" and here):
        return web.json_response({"error": {"message": "EngineDeadError", "code": 500}}, status=500)
    engine.running += 1
    engine.peak = max(engine.peak, engine.running)
    try:
        if engine.fault == "hang" and here:
            await asyncio.sleep(60)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if prompt.startswith("Reply"):
            await asyncio.sleep(0.1)  # so that a batch overlaps
            if engine.running > 8:
                await asyncio.sleep(0.5)  # and is seen by who polls /metrics
        pieces = engine.words(prompt, body["max_tokens"], body.get("ignore_eos", False))
        for number, piece in enumerate(pieces):
            if engine.fault == "dies-decoding" and size + number > engine.where:
                engine.dead = True
                request.transport.close()
                return response
            if engine.fault == "stalls" and number == 3:
                await asyncio.sleep(60)
            if engine.fault == "dropped" and here and number == 3:
                return response
            if engine.fault in NO_EVENTS and number == 3:
                await response.write(NO_EVENTS[engine.fault])
                return response
            if engine.fault == "error-event" and number == 3:
                await send(response, {"error": {"message": "EngineDeadError"}})
                return response
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            if body.get("logprobs"):
                entry = {"token": piece, "logprob": -0.2}
                choice["logprobs"] = {"content": [{**entry, "top_logprobs": [entry]}]}
            await send(response, {"choices": [choice]})
        finish = "length" if len(pieces) == body["max_tokens"] else "stop"
        await send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        usage = {"prompt_tokens": size, "completion_tokens": len(pieces)}
        await send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response
    finally:
        engine.running -= 1


async def send(response: web.StreamResponse, event: dict) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def health(request: web.Request) -> web.Response:
    return web.Response(status=503 if request.app[ENGINE].dead else 200)


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "glm", "max_model_len": request.app[ENGINE].longest}]})


async def metrics(request: web.Request) -> web.Response:
    engine: Engine = request.app[ENGINE]
    hits = 100 * sum(times - 1 for times in engine.seen.values())
    lines = (
        f'vllm:num_requests_running{{engine="0"}} {float(engine.running)}',
        f'vllm:prefix_cache_hits_total{{engine="0"}} {float(hits)}',
    )
    return web.Response(text="\n".join(lines) + "\n")


async def version(_: web.Request) -> web.Response:
    return web.json_response({"version": "0.33.0"})


@contextmanager
def serve(engine: Engine) -> Iterator[str]:
    """Serve `engine` in a thread of its own; yields its address."""
    app = web.Application(client_max_size=64 << 20)
    app[ENGINE] = engine
    routes = (("/health", health), ("/v1/models", models), ("/metrics", metrics), ("/version", version))
    app.add_routes([web.get(path, handler) for path, handler in routes])
    app.add_routes([web.post("/v1/chat/completions", chat)])
    ready, address = threading.Event(), []
    loop = asyncio.new_event_loop()
    stopped = asyncio.Event()

    async def live() -> None:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        await stopped.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),), daemon=True)
    thread.start()
    assert ready.wait(10), "the server did not start"
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        loop.close()
