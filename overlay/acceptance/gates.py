"""The gates a served model passes, in order from cheap to costly. Each catches a fault that people met on 12.x."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from overlay.acceptance import texts
from overlay.acceptance.canaries import divergence, misplaced, repeated_unit, steps
from overlay.acceptance.client import Answer, Client, Fault

ANSWER_TOKENS = 96  # room for three codes with some words around them
TOP = 5  # alternatives asked for where two answers are compared
NEEDLE_DEPTHS = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Plan:
    """Sizes, in tokens unless named otherwise."""

    needles: Mapping[str, int]
    rows: tuple[int, ...]  # lengths of the short prompts: a prompt of 64 to 256 tokens is a batch of as many rows
    decode_from: int
    decode_to: int
    repeat: int  # longer than any block of the KV cache, or nothing is cached (8,704 tokens at TP 1 with fp8 rows)
    batches: tuple[int, ...]  # requests at once
    canary: int
    speed: int


FULL = Plan(
    needles={"8k": 8_000, "30k": 30_000, "88k": 88_000, "230k": 230_000},
    rows=(48, 64, 96, 128, 192, 256, 320),
    decode_from=23_000,
    decode_to=26_000,
    repeat=18_000,
    batches=(64, 128, 256),
    canary=256,
    speed=256,
)
# For tiny models and a first look. 2048 is the sparse indexer's own width: below it nothing is selected.
QUICK = Plan(
    needles={"8k": 8_000},
    rows=(64, 160, 256),
    decode_from=1_900,
    decode_to=2_200,
    repeat=3_000,
    batches=(64, 96),
    canary=96,
    speed=64,
)


@dataclass(frozen=True)
class Outcome:
    """What a gate found: `symptom` is None where it passed, else a key of `pointers.POINTERS`."""

    detail: str
    symptom: str | None = None
    measured: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Session:
    """One run of the kit against one server."""

    client: Client
    plan: Plan
    seed: int
    longest: int | None  # max_model_len, None where the server does not say
    say: Callable[[str], None]
    line_tokens: float = 0.0  # tokens of one log line, measured

    async def log_lines(self, tokens: int) -> int:
        """How many log lines make a prompt of about `tokens` tokens, by the server's own count."""
        if not self.line_tokens:
            short = await self.client.ask("\n".join(texts.lines(20, self.seed)), 1, ignore_eos=True)
            long = await self.client.ask("\n".join(texts.lines(60, self.seed)), 1, ignore_eos=True)
            self.line_tokens = (long.prompt_tokens - short.prompt_tokens) / 40
            if self.line_tokens <= 0:
                raise Fault("malformed", "usage.prompt_tokens does not grow with the prompt")
        return max(int(tokens / self.line_tokens), 1)


@dataclass(frozen=True)
class Gate:
    """`needs` is the context in tokens that the gate takes; `trained` says that random weights cannot pass it."""

    name: str
    title: str
    run: Callable[[Session], Awaitable[Outcome]]
    needs: int = 0
    trained: bool = False


def gates(plan: Plan) -> list[Gate]:
    """Every gate of a plan, in the order they run."""
    needles = [
        Gate(
            f"needle-{name}",
            f"three facts found in {size:,} tokens",
            lambda session, size=size: needle(session, size),
            size + 1_000,
            True,
        )
        for name, size in plan.needles.items()
    ]
    first, rest = needles[:1], needles[1:]
    decode_title = f"decode from {plan.decode_from:,} past {plan.decode_to:,} tokens of context"
    return [
        Gate("health", "/health answers 200 and the model is listed", health),
        Gate("repetition", "four short answers say something and do not repeat one unit", repetition),
        Gate("rows", f"a fact found in prompts of {steps(plan.rows)} tokens", rows, 1_000, True),
        Gate("batch", f"{steps(plan.batches)} requests at once agree with the same request alone", batch),
        Gate("echo", f"{plan.batches[-1]} requests at once each get their own answer", echo, 0, True),
        Gate("prefix", "the same prompt twice gives the same distribution", prefix, plan.repeat + 1_000),
        *first,
        Gate("decode", decode_title, decode, plan.decode_to + 1_000),
        *rest,
        Gate("replacement", "no U+FFFD in any answer so far", replacement),
    ]


