"""Streamed chat requests to an OpenAI-compatible server, with every way a stream can go wrong told apart.

A hung engine, a stream that ends early, an HTTP error and a closed port have different causes, so each is a `Fault` of
its own kind. aiohttp is the client because vLLM itself requires it.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.http import HttpProcessingError

from overlay.errors import OverlayError

CONNECT_SECONDS = 10.0
# Within a stream: a first use of a batch shape may compile for a minute, and no healthy server is silent for longer.
BETWEEN_TOKENS_SECONDS = 120.0
BODY_CHARACTERS = 300


class Fault(Exception):
    """A request that got no complete answer. `kind` is "refused", "http", "dropped", "hang" or "malformed"."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


class UsageError(OverlayError):
    """The acceptance kit cannot be run as asked."""


@dataclass(frozen=True)
class Token:
    """One generated token, its log-probability and the alternatives the server listed for its position."""

    text: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """One complete answer. Times are seconds since the request was sent; `cached` is None where not reported."""

    text: str
    tokens: tuple[Token, ...]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    cached: int | None
    first: float
    total: float

    @property
    def rate(self) -> float:
        """Tokens per second after the first; 0 where there was nothing to time."""
        spent = self.total - self.first
        return (self.completion_tokens - 1) / spent if self.completion_tokens > 1 and spent > 0 else 0.0


class Client:
    """One model of one server. `patience` is how many seconds the first token of an answer may take."""

    def __init__(self, url: str, model: str | None, patience: float) -> None:
        self.url = base(url)
        self.model = model
        self.patience = patience
        self.answers_with_replacement: list[str] = []  # pieces of text around a U+FFFD, in the order they came

    async def __aenter__(self) -> "Client":
        # The variable that OpenAI's own client reads, for a server that was started with --api-key.
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No limit on connections: a batch of 256 requests must arrive as one.
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def get(self, path: str, seconds: float = 30.0) -> tuple[int, str]:
        """Status and body of a GET. Raises Fault ("refused", "hang")."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self.session.get(self.url + path, timeout=timeout) as response:
                return response.status, await response.text(errors="replace")
        except TimeoutError:
            raise Fault("hang", f"{path} did not answer within {seconds:.0f} s") from None
        except aiohttp.ClientError as error:
            raise Fault("refused", f"{self.url}{path}: {reason(error)}") from None

    async def card(self) -> Mapping[str, Any]:
        """The model's entry in /v1/models (the first one where no name was given). Raises Fault and UsageError."""
        status, said = await self.get("/v1/models")
        if status != 200:
            raise Fault("http", f"/v1/models answered {status}: {said[:BODY_CHARACTERS]}{key_hint(status)}")
        try:
            cards = {card["id"]: card for card in json.loads(said)["data"]}
        except (ValueError, KeyError, TypeError):
            raise Fault("malformed", f"/v1/models is not a list of models: {said[:BODY_CHARACTERS]}") from None
        if not cards:
            raise Fault("malformed", "/v1/models lists no model")
        if self.model is None:
            self.model = next(iter(cards))
        if self.model not in cards:
            raise UsageError(f"{self.url} serves {', '.join(cards)}, not {self.model!r}; correct --model")
        return cards[self.model]

    async def metric(self, name: str) -> float | None:
        """Sum of a Prometheus metric over its labels; None where /metrics does not have it."""
        try:
            status, said = await self.get("/metrics")
        except Fault:
            return None
        number = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)"
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? {number}$", said, re.M | re.I) if status == 200 else []
        return sum(map(float, values)) if values else None

    async def ask(
        self,
        prompt: str,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        ignore_eos: bool = False,
        top: int = 0,
    ) -> Answer:
        """One streamed answer to one user message, without thinking. `top` > 0 asks for that many log-probabilities.

        Raises Fault for anything but a complete stream.
        """
        request = body(self.model, prompt, max_tokens, temperature, ignore_eos, top)
        stream = Stream(time.monotonic())
        connecting = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        clock = asyncio.get_running_loop().time
        try:
            async with (
                asyncio.timeout(self.patience) as silence,
                self.session.post(self.url + "/v1/chat/completions", json=request, timeout=connecting) as response,
            ):
                if response.status != 200:
                    said = await response.text(errors="replace")
                    raise Fault("http", f"HTTP {response.status}: {said[:BODY_CHARACTERS]}{key_hint(response.status)}")
                async for line in response.content:
                    before = len(stream.pieces)
                    if stream.take(line):
                        break
                    if len(stream.pieces) > before:  # comments that keep a connection open are not tokens
                        silence.reschedule(clock() + min(self.patience, BETWEEN_TOKENS_SECONDS))
        except TimeoutError:
            raise Fault("hang", stream.silence()) from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionResetError) as error:
            raise Fault("dropped", f"{stream.progress()}, then the connection broke: {error}") from None
        except aiohttp.ClientError as error:
            raise Fault("refused", reason(error)) from None
        except (ValueError, HttpProcessingError) as error:  # older and newer aiohttp, for a line that does not end
            said = str(error)[:BODY_CHARACTERS]
            raise Fault("malformed", f"{stream.progress()}, then what is no stream of events: {said}") from None
        answer = stream.answer()
        # A stream cut by max_tokens may end inside a character; anywhere else the character is damage.
        kept = answer.text[:-1] if answer.finish == "length" else answer.text
        if (place := kept.find("\ufffd")) >= 0:
            self.answers_with_replacement.append(kept[max(place - 30, 0) : place + 30])
        return answer


