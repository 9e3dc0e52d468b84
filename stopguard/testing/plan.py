"""The plan of a storm: who comes when, with what, and how it ends. A pure function of its seed."""

from __future__ import annotations

import enum
import random

import msgspec

from stopguard.errors import ConfigurationError

__all__ = ["ClientPlan", "Ending", "StormPlan", "plan_storm"]


class Ending(enum.StrEnum):
    """What its client (or fate) does to a request."""

    FINISH = "finish"
    CANCEL_IN_ADMISSION = "cancel_in_admission"
    CANCEL_WHILE_WAITING = "cancel_while_waiting"
    CANCEL_IN_PREFILL = "cancel_in_prefill"
    CANCEL_IN_DECODE = "cancel_in_decode"
    CANCEL_AT_THE_END = "cancel_at_the_end"
    CANCEL_TWICE = "cancel_twice"
    CANCEL_BY_API = "cancel_by_api"
    CANCEL_BY_DEADLINE = "cancel_by_deadline"
    CANCEL_WHILE_PREEMPTED = "cancel_while_preempted"
    PREEMPT = "preempt"
    FAIL = "fail"


class ClientPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a storm. Times are seconds after the storm's start, `after_tokens` counts output tokens."""

    number: int
    arrives_after_seconds: float
    ending: Ending
    prompt_tokens: int
    max_tokens: int
    after_tokens: int
    n: int = 1
    stream: bool = True
    priority: int = 0
    lora: str = ""
    images: int = 0
    grammar: str = ""
    speculative: bool = False


class StormPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole storm."""

    seed: int
    clients: tuple[ClientPlan, ...]

    def __len__(self) -> int:
        return len(self.clients)


#: How often each ending is drawn.
_WEIGHTS: dict[Ending, int] = {
    Ending.FINISH: 24,
    Ending.CANCEL_IN_ADMISSION: 4,
    Ending.CANCEL_WHILE_WAITING: 8,
    Ending.CANCEL_IN_PREFILL: 10,
    Ending.CANCEL_IN_DECODE: 20,
    Ending.CANCEL_AT_THE_END: 6,
    Ending.CANCEL_TWICE: 6,
    Ending.CANCEL_BY_API: 6,
    Ending.CANCEL_BY_DEADLINE: 4,
    Ending.CANCEL_WHILE_PREEMPTED: 4,
    Ending.PREEMPT: 6,
    Ending.FAIL: 2,
}


def plan_storm(seed: int, requests: int = 200, *, over_seconds: float = 10.0, features: bool = True) -> StormPlan:
    """Draw a storm of `requests` that arrive over `over_seconds`.

    With `features` some of them use LoRA, images, grammars, speculative decoding or several children.
    """
    if requests < 1 or over_seconds < 0:
        raise ConfigurationError("a storm has at least one request and does not end before it begins")
    rng = random.Random(seed)
    endings, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    clients = []
    for number in range(requests):
        ending = rng.choices(endings, weights)[0]
        long_prompt = ending in (Ending.CANCEL_IN_PREFILL, Ending.CANCEL_WHILE_WAITING) or rng.random() < 0.15
        prompt_tokens = rng.randint(400, 1200) if long_prompt else rng.randint(8, 120)
        max_tokens = rng.randint(8, 96)
        feature = rng.random() if features else 1.0
        clients.append(
            ClientPlan(
                number=number,
                arrives_after_seconds=rng.uniform(0.0, over_seconds),
                ending=ending,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                after_tokens=rng.randint(1, max(1, max_tokens - 2)),
                n=rng.choice((2, 3)) if feature > 0.92 and features else 1,
                stream=rng.random() < 0.75,
                priority=rng.choice((0, 0, 0, 1, 5)),
                lora=rng.choice(("a", "b")) if feature < 0.08 else "",
                images=rng.randint(1, 2) if 0.08 <= feature < 0.14 else 0,
                grammar="json" if 0.14 <= feature < 0.22 else "",
                speculative=0.22 <= feature < 0.28,
            )
        )
    return StormPlan(seed=seed, clients=tuple(clients))