async def health(session: Session) -> Outcome:
    status, body = await session.client.get("/health")
    if status != 200:
        return Outcome(f"/health answered {status}: {body[:200]}", "unhealthy")
    card = await session.client.card()
    return Outcome(f"{card['id']}, max_model_len {card.get('max_model_len', 'not told')}")


async def repetition(session: Session) -> Outcome:
    for prompt in texts.CANARIES:
        answer = await session.client.ask(prompt, session.plan.canary)
        if (bad := garbage(answer)) is not None:
            return Outcome(f"{bad} (to {prompt[:40]!r}...)", "repeated")
    return Outcome(f"{len(texts.CANARIES)} answers of up to {session.plan.canary} tokens")


def garbage(answer: Answer) -> str | None:
    """What is wrong with an answer whatever the question was, or None."""
    if not answer.text.strip():
        return f"an answer of {answer.completion_tokens} tokens has no text"
    if (unit := repeated_unit(answer.text)) is not None:
        return f"an answer ends in {unit!r} over and over"
    return None


async def rows(session: Session) -> Outcome:
    """Facts in short prompts, one request at a time."""
    for size in session.plan.rows:
        prompt, hidden = texts.haystack(max(await session.log_lines(size) - 3, 1), session.seed + size, (0.5,))
        answer = await session.client.ask(prompt, ANSWER_TOKENS)
        if (bad := garbage(answer)) is not None:
            return Outcome(f"prompt of {answer.prompt_tokens} tokens: {bad}", "repeated")
        if hidden[0] not in answer.text:
            told = f"prompt of {answer.prompt_tokens} tokens: {hidden[0]} expected, {answer.text[:60]!r} answered"
            return Outcome(told, "rows")
    return Outcome(f"found in all {len(session.plan.rows)}")


async def needle(session: Session, size: int) -> Outcome:
    """Facts at three depths of one long prompt."""
    prompt, hidden = texts.haystack(await session.log_lines(size), session.seed + size, NEEDLE_DEPTHS)
    answer = await session.client.ask(prompt, ANSWER_TOKENS)
    measured = {"prompt_tokens": answer.prompt_tokens, "first_token_s": round(answer.first, 2)}
    if (bad := garbage(answer)) is not None:
        return Outcome(bad, "repeated", measured)
    lost = [depth for depth, code in zip(NEEDLE_DEPTHS, hidden, strict=True) if code not in answer.text]
    if lost:
        where = ", ".join(f"{depth:.0%}" for depth in lost)
        told = f"lost at depth {where} of {answer.prompt_tokens:,} tokens; answered {answer.text[:80]!r}"
        return Outcome(told, "needle", measured)
    per_second = answer.prompt_tokens / answer.first
    told = f"3 of 3 in {answer.prompt_tokens:,} tokens, first token after {answer.first:.1f} s ({per_second:,.0f}/s)"
    return Outcome(told, None, measured)


async def decode(session: Session) -> Outcome:
    """Generation that crosses the context length at which top-k kernels of GB10 died."""
    plan = session.plan
    wanted = plan.decode_to - plan.decode_from
    prompt = texts.continuation(await session.log_lines(plan.decode_from), session.seed + 7)
    answer = await session.client.ask(prompt, wanted, temperature=0.7, ignore_eos=True)
    measured = {"prompt_tokens": answer.prompt_tokens, "tokens_per_second": round(answer.rate, 2)}
    if answer.completion_tokens < wanted:
        told = f"{answer.completion_tokens} of {wanted} tokens came, finish reason {answer.finish!r}"
        return Outcome(told, "decode", measured)
    if (bad := garbage(answer)) is not None:
        return Outcome(bad, "repeated", measured)
    reached = answer.prompt_tokens + answer.completion_tokens
    return Outcome(f"context {answer.prompt_tokens:,} to {reached:,}, {answer.rate:.1f} tokens/s", None, measured)


