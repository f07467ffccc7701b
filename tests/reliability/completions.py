"""A small /v1/completions server on token ids that behaves, or misbehaves in one chosen way."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tests.gpu.load_cases import LONGEST, NEW_TOKENS


class Engine:
    """Answers depend on the prompt alone. `fault`, and the `share` of requests that it befalls while others run."""

    def __init__(self, fault: str = "", share: float = 0.2) -> None:
        self.fault, self.share = fault, share
        self.draw = random.Random(3)
        self.running = 0
        self.leaked = 0
        self.last: list[int] = [1]

    def befalls(self, fault: str) -> bool:
        return self.fault == fault and self.running > 2 and self.draw.random() < self.share

    def choice(self, prompt: list[int]) -> dict[str, Any]:
        """The whole answer to a prompt, as vLLM sends it."""
        asked = prompt
        if self.befalls("crossed"):
            prompt = self.last
        self.last = asked
        draw = random.Random(json.dumps(prompt))
        tokens = [draw.randrange(300) for _ in range(NEW_TOKENS)]
        best = [-draw.random() for _ in tokens]
        if self.befalls("drift"):
            best = [value - 0.3 for value in best]
        if self.befalls("lost"):
            tokens = tokens[: NEW_TOKENS // 2]
        if self.befalls("nan"):
            best[-1] = float("nan")
        tops = [
            {f"token_id:{t}": b, "token_id:301": b - 1.0} for t, b in zip(tokens, best, strict=False)
        ]  # a clear margin
        logprobs = {"token_logprobs": best[: len(tokens)], "top_logprobs": tops}
        return {"token_ids": tokens, "prompt_token_ids": asked, "logprobs": logprobs, "finish_reason": "length"}


def refusal(body: Any) -> int | None:
    """The status that a malformed request gets."""
    if not isinstance(body, dict):
        return 400
    prompt, bounds = body.get("prompt"), {"temperature": 2, "max_tokens": 10**5, "logprobs": 20}
    if not isinstance(prompt, list) or not prompt or len(prompt) + body["max_tokens"] > LONGEST:
        return 400
    if not all(isinstance(token, int) and 0 <= token < 320 for token in prompt):
        return 400
    if body["model"] != "tiny":
        return 404
    good = all(isinstance(body[k], int | float) and 0 <= body[k] <= limit for k, limit in bounds.items())
    return None if good else 400


def application(engine: Engine) -> web.Application:
    async def completions(request: web.Request) -> web.StreamResponse:
        engine.running += 1
        try:
            return await complete(request)
        finally:
            engine.running -= 1

    async def complete(request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
        except ValueError:
            body = None
        if (status := refusal(body)) is not None:
            status = 500 if engine.fault == "errors" else status
            return web.json_response({"error": {"message": "no"}}, status=status)
        if engine.befalls("fails"):
            return web.json_response({"error": {"message": "EngineDeadError"}}, status=500)
        choice = engine.choice(body["prompt"])
        if not body["stream"]:
            await asyncio.sleep(0.05)
            return web.json_response({"choices": [choice]})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        cut = NEW_TOKENS // 3 if engine.befalls("cut") else NEW_TOKENS
        for step in range(0, cut, 2):
            last = step + 2 >= len(choice["token_ids"])
            piece = {
                "token_ids": choice["token_ids"][step : step + 2],
                "prompt_token_ids": choice["prompt_token_ids"] if step == 0 else None,
                "logprobs": {key: values[step : step + 2] for key, values in choice["logprobs"].items()},
                "finish_reason": "length" if last else None,
            }
            try:
                await answer.write(b"data: " + json.dumps({"choices": [piece]}).encode() + b"\n\n")
            except ConnectionError:
                engine.leaked += engine.fault == "leak"
                raise
            await asyncio.sleep(0.002)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def metrics(request: web.Request) -> web.Response:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        left = 3 if engine.fault == "leak" else 0
        return web.Response(text="".join(f'vllm:{name}{{model="tiny"}} {float(left)}\n' for name in names))

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.post("/v1/completions", completions), web.get("/metrics", metrics), web.get("/health", health)])
    return app


@contextmanager
def serve(engine: Engine) -> Iterator[int]:
    """The port of a running server, in a thread of this process."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(application(engine))

    async def up() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    port = loop.run_until_complete(up())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
