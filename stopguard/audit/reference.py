"""The reference engine's observer: its routes under `/ref/` tell the truth, whatever engine it imitates.

With `probe` it reads the event log, the list of requests and the totals; with `log` the log and the totals;
with `metrics` only the totals, which is as much as a good engine's gauges would give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from stopguard.audit.errors import TargetLost, TargetUnreachable
from stopguard.audit.target import Control, Facts, Happening, Reading, Row, Submitted, TargetModel
from stopguard.engines import AbortReply, Identity
from stopguard.errors import ConfigurationError
from stopguard.ledger import EngineGauges, Evidence
from stopguard.probe import wire
from stopguard.stops import AbortAnswer

__all__ = ["ReferenceObserver"]

#: Its pages are read from memory between two steps and put nothing off.
_SAFE_INTERVAL_SECONDS: Final = 0.02
_LOG_LIMIT: Final = 8192
_ANSWERS: Final = {
    "accepted": AbortAnswer.ACCEPTED,
    "aborted": AbortAnswer.GONE,
    "try_again": AbortAnswer.REFUSED,
    "unknown": AbortAnswer.UNKNOWN,
    "no_door": AbortAnswer.FAILED,
    "suppressed": AbortAnswer.ACCEPTED,
}


class ReferenceObserver:
    """Watches one reference engine over HTTP."""

    def __init__(self, control: Control, clock: Callable[[], float], model: TargetModel, observe: str = "") -> None:
        observe = observe or "probe"
        if observe not in {"probe", "log", "metrics"}:
            raise ConfigurationError(f"--observe must be probe, metrics or log, not {observe!r}")
        self._control = control
        self._clock = clock
        self._offset = 0.0
        self._after = 0
        self._lists = observe == "probe"
        self.facts = Facts(
            kind="ref",
            grade=Evidence.GAUGE if observe == "metrics" else Evidence.PROBE,
            safe_interval_seconds=_SAFE_INTERVAL_SECONDS,
            observed_by={"probe": "/ref/log and /ref/snapshot", "log": "/ref/log", "metrics": "/ref/gauges"}[observe],
            sees_events=observe != "metrics",
            abort_door=True,
            features={
                "endless": {"ignore_eos": True},
                "lora": {"model": f"{model.name}:audit"},
                "structured": {"response_format": {"type": "json_object"}},
                "speculative": {"refengine": {"speculative": True}},
                "image": {},
            },
        )

    async def identify(self) -> Identity:
        before = self._clock()
        answer = await self._control("GET", "/ref/snapshot")
        snapshot = answer.json()
        if answer.status != 200 or not isinstance(snapshot, dict) or "policy" not in snapshot:
            raise TargetUnreachable("this is no reference engine with its truth switched on: /ref/snapshot is missing")
        self._offset = (before + self._clock()) / 2 - float(snapshot["at"])
        self.facts = msgspec.structs.replace(
            self.facts, matches_by_prefix=bool(snapshot.get("matches_by_prefix", False))
        )
        await self.events()
        return Identity(kind=f"ref ({snapshot['policy']})", version=answer.headers.get("x-reference-engine", ""))

    async def read(self) -> Reading | None:
        answer = await self._ask("/ref/snapshot" if self._lists else "/ref/gauges")
        totals = answer["gauges"] if self._lists else answer
        rows = tuple(map(_row, answer["requests"])) if self._lists else None
        used = totals["blocks_held"] + totals["blocks_fenced"]
        beside = {f"{kind} slots": count for kind, count in totals["slots_held"].items()}
        beside["host blocks"] = totals["host_blocks_held"]
        waiting = totals["waiting"] + totals["preempted"] + totals["paused"] + totals["transferring"]
        return Reading(
            gauges=EngineGauges(
                at=self._clock(),
                running=totals["running"],
                waiting=waiting,
                blocks_used=used,
                blocks_total=totals["blocks_total"],
                slots_used=sum(totals["slots_held"].values()),
                request_ids=None if rows is None else frozenset(row.request_id for row in rows),
            ),
            preempted=totals["preempted"] + totals["paused"],
            beside=beside,
            blocks_missing=totals["blocks_total"] - totals["blocks_free"] - totals["blocks_cached"] - used,
            watchers=totals["watchers"],
            steps_total=totals["steps_total"],
            generated_tokens_total=totals["generated_tokens_total"],
            aborts_total=totals["aborts_total"],
            rows=rows,
        )

    async def events(self) -> tuple[list[Happening], bool]:
        if not self.facts.sees_events:
            return [], False
        entries = (await self._ask(f"/ref/log?after={self._after}&limit={_LOG_LIMIT}"))["entries"]
        if not entries:
            return [], False
        gap = self._after > 0 and entries[0]["number"] != self._after + 1
        self._after = entries[-1]["number"]
        found = [self._happening(entry) for entry in entries]
        return [happening for happening in found if happening is not None], gap

    def _happening(self, entry: dict[str, Any]) -> Happening | None:
        at = entry["at"] + self._offset
        if entry["kind"] == "submitted":
            return Submitted(entry["request_id"], at)
        kind = getattr(wire, entry["kind"], None)
        if not isinstance(kind, type):
            return None  # a note of the HTTP side
        return cast("wire.Event", kind(entry["request_id"], at, **entry["detail"]))

    async def abort(self, engine_id: str) -> AbortReply:
        answer = await self._control("POST", "/ref/abort", {"request_id": engine_id, "door": "inside"})
        told = answer.json()
        if answer.status != 200 or not isinstance(told, list):
            return AbortReply(answer=AbortAnswer.FAILED)
        replies = [
            AbortReply(answer=_ANSWERS[one["kind"]], retry_after_seconds=one["retry_after_seconds"]) for one in told
        ]
        refused = [reply for reply in replies if reply.answer is AbortAnswer.REFUSED]
        return (refused or replies)[0]

    async def health(self) -> int:
        return (await self._control("GET", "/health")).status

    def place(self, tag: str) -> tuple[dict[str, str], dict[str, Any]]:
        return {"X-Request-Id": tag}, {"rid": tag}

    def engine_id(self, tag: str, response_id: str) -> str:
        return response_id

    async def _ask(self, path: str) -> Any:
        answer = await self._control("GET", path)
        value = answer.json()
        if answer.status != 200 or value is None:
            raise TargetLost(
                f"the engine does not answer {path.partition('?')[0]} any more: {answer.failure or answer.status}"
            )
        return value


def _row(row: dict[str, Any]) -> Row:
    return Row(
        request_id=row["request_id"],
        parent_id=row["parent_id"],
        place=row["place"],
        blocks_held=row["blocks_held"],
        output_tokens=row["output_tokens"],
        prompt_tokens_left=max(0, row["prompt_tokens"] - row["computed_tokens"]),
    )