async def prefix(session: Session) -> Outcome:
    """One prompt twice: the second time its rows come from the prefix cache."""
    prompt, _ = texts.haystack(await session.log_lines(session.plan.repeat), session.seed + 11, (0.5,))
    hits = await session.client.metric("vllm:prefix_cache_hits_total")
    first = await session.client.ask(prompt, 64, ignore_eos=True, top=TOP)
    second = await session.client.ask(prompt, 64, ignore_eos=True, top=TOP)
    now = await session.client.metric("vllm:prefix_cache_hits_total")
    cached = int(now - hits) if hits is not None and now is not None else second.cached
    measured = {"cached_tokens": cached, "first_token_s": [round(first.first, 3), round(second.first, 3)]}
    if why := mismatch(first, second):
        return Outcome(why, "prefix", measured)
    if cached is None:
        told = "agree; whether the cache was hit is not told (no /metrics)"
    elif cached:
        told = f"agree with {cached:,} tokens from the cache"
    else:
        told = "agree, but nothing came from the cache: prefix caching is off, so this shows nothing about it"
    return Outcome(told, None, measured)


def mismatch(one: Answer, other: Answer) -> str | None:
    """Why two greedy answers to one prompt do not fit together, or None."""
    if not one.tokens or not other.tokens:
        return "the server returned no log-probabilities, so two answers cannot be compared"
    if garbage(one) is None and (bad := garbage(other)) is not None:
        return bad  # where the first is garbage too, the repetition gate is the one to say so
    return divergence(one.tokens, other.tokens)


async def batch(session: Session) -> Outcome:
    """Eight prompts alone, then each among many others at once."""
    sample = 8
    prompts = [texts.echo(code) for code in texts.codes(max(session.plan.batches), session.seed + 13)]
    alone = [await session.client.ask(prompt, 24, ignore_eos=True, top=TOP) for prompt in prompts[:sample]]
    peaks = []
    for width in session.plan.batches:
        session.say(f"{width} at once")
        together, peak = await at_once(session.client, prompts[:width], 24, top=TOP)
        peaks.append(peak)
        for row, answer in enumerate(together):
            why = mismatch(alone[row], answer) if row < sample else garbage(answer)
            if why:
                return Outcome(f"row {row} of {width}: {why}", "batch")
    return Outcome("agree" + running(peaks), None, {"running": peaks})


async def echo(session: Session) -> Outcome:
    """Every row's answer is its own."""
    codes = texts.codes(session.plan.batches[-1], session.seed + 17)
    answers, peak = await at_once(session.client, [texts.echo(code) for code in codes], 24)
    silent, crossed = misplaced([answer.text for answer in answers], codes)
    measured = {"silent": len(silent), "crossed": len(crossed), "running": peak}
    if crossed:
        row, owner = crossed[0]
        return Outcome(f"{len(crossed)} answers hold another row's code; row {row} has row {owner}'s", "echo", measured)
    if silent:
        text = answers[silent[0]].text[:60]
        return Outcome(f"{len(silent)} of {len(codes)} lack their code; row {silent[0]}: {text!r}", "rows", measured)
    return Outcome(f"all {len(codes)}" + running([peak]), None, measured)


async def at_once(
    client: Client, prompts: Sequence[str], max_tokens: int, top: int = 0
) -> tuple[list[Answer], int | None]:
    """Answers to all prompts sent at the same time, and the most the server says it ran at once (None: not told)."""
    peak: float | None = None

    async def watch() -> None:
        nonlocal peak
        while (now := await client.metric("vllm:num_requests_running")) is not None:
            peak = max(now, peak or 0.0)
            await asyncio.sleep(0.1)

    watcher = asyncio.create_task(watch())
    try:
        asked = (client.ask(prompt, max_tokens, ignore_eos=top > 0, top=top) for prompt in prompts)
        answers = await asyncio.gather(*asked, return_exceptions=True)
    finally:
        watcher.cancel()
    faults = [answer for answer in answers if isinstance(answer, BaseException)]
    if faults and isinstance(faults[0], Fault):
        raise Fault(faults[0].kind, f"{len(faults)} of {len(prompts)} requests at once failed; the first: {faults[0]}")
    if faults:
        raise faults[0]
    return answers, None if peak is None else int(peak)


def running(peaks: Sequence[int | None]) -> str:
    """What the server told about its batches: --max-num-seqs may be smaller than what was sent."""
    told = [peak for peak in peaks if peak is not None]
    return f"; the server ran at most {steps(told)} at once" if told else ""


async def replacement(session: Session) -> Outcome:
    found = session.client.answers_with_replacement
    if found:
        return Outcome(f"{len(found)} answers hold U+FFFD; the first: {found[0]!r}", "replacement")
    return Outcome("none")
