"""Runs the gates in order and notices when the engine behind them has died."""

import asyncio
import fnmatch
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

from overlay.acceptance.client import Client, Fault, UsageError
from overlay.acceptance.gates import Gate, Outcome, Plan, Session, gates
from overlay.acceptance.speed import speed
from overlay.config import nearest


class State(StrEnum):
    """PASSED, SKIPPED and BEYOND let the run pass, if at least one gate passed; the other two do not."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # deselected by name
    BEYOND = "beyond"  # needs more context than the server was started with
    NOT_RUN = "not run"  # the engine was gone by then, or the run was interrupted


BAD = (State.FAILED, State.NOT_RUN)


@dataclass(frozen=True)
class Result:
    """One gate's end. `symptom` is a key of `pointers.POINTERS`."""

    name: str
    title: str
    state: State
    detail: str
    seconds: float = 0.0
    symptom: str | None = None
    trained: bool = False
    measured: dict = field(default_factory=dict)


def select(plan: Plan, skip: Sequence[str]) -> list[tuple[Gate, bool]]:
    """Every gate with whether it is to run. Raises UsageError for a pattern that names none."""
    everything = [*gates(plan), Gate("speed", "tokens per second and time to first token", speed)]
    names = [gate.name for gate in everything]
    for pattern in skip:
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"--skip {pattern}: no gate is called that{nearest(pattern, names)}")
    return [(gate, not any(fnmatch.fnmatch(gate.name, pattern) for pattern in skip)) for gate in everything]


async def accept(
    url: str, model: str | None, plan: Plan, skip: Sequence[str], patience: float, seed: int, say: Callable[[str], None]
) -> dict[str, object]:
    """Run the kit; the report as JSON can hold it. Raises UsageError only: what a server does wrong is a result.

    Cancelled once, as asyncio.run does at Ctrl-C, it ends with the report of the gates so far.
    """
    chosen = select(plan, skip)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    async with Client(url, model, patience) as client:
        session = Session(client, plan, seed, None, say)
        try:
            longest = (await client.card()).get("max_model_len")
            session.longest = longest if isinstance(longest, int) else None
        except Fault:
            say("the server does not list its models")  # the health gate says why
        results: list[Result] = []
        dead: str | None = None
        for number, (gate, wanted) in enumerate(chosen, 1):
            say(f"[{number}/{len(chosen)}] {gate.name}: {gate.title}")
            told = any(earlier.state is State.NOT_RUN for earlier in results)
            try:
                result = await _one(session, gate, wanted, "as above" if dead and told else dead)
            except asyncio.CancelledError:  # Ctrl-C: what an hour of questions has found is not lost
                dead = "interrupted"
                result = await _one(session, gate, wanted, dead)
            results.append(result)
            if dead is None and result.state is State.FAILED:
                try:
                    dead = await _death(client)
                except asyncio.CancelledError:
                    dead = "interrupted"
            say(f"    {result.state}: {result.detail}" + (f" ({result.seconds:.1f} s)" if result.seconds else ""))
        version = await _version(client)
    return {
        "url": client.url,
        "model": client.model,
        "vllm": version,
        "started": started,
        "seed": seed,
        "plan": asdict(plan),
        "max_model_len": session.longest,
        "passed": not any(result.state in BAD for result in results)
        and any(result.state is State.PASSED for result in results),
        "engine": dead or "answers /health",
        "gates": [asdict(result) for result in results],
    }


async def _one(session: Session, gate: Gate, wanted: bool, dead: str | None) -> Result:
    def ended(state: State, detail: str, **more: object) -> Result:
        return Result(gate.name, gate.title, state, detail, trained=gate.trained, **more)

    if not wanted:
        return ended(State.SKIPPED, "deselected by --skip")
    if dead is not None:
        return ended(State.NOT_RUN, dead)
    if session.longest is not None and gate.needs > session.longest:
        detail = f"needs {gate.needs:,} tokens of context; the server was started with {session.longest:,}"
        return ended(State.BEYOND, detail)
    begun = time.monotonic()
    try:
        outcome = await gate.run(session)
    except Fault as fault:
        outcome = Outcome(str(fault), fault.kind)
    return ended(
        State.PASSED if outcome.symptom is None else State.FAILED,
        outcome.detail,
        seconds=round(time.monotonic() - begun, 2),
        symptom=outcome.symptom,
        measured=dict(outcome.measured),
    )


async def _death(client: Client) -> str | None:
    """Why nothing more can be asked, or None where one more token comes.

    /v1/models answers after the engine died, and /health may while it hangs: only a token proves that it lives.
    """
    try:
        status, _ = await client.get("/health")
        if status != 200:
            return f"the engine is gone: /health answers {status}"
        await client.ask("Hello", 1, ignore_eos=True)
    except Fault as fault:
        return f"the server does not answer: {fault}"
    return None


async def _version(client: Client) -> str | None:
    try:
        status, body = await client.get("/version")
    except Fault:
        return None
    return body[:200] if status == 200 else None