def base(url: str) -> str:
    """The server's address without /v1; `localhost:8000` gets its http://. Raises UsageError."""
    address = url.strip() if "://" in url else f"http://{url.strip()}"
    if not re.match(r"https?://[^/\s]+", address):
        raise UsageError(f"--url {url}: is no address of a server; it looks like http://localhost:8000")
    return re.sub(r"/v1$", "", address.rstrip("/"))


def reason(error: aiohttp.ClientError) -> str:
    """Why a request did not get through, in the operating system's words where it has some."""
    if isinstance(error, aiohttp.ClientConnectorError) and (error.errno or 0) > 0:
        return f"{error.host}:{error.port}: {os.strerror(error.errno)}"
    return str(error) or type(error).__name__


def key_hint(status: int) -> str:
    return "; the server wants a key: set OPENAI_API_KEY" if status == 401 else ""


def body(
    model: str | None, prompt: str, max_tokens: int, temperature: float = 0.0, ignore_eos: bool = False, top: int = 0
) -> dict[str, Any]:
    """The JSON of one request to /v1/chat/completions. Seeded, so that sampling is repeatable as well."""
    request: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    if ignore_eos:
        request["ignore_eos"] = True
    if top:
        request |= {"logprobs": True, "top_logprobs": top}
    return request


class Stream:
    """Server-sent events of one answer, put together."""

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.first: float | None = None
        self.last = sent
        self.pieces: list[str] = []
        self.tokens: list[Token] = []
        self.finish: str | None = None
        self.usage: Mapping[str, Any] = {}

    def take(self, line: bytes) -> bool:
        """Use one line; True at the end of the stream. Raises Fault for an error event or what is not JSON."""
        text = line.decode("utf-8", errors="replace").strip()
        if not text.startswith("data:"):
            return False
        data = text[5:].strip()
        if data == "[DONE]":
            return True
        try:
            event = json.loads(data)
            if "error" in event:
                raise Fault("http", f"{self.progress()}, then an error event: {data[:BODY_CHARACTERS]}")
            self._use(event)
        except (ValueError, TypeError, AttributeError, KeyError):
            raise Fault("malformed", f"an event is not one of a chat completion: {data[:BODY_CHARACTERS]}") from None
        return False

    def _use(self, event: Mapping[str, Any]) -> None:
        self.usage = dict(event.get("usage") or self.usage)
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            piece = (delta.get("reasoning") or delta.get("reasoning_content") or "") + (delta.get("content") or "")
            self.finish = choice.get("finish_reason") or self.finish
            if piece or choice.get("logprobs"):
                self.last = time.monotonic()
                self.first = self.first or self.last
                self.pieces.append(piece)
            for token in (choice.get("logprobs") or {}).get("content") or ():
                top = {entry["token"]: entry["logprob"] for entry in token.get("top_logprobs") or ()}
                self.tokens.append(Token(token["token"], float(token["logprob"]), top))

    def progress(self) -> str:
        return f"{len(self.pieces)} pieces arrived" if self.pieces else "nothing arrived"

    def silence(self) -> str:
        return f"{self.progress()}, then nothing for {time.monotonic() - self.last:.0f} s"

    def answer(self) -> Answer:
        """The finished answer; Fault where the stream ended without saying why."""
        if self.finish is None:
            raise Fault("dropped", f"{self.progress()}, then the stream ended without a finish reason")
        first = self.first or self.last
        details = self.usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(self.pieces),
            tokens=tuple(self.tokens),
            finish=self.finish,
            prompt_tokens=self.usage.get("prompt_tokens") or 0,
            completion_tokens=self.usage.get("completion_tokens") or len(self.pieces),
            cached=details.get("cached_tokens"),
            first=first - self.sent,
            total=self.last - self.sent,
        )
