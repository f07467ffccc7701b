"""Tokens per second and time to first token at one stream: three kinds of text, the median of five runs."""

import statistics
from collections.abc import Mapping

from overlay.acceptance import texts
from overlay.acceptance.gates import Outcome, Session

RUNS = 5


async def speed(session: Session) -> Outcome:
    """Measure every kind of `texts.SPEED`. The kinds differ because speculative decoding accepts more of some."""
    measured: dict[str, Mapping[str, object]] = {}
    for kind, prompt in texts.SPEED.items():
        rates, firsts = [], []
        for run in range(RUNS):
            session.say(f"{kind} {run + 1} of {RUNS}")
            answer = await session.client.ask(prompt, session.plan.speed, ignore_eos=True)
            rates.append(answer.rate)
            firsts.append(answer.first)
        measured[kind] = {
            "tokens_per_second": round(statistics.median(rates), 2),
            "runs": [round(rate, 2) for rate in rates],
            "first_token_s": round(statistics.median(firsts), 3),
            "tokens": session.plan.speed,
        }
    told = ", ".join(f"{kind} {result['tokens_per_second']} tokens/s" for kind, result in measured.items())
    return Outcome(told, None, measured)
