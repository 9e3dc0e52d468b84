"""Victims: who makes room. Pure functions over what the ledgers say.

`eligible` says who must not be touched, and why, in a short stable word; a policy then orders the rest. All policies
but one look at one figure; `least_work_lost`, the default, weighs what a preemption costs (the tokens that must be
computed again, after what the prefix cache will still have) against what it gains (how long the room would
otherwise stay taken, in tokens that remain).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import msgspec

from stopguard.errors import ConfigurationError
from stopguard.preemption.classes import Claim
from stopguard.preemption.settings import PreemptionSettings
from stopguard.preemption.ways import Exactness, Verdict
from stopguard.stops import Engine, Tracked

__all__ = ["POLICIES", "Candidate", "candidate_of", "choose", "eligible", "output_tokens", "policy_named"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one request that might make room. Tokens, blocks, seconds on the books' clock."""

    request_id: str
    rank: int
    preemptible: bool
    prompt_tokens: int
    output_tokens: int
    remaining_tokens: int
    blocks_held: int
    blocks_freed: int
    """Blocks that nobody else holds: what a preemption really frees."""
    recompute_tokens: int
    """What would have to be computed again, after what the prefix cache will still have."""
    arrived_at: float
    rooms_made: int
    """How often it has made room before."""
    resumed_at: float | None = None


Policy = Callable[[Candidate], tuple[float, ...]]


def output_tokens(tracked: Tracked) -> int:
    """The tokens that it has computed, with what the hot path has counted and no fold has booked."""
    computed = tracked.ledgers.tokens_computed
    return computed if tracked.probed else computed + tracked.events - tracked.folded_events


def candidate_of(
    tracked: Tracked,
    claim: Claim,
    *,
    settings: PreemptionSettings,
    block_tokens: int,
    blocks_needed: int,
    prefix_cache: bool,
    rooms_made: int = 0,
    resumed_at: float | None = None,
) -> Candidate:
    """The facts of one request, for somebody who needs `blocks_needed`.

    Without a probe the blocks are estimated from the tokens. What the cache keeps is what is freed beyond the need:
    the needed blocks are taken from it at once.
    """
    output = output_tokens(tracked)
    context = claim.prompt_tokens + output
    ledgers = tracked.ledgers
    held = ledgers.blocks_held if tracked.probed else -(-context // max(1, block_tokens))
    kept = max(0, held - max(1, blocks_needed)) if prefix_cache else 0
    allowed = claim.max_tokens if claim.max_tokens is not None else output + settings.assumed_tokens
    return Candidate(
        request_id=tracked.request_id,
        rank=claim.rank,
        preemptible=claim.priority_class.preemptible,
        prompt_tokens=claim.prompt_tokens,
        output_tokens=output,
        remaining_tokens=max(0, allowed - output),
        blocks_held=held,
        blocks_freed=held,
        recompute_tokens=max(0, context - kept * block_tokens),
        arrived_at=claim.arrived_at,
        rooms_made=rooms_made,
        resumed_at=resumed_at,
    )


def eligible(
    candidate: Candidate, tracked: Tracked, verdict: Verdict, rank: int, settings: PreemptionSettings, at: float
) -> str:
    """Empty when it may make room for a request of `rank`; otherwise why not."""
    if tracked.muted or tracked.machine.engine is not Engine.DISPATCHED:
        return "not_running"
    if candidate.rank >= rank:
        return "class"
    if not candidate.preemptible:
        return "unpreemptible"
    if verdict.exactness is Exactness.NEVER:
        return verdict.reason or "inexact"
    if candidate.rooms_made >= settings.preemptions_per_request or tracked.ledgers.nearly_full:
        return "too_often"
    if candidate.resumed_at is not None and at < candidate.resumed_at + settings.cool_down_seconds:
        return "cool_down"
    if candidate.remaining_tokens < settings.remaining_tokens_min:
        return "nearly_done"
    return ""


def _least_work_lost(candidate: Candidate) -> tuple[float, ...]:
    return (candidate.recompute_tokens / max(1, candidate.remaining_tokens), candidate.recompute_tokens)


def _fewest_output_first(candidate: Candidate) -> tuple[float, ...]:
    return (candidate.output_tokens, -candidate.prompt_tokens)


def _longest_output_first(candidate: Candidate) -> tuple[float, ...]:
    return (-candidate.output_tokens, -candidate.prompt_tokens)


def _most_blocks_freed(candidate: Candidate) -> tuple[float, ...]:
    return (-candidate.blocks_freed, candidate.recompute_tokens)


def _newest_first(candidate: Candidate) -> tuple[float, ...]:
    return (-candidate.arrived_at,)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "least_work_lost": _least_work_lost,
        "fewest_output_first": _fewest_output_first,
        "longest_output_first": _longest_output_first,
        "most_blocks_freed": _most_blocks_freed,
        "newest_first": _newest_first,
    }
)


def policy_named(name: str) -> Policy:
    """The policy, or `ConfigurationError` with the names that exist."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigurationError(f"there is no victim policy {name!r}; there are: {', '.join(POLICIES)}")
    return policy


def choose(policy: Policy, candidates: Iterable[Candidate]) -> Candidate | None:
    """The one who makes room: of the least urgent class, the first by `policy`, and the id decides between equals."""
    return min(candidates, key=lambda each: (each.rank, *policy(each), each.request_id), default=None)
