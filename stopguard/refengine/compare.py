"""The five ways to stop, side by side, from runs.

`measures` runs the stages and reads the events. The functions here turn what was measured into words;
they see only measures, never a policy: two engines that behave alike get the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from stopguard.refengine.measures import Detection, Measures, measure
from stopguard.refengine.policies import POLICIES, policy_named

__all__ = ["COLUMNS", "Row", "compare", "render_json", "render_markdown", "render_text"]

COLUMNS = ("policy", "stop takes effect", "in-flight output", "release", "preemption victim")

#: Two moments closer than this are the same for a client: about two steps.
_SAME_SECONDS = 0.03


class Row(msgspec.Struct, frozen=True):
    """One policy: the words, and the figures beside them."""

    policy: str
    takes_effect: str
    in_flight_output: str
    release: str
    preemption_victim: str
    figures: list[str]
    measures: Measures

    @property
    def cells(self) -> tuple[str, ...]:
        """In the order of `COLUMNS`."""
        return (self.policy, self.takes_effect, self.in_flight_output, self.release, self.preemption_victim)


def compare(policies: Sequence[str] = (), seed: int = 0) -> list[Row]:
    """Run the stages for each policy (all five by default). `ConfigurationError` for an unknown one."""
    rows = []
    for name in policies or POLICIES:
        measured = measure(policy_named(name).name, seed)
        rows.append(
            Row(
                name,
                _takes_effect(measured),
                _in_flight_output(measured),
                _release(measured),
                _preemption_victim(measured),
                _figures(measured),
                measured,
            )
        )
    return rows


# Words ----------------------------------------------------------------------------------------------


def _takes_effect(measured: Measures) -> str:
    parts: list[str] = []
    detection = _detection_words(measured)
    one_loop = measured.running.boundaries == measured.waiting.boundaries == measured.prefill.boundaries == 2
    if one_loop:
        queue = "FIFO queue" if measured.queue_order == "in order" else "queue with aborts first"
        parts.append(f"{detection} + {queue} + one loop (after the next forward pass, whatever the state)")
    else:
        parts.extend(_effect_words(measured))
        if detection:
            parts.append(detection)
    transfer = measured.transfer
    if transfer is not None and transfer.refusals and transfer.applied:
        parts.append("may be refused and is retried")
    return "; ".join(parts)


def _effect_words(measured: Measures) -> list[str]:
    running, waiting, prefill = measured.running, measured.waiting, measured.prefill
    if running.boundaries == 0:
        parts = ["marked at once" + (", cleaned one beat later" if measured.release.boundaries == 1 else "")]
    elif running.boundaries == 1 and running.before_outputs:
        parts = ["next step boundary, before the step's results"]
    elif running.boundaries == 1 and measured.queue_order == "ahead":
        parts = ["cancel task at the queue's head; a running decode is not interrupted"]
    elif running.boundaries == 1:
        parts = ["next step boundary, after the step's results"]
    else:
        queued = "at once" if waiting.boundaries <= 1 else f"after {waiting.boundaries} steps"
        parts = [f"waiting: {queued}; running: marked, ends with the next step"]
        if prefill.boundaries == 1:
            parts.append("chunked prefill: at the chunk's end")
    if prefill.refusals and not prefill.applied:
        parts.append("a prefill in flight is never cancelled (“try again”)")
    return parts


def _detection_words(measured: Measures) -> str:
    streams, others = _pattern(measured.detection_stream), _pattern(measured.detection_no_stream)
    alone = measured.detection_no_stream.delays[0]
    starved = measured.starved_seconds > alone + 2.0
    if others != streams:
        kind = "detection at once on streams" if streams == "event-driven" else f"detection {streams} on streams"
        rest = f"{others} otherwise" + (", starved while a neighbour streams" if starved else "")
        return f"{kind}, {rest}"
    return streams


def _pattern(detection: Detection) -> str:
    """Event-driven, a fixed delay, or a poll whose period is the step between the moments of noticing."""
    delays = detection.delays
    if max(delays) < _SAME_SECONDS:
        return "event-driven"
    if max(delays) - min(delays) < _SAME_SECONDS:
        return f"{sum(delays) / len(delays):.0f} s late"
    moments = sorted(detection.noticed_seconds)
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    period = min(gap for gap in gaps if gap > _SAME_SECONDS)
    return "1 Hz poll" if round(period) == 1 else f"{round(period)} s poll"


def _in_flight_output(measured: Measures) -> str:
    stop = measured.running
    if stop.tokens_stale and not stop.tokens_emitted:
        return "delivered as stale" + (", counters frozen" if stop.usage_frozen else ", counted")
    if stop.tokens_emitted and stop.emitted_with_final:
        return "delivered through the response queue, with the last response"
    if stop.tokens_emitted and stop.final_output_boundaries:
        return "delivered inside the deferred window"
    if stop.tokens_emitted:
        return "delivered"
    return "not delivered"


def _release(measured: Measures) -> str:
    release = measured.release
    around = measured.cached_around_preempt
    if release.fenced:
        words = "behind the step fence, deferred"
    elif release.boundaries:
        words = "next beat" if release.boundaries == 1 else f"{release.boundaries} beats later"
        later = measured.running.final_output_boundaries - release.boundaries
        if later > 0:
            words += ", output objects one later" if later == 1 else f", output objects {later} later"
    elif release.after_final_output:
        words = "response pass: the last response first"
    elif release.kept_in_cache == release.blocks:
        words = "slot freed, KV kept for reuse"
    else:
        words = "at the end of that step, no fence"
    if around is not None and around[0] and not around[1]:
        words += "; retract evicts the prefix tree"
    return words


def _preemption_victim(measured: Measures) -> str:
    found = measured.preemptions
    if not found.count:
        return "none (work waits for a slot)"
    rule = " or ".join(found.rules) or "no rule explains all choices"
    if found.place == "paused":
        words = f"paused requests ({rule})"
    elif found.structured_finished and not found.structured_recomputed:
        words = rule
    else:
        end = "to the front of the waiting queue" if found.goes == "front" else "to the back of the queue"
        words = f"{rule}; {end}"
    if found.structured_finished and not found.structured_recomputed:
        words += "; structured output is finished instead"
    elif found.recomputed_tokens:
        words += ", recompute"
    return words


def _figures(measured: Measures) -> list[str]:
    running, release, preemptions = measured.running, measured.release, measured.preemptions
    late = ", ".join(
        f"{label} {min(found.delays):.2f}-{max(found.delays):.2f} s"
        for label, found in (
            ("stream", measured.detection_stream),
            ("no stream", measured.detection_no_stream),
            ("queued", measured.detection_queued),
        )
    )
    prefill = measured.prefill
    figures = [
        f"applied after {running.boundaries}/{measured.waiting.boundaries}/"
        + (f"{prefill.boundaries}" if prefill.applied else "never")
        + f" step ends (decode/waiting/prefill), {running.seconds * 1000:.1f} ms in decode; "
        f"pipeline depth {measured.pipeline_depth}",
        f"noticed: {late}; beside a streaming neighbour {measured.starved_seconds:.2f} s",
        f"tokens after the stop: {running.tokens_emitted} delivered, {running.tokens_discarded} discarded, "
        f"{running.tokens_stale} stale",
        f"blocks: {release.blocks} back {release.boundaries} step ends after the effect, {release.fenced} of them "
        f"behind a fence, {release.kept_in_cache} kept in the cache",
        f"preemptions: {preemptions.count} for {preemptions.requests} requests, "
        f"{preemptions.recomputed_tokens} tokens computed again, {preemptions.structured_finished} finished instead",
    ]
    if measured.transfer is not None:
        outcome = (
            f"applied after {measured.transfer.boundaries} step ends" if measured.transfer.applied else "not applied"
        )
        figures.append(f"abort during a KV transfer: {measured.transfer.refusals} refusals, {outcome}")
    return figures


# Rendering ------------------------------------------------------------------------------------------


def render_markdown(rows: Sequence[Row]) -> str:
    """A table, and the figures of each policy below it."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row.cells) + " |" for row in rows]
    for row in rows:
        lines += ["", f"**{row.policy}**"]
        lines += [f"- {figure}" for figure in row.figures]
    return "\n".join(lines) + "\n"


def render_text(rows: Sequence[Row]) -> str:
    """One paragraph a policy, for a terminal of any width."""
    lines: list[str] = []
    for row in rows:
        lines.append(row.policy)
        lines += [f"  {column:<19} {cell}" for column, cell in zip(COLUMNS[1:], row.cells[1:], strict=True)]
        lines += [f"    {figure}" for figure in row.figures]
        lines.append("")
    return "\n".join(lines)


def render_json(rows: Sequence[Row]) -> str:
    """Words, figures and measures."""
    return msgspec.json.format(msgspec.json.encode(list(rows)), indent=2).decode() + "\n"
