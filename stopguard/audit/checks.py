"""From what was seen to verdicts: one function a ledger, each a pure function of the evidence.

One root cause is blamed once. A request that was not stopped still holds its place, its blocks and its
stream; the ledger that failed says LEAK, and those that are open only because of it say UNPROVEN.
"""

from __future__ import annotations

from collections.abc import Iterable

from stopguard.audit.settle import Observation, somebody_is_there
from stopguard.audit.stage import Canary, Stage, Ticket, why
from stopguard.audit.verdict import LEDGERS, Cell, Outcome, percentile
from stopguard.audit.watch import STOPPED, Trace
from stopguard.ledger import Evidence

__all__ = ["judge"]


def judge(stage: Stage, seen: Observation) -> tuple[Cell, ...]:
    """The cells of one scenario, in the order of the ledgers."""
    judge = _Judge(stage, seen)
    judge.survivors()
    judge.kv()
    judge.output()
    judge.stream()
    judge.counters()
    judge.companions()
    judge.slowness()
    judge.health()
    judge.slow()
    return judge.cells()


class _Judge:
    def __init__(self, stage: Stage, seen: Observation) -> None:
        self.stage = stage
        self.seen = seen
        self.found: dict[str, list[Cell]] = {}
        self.open_because = ""
        facts = stage.observer.facts
        self.grade = facts.grade
        followed = stage.events or not stage.plan.shared
        self.measured = facts.grade >= Evidence.GAUGE and seen.after is not None and followed
        self.now = stage.world.now()

    # Words ----------------------------------------------------------------------------------------

    def leak(self, ledger: str, amount: int, unit: str, detail: str, age_seconds: float | None = None) -> None:
        age = self._age() if age_seconds is None else age_seconds
        self.found.setdefault(ledger, []).append(
            Cell(
                ledger=ledger,
                outcome=Outcome.LEAK,
                evidence=self.grade,
                amount=amount,
                unit=unit,
                detail=detail,
                age_seconds=age,
            )
        )

    def _age(self) -> float:
        stops = [ticket.stopped_at for ticket in self.stage.tickets if ticket.stopped_at is not None]
        return max(0.0, self.now - min(stops)) if stops else 0.0

    def _delta(self, after: int | None, before: int | None) -> int:
        return 0 if after is None or before is None else after - before

    # Ledgers --------------------------------------------------------------------------------------

    def survivors(self) -> None:
        """Requests that were stopped and went on; what is left in the queue."""
        seen = self.seen
        for survivor in seen.survivors:
            self.leak(survivor.ledger, survivor.amount, survivor.unit, survivor.detail, survivor.age_seconds)
            self.open_because = survivor.ledger
        if self.open_because or seen.before is None or seen.after is None or seen.stuck:
            return
        over = self._delta(seen.after.places, seen.before.places)
        if over <= 0:
            return
        if not somebody_is_there(self.stage, seen.before, seen.after):
            self.leak("counters", over, "requests", "the engine counts requests that it does not have")
        else:
            self.leak("queue", over, "places", "requests are still in the engine, and nobody waits for them")
            self.open_because = "queue"

    def kv(self) -> None:
        before, after = self.seen.before, self.seen.after
        traces = self._traces()
        complete = not self.stage.watch.gaps
        if before is None or after is None:
            self._kept(traces)
            return
        returned_twice = sum(max(0, -trace.blocks_kept) for trace in traces) if complete else 0
        missing = self._delta(after.blocks_missing, before.blocks_missing)
        if missing or returned_twice:
            self.leak(
                "kv", abs(missing) or returned_twice, "blocks",
                "a block was given back more than once: two requests may write it" if missing < 0 or returned_twice
                else "free, cached and used blocks do not add up to the pool",
            )  # fmt: skip
        if self.open_because or self.seen.stuck:
            self._kept(traces)
            return
        blocks = self._delta(after.gauges.blocks_used, before.gauges.blocks_used)
        if blocks > 0:
            self.leak("kv", blocks, "blocks", "blocks are still held, and no request is there to hold them")
        for name, amount in after.beside.items():
            extra = amount - before.beside.get(name, 0)
            if extra > 0:
                self.leak("kv", extra, name, f"{name} are still taken, and no request is there to use them")

    def _kept(self, traces: list[Trace]) -> None:
        """By events alone: what requests that have gone still hold."""
        kept = sum(trace.blocks_kept for trace in traces if not trace.live and trace.blocks_kept > 0)
        if kept and not self.stage.watch.gaps:
            self.leak("kv", kept, "blocks", "blocks of requests that have gone are still held")

    def output(self) -> None:
        if self.stage.watch.gaps:
            return
        for trace in self._traces():
            if trace.emitted_after_gone:
                self.leak(
                    "output", trace.emitted_after_gone, "tokens", "tokens were handed out after the request had gone"
                )
            elif trace.in_flight < 0:
                self.leak("output", -trace.in_flight, "tokens", "tokens were handed out twice: more than were computed")
            elif not trace.live and trace.in_flight > 0:
                self.leak("output", trace.in_flight, "tokens", "computed tokens were neither delivered nor dropped")

    def stream(self) -> None:
        before, after = self.seen.before, self.seen.after
        if before is None or after is None or self.open_because or self.seen.stuck:
            return
        watchers = self._delta(after.watchers, before.watchers)
        if watchers > 0:
            self.leak("stream", watchers, "watchers", "connections are still watched whose requests have ended")

    def counters(self) -> None:
        before, after = self.seen.before, self.seen.after
        if before is None or after is None or after.aborts_total is None or self.stage.plan.shared:
            return
        counted = self._delta(after.aborts_total, before.aborts_total)
        done = sum(trace.applied_at is not None and trace.reason in STOPPED for trace in self._traces())
        if not self.stage.events:
            done = 1 if self._stopped_for_certain() else 0
        self.seen.aborts_done = done
        if counted < done:
            self.leak("counters", done - counted, "aborts", f"{done} aborts took effect and {counted} were counted")

    def _stopped_for_certain(self) -> bool:
        """Without events: some victim left the engine long before its own end."""
        quick = self.seen.steps.get("stop", [])
        natural = min((ticket.tokens for ticket in self.stage.victims()), default=0) * self.stage.measured.token_seconds
        long = natural > self.stage.plan.deadline_seconds / 2  # a short one may have won every race
        return long and bool(quick) and min(quick) < natural / 3 and not self.seen.survivors

    def companions(self) -> None:
        for ticket in self.stage.companions():
            reply = ticket.reply
            before_its_stop = (
                ticket.stopped_at is not None and reply.ended and (reply.ended_at or 0.0) < ticket.stopped_at
            )
            if before_its_stop or (ticket.must_finish and ticket not in self.seen.unfinished):
                self._finished(ticket)

    def _finished(self, ticket: Ticket) -> None:
        reply, canary = ticket.reply, ticket.canary
        reasons = set(reply.reasons.values())
        whole = canary is not None and reply.text == canary.cold
        if reply.failure or reply.status != 200:
            refused = reply.status is not None and (400 <= reply.status < 500 or reply.status == 503)
            if not self.seen.sick and not refused:
                self.leak("queue", 1, "requests", f"a request that nobody stopped broke off ({why(reply)})")
        elif reasons & STOPPED or (not reasons and not whole):
            if whole or (canary is None and self._complete_by_events(ticket)):
                self.leak("stream", 1, "endings", "a request that ended by itself is called aborted")
            else:
                self.leak("queue", 1, "requests", "a request that nobody stopped was aborted: the wrong victim")
        elif canary is not None and not whole:
            self._other_words(canary, reply.text)

    def _complete_by_events(self, ticket: Ticket) -> bool:
        traces = self.stage.traces(ticket)
        return bool(traces) and all(trace.emitted >= ticket.tokens and trace.applied_at is None for trace in traces)

    def _other_words(self, canary: Canary, text: str) -> None:
        if repeats(canary.cold, text):
            self.leak("output", len(text) - len(canary.cold), "characters", "a part of the output came twice")
        elif canary.stable:
            same = next((at for at, (a, b) in enumerate(zip(canary.cold, text, strict=False)) if a != b), 0)
            self.leak(
                "crosstalk", 1, "outputs",
                f"prompt {canary.number} has another output than on a quiet engine, from character {same} on",
            )  # fmt: skip

    def slowness(self) -> None:
        for ledger, seconds, limit, sentence in self.stage.slowness:
            self.found.setdefault(ledger, []).append(
                Cell(
                    ledger=ledger,
                    outcome=Outcome.SLOW,
                    evidence=Evidence.STREAM_CLOSED,
                    measured_seconds=seconds,
                    limit_seconds=limit,
                    detail=sentence,
                )
            )

    def health(self) -> None:
        seen = self.seen
        if not seen.sick:
            return
        if (taken := self._taken_by_leaks()) > 0:
            self.found.clear()  # the rest only follows from it
            self.open_because = "kv"
            seen.exhausted = True
            self.leak("kv", taken, "blocks", f"{seen.sick}: what has leaked since the audit began fills the pool")
            return
        said = f", and its health page says {seen.health_status}" if seen.health_status else ""
        # What an engine that is dead or wedged still holds is a consequence.
        for ledger in [name for name in self.found if name != "crosstalk"]:
            del self.found[ledger]
        self.open_because = "health"
        self.leak("health", 1, "engines", f"{seen.sick}{said}")

    def _taken_by_leaks(self) -> int:
        """Blocks that nobody holds and that are missing to the fresh request; 0 when there is room."""
        first, after = self.stage.initial, self.seen.after
        if first is None or after is None or not after.gauges.blocks_total or after.gauges.blocks_used is None:
            return 0
        taken = after.gauges.blocks_used - (first.gauges.blocks_used or 0)
        return taken if taken > after.gauges.blocks_total / 2 and not self.open_because else 0

    def slow(self) -> None:
        """Each ledger's own part of the way, against the limit."""
        if self.open_because:
            return
        limit = self.stage.plan.deadline_seconds
        steps = {name: max(spans) for name, spans in self.seen.steps.items() if spans}
        by_socket = any(ticket.how not in {"", "abort"} for ticket in self.stage.victims())
        notify, stop = steps.get("notify"), steps.get("stop")
        parts = {
            "stream" if by_socket else "link": notify if notify is not None else stop,
            "queue": None if notify is None or stop is None else stop - notify,
            "kv": None if stop is None or "release" not in steps else steps["release"] - stop,
        }
        for ledger, seconds in parts.items():
            if seconds is not None and seconds > limit and ledger not in self.found:
                self.found[ledger] = [
                    Cell(
                        ledger=ledger,
                        outcome=Outcome.SLOW,
                        evidence=self.grade,
                        measured_seconds=seconds,
                        limit_seconds=limit,
                        detail=f"{seconds:.2f} s until {'noticed' if ledger in {'stream', 'link'} else 'done'}",
                    )
                ]

    # The rest of the row --------------------------------------------------------------------------

    def cells(self) -> tuple[Cell, ...]:
        return tuple(self._cell(ledger) for ledger in LEDGERS if self._judged(ledger))

    def _judged(self, ledger: str) -> bool:
        if ledger in self.found or ledger in self.stage.looked_at:
            return True
        if ledger == "crosstalk":
            return any(ticket.canary for ticket in self.stage.companions())
        if ledger == "link":
            return bool(self.stage.victims())
        return True

    def _cell(self, ledger: str) -> Cell:
        if ledger in self.found:
            return max(self.found[ledger], key=lambda cell: (cell.outcome is Outcome.LEAK, cell.amount))
        blocked = self._unproven_because(ledger)
        if blocked:
            return Cell(ledger=ledger, outcome=Outcome.UNPROVEN, evidence=self._best(ledger), detail=blocked)
        evidence = Evidence.STREAM_CLOSED if ledger in {"health", "crosstalk"} else self.grade
        return Cell(ledger=ledger, outcome=Outcome.PASS, evidence=evidence, detail=self._pass_detail(ledger))

    def _best(self, ledger: str) -> Evidence:
        if self.grade >= Evidence.GAUGE:
            return self.grade
        if ledger in {"link", "stream"} and any(ticket.how == "abort" for ticket in self.stage.victims()):
            return Evidence.ACCEPTED
        return Evidence.SENT if self.stage.victims() else Evidence.NONE

    def _unproven_because(self, ledger: str) -> str:
        if ledger == "health" and not self.seen.sick:
            return ""
        if self.open_because and ledger != "crosstalk":
            return f"not judged: see {self.open_because}"
        if ledger == "crosstalk":
            unstable = [ticket for ticket in self.stage.companions() if ticket.canary and not ticket.canary.stable]
            return "outputs differ under load even without stops" if unstable else ""
        if not self.measured:
            return "this engine shows nothing that could prove it"
        if self.stage.plan.shared and (ledger == "counters" or (ledger == "kv" and not self.stage.events)):
            return "others use the engine: its totals are not ours alone"
        if self.stage.watch.gaps and ledger in {"output", "link"}:
            return "events were missed between two readings"
        if ledger == "output" and not self.stage.events:
            return "" if self._quiet_at_idle() else "the engine does not count tokens"
        if ledger == "counters" and self.seen.after is not None and self.seen.after.places is None:
            return "the engine does not count its requests"
        if (
            ledger == "stream"
            and not self.stage.victims()
            and (self.seen.after is None or self.seen.after.watchers is None)
        ):
            return "the engine does not show who watches connections"
        if ledger in {"link", "stream"} and self.seen.outran and len(self.seen.outran) == len(self.stage.victims()):
            return "every request reached its own end before its stop could show"
        return ""

    def _quiet_at_idle(self) -> bool:
        return self.seen.after is not None and self.seen.after.generated_tokens_total is not None and self.seen.idle

    def _pass_detail(self, ledger: str) -> str:
        step = {"link": "notify", "stream": "notify", "queue": "stop", "kv": "release", "output": "settle"}.get(ledger)
        spans = self.seen.steps.get(step, []) if step else []
        return f"p50 {percentile(spans, 0.5) * 1000:.0f} ms" if spans else ""

    def _traces(self) -> list[Trace]:
        """What belongs to this scenario's calls."""
        if not self.stage.events:
            return []
        return [trace for ticket in self.stage.tickets for trace in self.stage.traces(ticket)]


def repeats(expected: str, text: str) -> bool:
    """Whether `text` is `expected` with one passage said twice."""
    extra = len(text) - len(expected)
    if extra <= 0:
        return False
    # Where the passage ends, the text goes on with what it had said `extra` characters before.
    return any(text[start:] == expected[start - extra :] for start in range(extra, common(expected, text) + 1))


def common(first: Iterable[str], second: Iterable[str]) -> int:
    """How many characters they have in common at their beginnings."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
