"""How the audit looks at llama.cpp: through its pages, seldom, or through its log, as often as it likes.

`--observe metrics` (the default) reads `/metrics` and `/slots` every two seconds: oftener, the observer would be the
neighbour that starves the server's own look at its clients. `--observe log` follows the server's log, whose file is
named by the environment variable ``LLAMA_LOG_FILE``; it disturbs nothing and is exact. With ``-lv 5`` (debug)
it also shows the queue and each token.

Requests are sent without `X-Conversation-Id`: with it a client that leaves is not meant to be a stop.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from stopguard.audit.errors import TargetLost, TargetUnreachable
from stopguard.audit.target import Control, Facts, Happening, PlainObserver, Reading, TargetModel
from stopguard.engines import AbortReply, Identity
from stopguard.errors import ConfigurationError
from stopguard.ledger import EngineGauges, Evidence
from stopguard.stops import AbortAnswer
from stopguard_llamacpp.adapter import GAUGE_SECONDS
from stopguard_llamacpp.log import ServerLog
from stopguard_llamacpp.pages import metric, read_props, read_slots

__all__ = ["LOG_VARIABLE", "LlamaCppObserver"]

LOG_VARIABLE: Final = "LLAMA_LOG_FILE"
_LOG_SECONDS: Final = 0.02
#: Of a log that is longer only the end is read at first.
_LOG_BYTES_FIRST: Final = 64 * 1024 * 1024
#: Marks are this large and larger, so that nobody's real setting looks like one.
_MARK_FIRST: Final = 1 << 30
_MARKS_MAX: Final = 20_000
_NO_ID: Final = (
    "only streams that bear X-Conversation-Id can be aborted by id, and those are by design not stopped when their "
    "client leaves: StopGuard does not use it"
)
_BY_ID: Final = ("abort", "abort-early", "abort-queued", "abort-prefill", "twice", "after-end", "wrong-victim")


class _File:
    """The server's log file, read as it grows; open only while it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._place = max(0, path.stat().st_size - _LOG_BYTES_FIRST)
        except OSError as error:
            raise ConfigurationError(f"{LOG_VARIABLE}={path} cannot be read: {error.strerror or error}") from None

    def grown(self) -> str:
        """What was written since the last call. Raises `TargetLost` when the file is gone."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                new = file.read()
        except OSError as error:
            raise TargetLost(f"the server's log {self._path} cannot be read any more: {error}") from None
        self._place += len(new)
        return new.decode("utf-8", "replace")


class LlamaCppObserver(PlainObserver):
    """Watches one llama.cpp server; see `stopguard.audit.target.Observer`."""

    def __init__(self, control: Control, clock: Callable[[], float], model: TargetModel, observe: str = "") -> None:
        observe = observe or "metrics"
        if observe not in {"metrics", "log"}:
            raise ConfigurationError(f"--observe {observe}: llama.cpp can be watched by metrics or log")
        self._control = control
        self._clock = clock
        self._marks: dict[int, str] = {}
        self._log = ServerLog(lambda mark: self._marks.get(mark, ""))
        self._file: _File | None = None
        by_log = observe == "log"
        if by_log:
            path = os.environ.get(LOG_VARIABLE, "")
            if not path:
                raise ConfigurationError(f"--observe log: name the server's log file in {LOG_VARIABLE}")
            self._file = _File(Path(path))
        self.facts = Facts(
            kind="llamacpp",
            grade=Evidence.PROBE if by_log else Evidence.GAUGE,
            safe_interval_seconds=_LOG_SECONDS if by_log else GAUGE_SECONDS,
            observed_by="the server's log" if by_log else "/metrics and /slots, which put off what they show",
            sees_events=by_log,
            id_door=True,
            features={
                "endless": {"ignore_eos": True},
                # A grammar that is satisfied wants the end token; where that is forbidden the server answers 500.
                "structured": {"response_format": {"type": "json_object"}, "ignore_eos": False},
            },
            skips=dict.fromkeys(_BY_ID, _NO_ID),
        )

    async def identify(self) -> Identity:
        answer = await self._control("GET", "/props")
        try:
            props = read_props(answer.body)
        except msgspec.MsgspecError as error:
            raise TargetUnreachable(f"/props is not llama.cpp's ({error}): is this its server?") from None
        if self._file is not None:
            await self.events()
        elif not (props.endpoint_metrics and props.endpoint_slots):
            raise TargetUnreachable("start the server with --metrics and --slots, or use --observe log")
        return Identity(kind="llamacpp", version=props.build_info)

    async def read(self) -> Reading | None:
        return self._by_log() if self._file is not None else await self._by_pages()

    def _by_log(self) -> Reading:
        log = self._log
        return Reading(
            gauges=EngineGauges(
                at=self._clock(),
                running=len(log.running),
                waiting=len(log.waiting) if log.sees_queue else None,
                blocks_used=len(log.running),
                slots_used=len(log.running),
            ),
            steps_total=log.tokens_total if log.sees_queue else None,
            generated_tokens_total=log.tokens_total if log.sees_queue else None,
            aborts_total=log.cancels_total,
        )

    async def _by_pages(self) -> Reading:
        metrics, slots = await self._control("GET", "/metrics"), await self._control("GET", "/slots")
        samples = metric(metrics.body.decode("utf-8", "replace"))
        try:
            page = read_slots(slots.body)
            running, waiting = int(samples["requests_processing"]), int(samples["requests_deferred"])
        except (msgspec.MsgspecError, KeyError):
            reason = metrics.failure or slots.failure or f"{metrics.status}, {slots.status}"
            raise TargetLost(f"the engine does not answer /metrics and /slots any more: {reason}") from None
        return Reading(
            gauges=EngineGauges(
                at=self._clock(),
                running=running,
                waiting=waiting,
                blocks_used=page.processing,
                slots_used=page.processing,
            ),
            steps_total=int(samples.get("n_decode_total", 0)),
            # Does not count what was generated for a request before it was cancelled, in some versions: good only to
            # see that something goes on.
            generated_tokens_total=int(samples.get("tokens_predicted_total", 0)),
        )

    async def events(self) -> tuple[list[Happening], bool]:
        if self._file is None:
            return [], False
        return self._log.feed(self._file.grown(), self._clock()), False

    async def abort(self, engine_id: str) -> AbortReply:
        answer = await self._control("DELETE", f"/v1/stream?conv_id={engine_id}")
        if answer.status == 404:  # older versions have the id in the path
            answer = await self._control("DELETE", f"/v1/stream/{engine_id}")
        accepted = answer.status in {200, 204}
        return AbortReply(answer=AbortAnswer.ACCEPTED if accepted else AbortAnswer.FAILED)

    def place(self, tag: str) -> tuple[dict[str, str], dict[str, Any]]:
        # Its own cache of prompts is meant to survive a request; with it no two runs compute the same.
        fields: dict[str, Any] = {"cache_prompt": False}
        if self._file is not None:
            if len(self._marks) >= _MARKS_MAX:
                del self._marks[next(iter(self._marks))]
            mark = _MARK_FIRST + zlib.crc32(tag.encode()) % _MARK_FIRST
            self._marks[mark] = tag
            fields["dry_allowed_length"] = mark  # means nothing where DRY is off; see `log`
        return {}, fields

    def engine_id(self, tag: str, response_id: str) -> str:
        return ""
