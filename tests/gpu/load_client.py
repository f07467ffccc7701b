"""Clients that put a server under load: they ask, give up half way, send nonsense, and note what came of it."""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from tests.gpu.load_cases import MIX, Tally, answer_of, joined, malformed, prompts, request, weights

PATIENCE_S = 120.0  # without a byte: a request that waits longer hangs


class Server:
    """One model behind /v1/completions, and what is known of it."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession) -> None:
        self.url, self.model, self.session = url, model, session
        self.prompts = prompts()
        self.malformed = malformed(model, self.prompts[5])
        self.tally = Tally()
        self.alone: list[dict[str, Any]] = []

    async def post(self, body: bytes | Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and body of one request that is not streamed."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + "/v1/completions", data=data, headers=_JSON) as answer:
            return answer.status, await answer.read()

    async def whole(self, number: int) -> dict[str, Any]:
        """A whole answer to prompt `number`. Raises Refused."""
        status, said = await self.post(request(self.model, self.prompts[number], stream=False))
        if status != 200:
            raise Refused(status, said)
        return answer_of(json.loads(said)["choices"][0])

    async def streamed(self, number: int, pieces: int | None = None) -> dict[str, Any] | None:
        """A streamed answer; with `pieces`, hang up after so many of them (None is returned). Raises Refused."""
        body = json.dumps(request(self.model, self.prompts[number], stream=True)).encode()
        seen: list[dict[str, Any]] = []
        async with self.session.post(self.url + "/v1/completions", data=body, headers=_JSON) as answer:
            if answer.status != 200:
                raise Refused(answer.status, await answer.read())
            async for line in answer.content:
                if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise Refused(200, line)
                seen += event["choices"]
                if pieces is not None and len(seen) >= pieces:
                    answer.close()
                    return None
        return answer_of(joined(seen))

    async def ask_alone(self) -> list[dict[str, Any]]:
        """All prompts, one at a time."""
        return [await self.whole(number) for number in range(len(self.prompts))]


_JSON = {"Content-Type": "application/json"}


class Refused(Exception):
    """A request that should have been answered was not."""

    def __init__(self, status: int, said: bytes) -> None:
        super().__init__(f"HTTP {status}: {said[:300].decode(errors='replace')}")


def session() -> aiohttp.ClientSession:
    """No limit on connections, none on the whole of a request, PATIENCE_S on silence."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=PATIENCE_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def load(server: Server, clients: int, seconds: float, seed: int = 0) -> None:
    """`clients` of them for `seconds`; returns when the last request has ended. All counts go to `server.tally`."""
    until = time.monotonic() + seconds
    await asyncio.gather(*(_client(server, until, random.Random(f"{seed} {number}")) for number in range(clients)))


async def _client(server: Server, until: float, draw: random.Random) -> None:
    shares = weights([len(prompt) for prompt in server.prompts])
    while time.monotonic() < until:
        (kind,) = draw.choices(list(MIX), list(MIX.values()))
        (number,) = draw.choices(range(len(server.prompts)), shares)
        try:
            await _one(server, kind, number, draw)
        except Refused as error:
            server.tally.problem("lost", f"prompt {number}, {kind}: {error}")
        except TimeoutError:
            server.tally.problem("hung", f"prompt {number}, {kind}: nothing for {PATIENCE_S:.0f} s")
        except aiohttp.ClientError as error:
            server.tally.problem("dropped", f"prompt {number}, {kind}: {type(error).__name__}: {error}")
            await asyncio.sleep(1.0)  # a server that is gone would be asked in a tight loop
        except (ValueError, KeyError, TypeError) as error:
            server.tally.problem("unreadable", f"prompt {number}, {kind}: {type(error).__name__}: {error}")


async def _one(server: Server, kind: str, number: int, draw: random.Random) -> None:
    tally = server.tally
    if kind == "malformed":
        name = draw.choice(list(server.malformed))
        status, _ = await server.post(server.malformed[name])
        tally.refused(name, str(status))
    elif kind == "aborted":
        await server.streamed(number, pieces=draw.randint(1, 8))
        tally.outcomes["aborted"] += 1
    elif kind == "cancelled":
        try:
            async with asyncio.timeout(draw.uniform(0.001, 0.15)) as patience:
                await server.whole(number)
        except TimeoutError:
            if not patience.expired():
                raise
            tally.outcomes["cancelled"] += 1
        else:
            tally.outcomes["too fast to cancel"] += 1
    else:
        answer = await (server.streamed(number) if kind == "streamed" else server.whole(number))
        tally.outcomes[kind] += 1
        tally.see(number, server.prompts[number], answer, server.alone)


async def idle(server: Server, names: Sequence[str], seconds: float = 60.0) -> dict[str, float]:
    """The metrics `names` once all are 0, or after `seconds`: requests and cache blocks of nobody."""
    deadline = time.monotonic() + seconds
    while True:
        async with server.session.get(server.url + "/metrics") as answer:
            found = _metrics(await answer.text(), names)
        if (set(found) == set(names) and not any(found.values())) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def _metrics(text: str, names: Sequence[str]) -> dict[str, float]:
    """Sums over all labels of Prometheus metrics."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found
