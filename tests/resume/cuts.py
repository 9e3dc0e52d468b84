"""Random cuts through a gateway: streams that are preempted and resumed, compared with undisturbed ones.

`Cutter` is a gateway in this process in front of any engine that can be resumed at; `ask` streams one request through
it and preempts and resumes it where it is told to; `Answer` is what the client has in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from stopguard.engines.protocol import Engine
from stopguard.gateway.ledgered import LedgeredExchange
from stopguard.gateway.server import Gateway
from stopguard.gateway.settings import EngineSettings, GatewaySettings, Limits, Listener, ResumeSettings, Timeouts
from stopguard.preemption.ways import Gone, Parked, Refused, Running
from stopguard.stops import Semantics, Source, StopCause, StopConfig, Tracked
from stopguard.stops.preemptions import preempt

PATIENCE = 60.0


class Answer:
    """One stream as its client has it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.comments = 0
        self.done = False
        self.error: Any = None
        self.whole = False
        self.request_id = ""
        self.status = 0
        self.parked: list[int] = []
        self.resumed_seconds: list[float] = []
        self.recomputed = 0

    def line(self, line: str) -> None:
        if line.startswith(":"):
            self.comments += 1
        elif line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                self.error = event["error"]
            self.events.append(event)

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices") or ()]

    @property
    def text(self) -> str:
        return "".join(_text_of(choice) for choice in self.choices)

    @property
    def token_ids(self) -> list[int]:
        return [token for choice in self.choices for token in choice.get("token_ids") or ()]

    @property
    def logprobs(self) -> list[Any]:
        """One entry a token, whichever of the two forms."""
        found: list[Any] = []
        for choice in self.choices:
            said = choice.get("logprobs") or {}
            if said.get("content"):
                found += [[entry["token"], entry["logprob"], entry["bytes"]] for entry in said["content"]]
            elif said.get("tokens"):
                columns = [said[name] for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")]
                found += [list(row) for row in zip(*columns, strict=True)]
        return found

    def smallest_lead(self, position: int) -> float:
        """By how much the best token led the second best, at its closest just before and at `position` of the text."""
        leads, length = [math.inf], 0
        for choice in self.choices:
            text = _text_of(choice)
            said = choice.get("logprobs") or {}
            if position - 6 <= length + len(text) and length <= position:
                entries, columns = said.get("content") or (), said.get("top_logprobs") or ()
                leads += [_lead([each["logprob"] for each in entry["top_logprobs"]]) for entry in entries]
                leads += [_lead(list(alternatives.values())) for alternatives in columns]
            length += len(text)
        return min(leads)

    @property
    def finish_reasons(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice.get("finish_reason")]

    @property
    def usage(self) -> list[tuple[int, int, int]]:
        usages = [event["usage"] for event in self.events if event.get("usage")]
        return [(each["prompt_tokens"], each["completion_tokens"], each["total_tokens"]) for each in usages]

    def constants(self) -> set[tuple[Any, ...]]:
        """What must be the same in every chunk of one answer."""
        return {
            tuple(event.get(name) for name in ("id", "object", "created", "model", "system_fingerprint"))
            for event in self.events
        }

    def summary(self) -> dict[str, Any]:
        """What an undisturbed run must agree in."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "finish": self.finish_reasons,
            "usage": self.usage[-1:],
            "roles": [choice["delta"]["role"] for choice in self.choices if (choice.get("delta") or {}).get("role")],
            "constants": len(self.constants()) <= 2,  # `created` may be the time of each chunk (llama.cpp)
            "object": {event.get("object") for event in self.events},
            "done": self.done,
            "whole": self.whole,
            "error": self.error,
        }


def _lead(logprobs: list[float]) -> float:
    best = sorted(logprobs, reverse=True)
    return best[0] - best[1] if len(best) > 1 else math.inf


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    return (delta.get("content") if delta is not None else choice.get("text")) or ""


class Cutter:
    """A gateway whose streams can be cut by hand."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.http = http
        assert gateway.parking is not None
        self.way = gateway.parking
        # By the client's own id: after how many tokens to cut, the last first; and the cuts under way.
        self.plans: dict[str, list[int]] = {}
        self.answers: dict[str, Answer] = {}
        self._cutting: dict[str, asyncio.Task[bool]] = {}
        self.asked = 0

    @property
    def url(self) -> str:
        host, port = self.gateway.addresses[0]
        return f"http://{host}:{port}"

    def tracked(self, request_id: str) -> Tracked | None:
        return self.gateway.controller.tracked.get(request_id)

    def exchange(self, request_id: str) -> LedgeredExchange:
        exchange = self.gateway.registry.alive[request_id]
        assert isinstance(exchange, LedgeredExchange), exchange
        return exchange

    def order(self, tracked: Tracked) -> None:
        """What the coordinator's edge does before it calls a way."""
        at = monotonic()
        cause = StopCause(
            semantics=Semantics.PREEMPT, source=Source.PREEMPTION, reason="test", observed_at=at, actor="a test"
        )
        self.gateway.carry_out(preempt(self.gateway.controller, tracked, at, cause), at)

    async def preempt(self, tracked: Tracked) -> Parked | Refused | Gone:
        self.order(tracked)
        return await self.way.preempt(tracked)

    async def resume(self, tracked: Tracked) -> Running | Refused | Gone:
        return await self.way.resume(tracked)

    async def cut_once(self, answer: Answer) -> bool:
        """Preempt and resume; False if it could not be, because it had ended."""
        tracked = self.tracked(answer.request_id)
        if tracked is None or self.way.can(tracked).exactness == 0:
            return False
        parked = await self.preempt(tracked)
        if not isinstance(parked, Parked):
            return False
        answer.parked.append(parked.recompute_tokens)
        began = monotonic()
        outcome = await self.resume(tracked)
        if not isinstance(outcome, Running):
            return False  # the stream was ended, and its client was told why
        answer.resumed_seconds.append(monotonic() - began)
        answer.recomputed = tracked.ledgers.tokens_recomputed
        return True

    def tokens_passed(self, exchange: LedgeredExchange) -> None:
        """Called whenever something of a stream has passed: here the cuts begin, whatever its client has read."""
        name = exchange.head.alias
        plan, transcript = self.plans.get(name), exchange.transcript
        under_way = self._cutting.get(name)
        if plan and transcript is not None and (under_way is None or under_way.done()):
            due = [tokens for tokens in plan if tokens <= transcript.tokens]
            if due:
                del plan[-len(due) :]
                answer = self.answers[name]
                answer.request_id = exchange.request_id
                self._cutting[name] = asyncio.get_running_loop().create_task(self.cut_once(answer))

    async def ask(
        self,
        path: str,
        body: dict[str, Any],
        *,
        cut_after: Sequence[int] = (),
        headers: dict[str, str] | None = None,
        on_event: Callable[[Answer], Any] | None = None,
    ) -> Answer:
        """Stream one request; after each of `cut_after` tokens it is preempted and resumed."""
        answer = Answer()
        self.asked += 1
        name = f"asked-{self.asked}"
        self.answers[name] = answer
        self.plans[name] = sorted(cut_after, reverse=True)
        sent = {"X-Request-Id": name, **(headers or {})}
        async with self.http.stream("POST", self.url + path, json=body, headers=sent) as response:
            answer.status = response.status_code
            answer.request_id = response.headers["x-stopguard-id"]
            try:
                async for line in response.aiter_lines():
                    answer.line(line)
                    if line.startswith("data: ") and on_event is not None:
                        on_event(answer)
            except httpx.RemoteProtocolError:
                pass  # an error event, and then no end
            else:
                answer.whole = True
        cutting = self._cutting.pop(name, None)
        if cutting is not None:
            await cutting
        del self.plans[name], self.answers[name]
        return answer


@contextlib.asynccontextmanager
async def cutting(
    engines: Sequence[Engine], *, resume: ResumeSettings | None = None, timeouts: Timeouts | None = None
) -> AsyncIterator[Cutter]:
    """A gateway in front of `engines`, all of whose streams are ledgered where they can be."""
    settings = GatewaySettings(
        listeners=(Listener(port=0),),
        resume=resume or ResumeSettings(failover=True, failovers=0),
        timeouts=timeouts or Timeouts(),
        limits=Limits(),
    )
    gateway = Gateway([(engine, EngineSettings()) for engine in engines], settings, stop_config=StopConfig())
    await gateway.start()
    received = LedgeredExchange._received

    def watched(exchange: LedgeredExchange, at: float) -> None:
        received(exchange, at)
        cutter.tokens_passed(exchange)

    try:
        for member in gateway.fleet.members:
            await gateway.fleet.refresh(member)
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as http:
            cutter = Cutter(gateway, http)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LedgeredExchange, "_received", watched)
                yield cutter
    finally:
        await gateway.shutdown(drain_seconds=1.0)
        assert gateway.failed_effects == 0
        assert not len(gateway.book), repr(gateway.book)
        assert not gateway.parking or not gateway.parking.parked


@contextlib.asynccontextmanager
async def narrow_wire(url: str, seed: int = 0, dead: asyncio.Event | None = None) -> AsyncIterator[str]:
    """A way to the server at `url` on which everything comes back in small pieces, cut anywhere.

    A fast engine on a busy machine sends a whole answer in one go, and a cut would always come too late. When `dead`
    is set, what is still on the way is lost, as the system drops it when the server's machine dies.
    """
    target = urlsplit(url)
    rng = random.Random(seed)
    writers: set[asyncio.StreamWriter] = set()
    open_ways = 0

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, small: bool) -> None:
        try:
            while data := await reader.read(65536):
                while data:
                    if dead is not None and dead.is_set():
                        return
                    size = rng.randrange(40, 600) if small else len(data)
                    writer.write(data[:size])
                    data = data[size:]
                    await writer.drain()
                    if small and data:
                        await asyncio.sleep(0.001)
        except (OSError, RuntimeError):
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection(target.hostname, target.port)
        except (OSError, RuntimeError):
            writer.close()
            return
        nonlocal open_ways
        open_ways += 1
        ends = {writer, onward[1]}
        writers.update(ends)
        try:
            await asyncio.gather(carry(reader, onward[1], small=False), carry(onward[0], writer, small=True))
        finally:
            for end in ends:
                end.transport.abort()
            writers.difference_update(ends)
            open_ways -= 1

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for each in writers:
            each.transport.abort()
        async with asyncio.timeout(PATIENCE):
            while open_ways:  # noqa: ASYNC110  (each ends in the turns that follow its abort)
                await asyncio.sleep(0.001)


class Trial:
    """One random request and where it is cut."""

    def __init__(self, number: int, seed: int, *, cuts: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        self.number = number
        self.rng = rng
        self.chat = rng.random() < 0.5
        self.path = "/v1/chat/completions" if self.chat else "/v1/completions"
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(3, 25)))
        self.body: dict[str, Any] = {"temperature": 0, "stream": True, "max_tokens": rng.randrange(20, 90)}
        if self.chat:
            self.body["messages"] = [{"role": "user", "content": words}]
        else:
            self.body["prompt"] = words
        if rng.random() < 0.7:
            self.body["stream_options"] = {"include_usage": True}
        self.cut_after = sorted(rng.randrange(1, self.body["max_tokens"]) for _ in range(cuts))


WORDS = ("queue", "token", "river", "café", "→", "stone 🙂", "letter", "def f(x):", "naïve", "summer", "42", "Straße")


TIE = 5e-3
SAID_AFTER = 50


class Figures:
    """What came of many trials. `differing` are those that differ although they should not.

    `unsteady`: the undisturbed request, asked again, gives yet another answer. `ties`: where they part, the two best
    tokens are less than `TIE` apart in log probability, and what an engine computes at once (a prompt) is not rounded
    as what it computes token by token; then it is chance which of them comes first.
    """

    def __init__(self) -> None:
        self.streams = 0
        self.cut = 0
        self.cuts = 0
        self.differing: list[str] = []
        self.unsteady: list[str] = []
        self.ties: list[str] = []
        self.refused = 0
        self.multibyte = 0
        self.overlaps: list[int] = []
        self.resume_seconds: list[float] = []

    def line(self) -> str:
        seconds = sorted(self.resume_seconds) or [0.0]
        overlaps = self.overlaps or [0]
        return (
            f"{self.streams} streams, {self.cut} of them cut, {self.cuts} cuts: {len(self.differing)} differ"
            f" ({len(self.ties)} more at a tie of the two best tokens, {len(self.unsteady)} more where the engine"
            f" differs from itself), {self.refused} of all ended with an error; {self.multibyte} with characters of"
            f" several bytes; overlap {sum(overlaps) / len(overlaps):.1f} tokens (at most {max(overlaps)});"
            f" to the first new token p50 {seconds[len(seconds) // 2] * 1e3:.0f} ms, max {seconds[-1] * 1e3:.0f} ms"
        )


async def compare(
    cutter: Cutter, trials: Sequence[Trial], *, at_once: int = 1, say: Callable[[str], Any] | None = None
) -> Figures:
    """Run each trial undisturbed and cut, and compare. Where they differ, the engine is asked whether it is steady."""
    figures = Figures()

    async def one(trial: Trial) -> None:
        quiet = await cutter.ask(trial.path, trial.body)
        cut = await cutter.ask(trial.path, trial.body, cut_after=trial.cut_after)
        figures.streams += 1
        figures.cut += bool(cut.parked)
        figures.cuts += len(cut.parked)
        figures.overlaps += cut.parked
        figures.resume_seconds += cut.resumed_seconds
        figures.multibyte += not quiet.text.isascii()
        assert quiet.status == cut.status == 200, (trial.number, quiet.status, cut.status)
        figures.refused += cut.error is not None
        if cut.summary() == quiet.summary():
            return
        again = [(await cutter.ask(trial.path, trial.body)).summary() for _ in range(2)]
        names = [name for name, value in cut.summary().items() if value != quiet.summary()[name]]
        what = f"{trial.number} {trial.path} {', '.join(names)}: {_first_difference(quiet, cut)}"
        if any(each != quiet.summary() for each in again):
            figures.unsteady.append(what)
        elif (parting := _parting(quiet, cut)) is not None and await lead(trial, parting) < TIE:
            figures.ties.append(what)
        else:
            figures.differing.append(what)

    async def lead(trial: Trial, position: int) -> float:
        wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if trial.chat else {"logprobs": 2}
        return (await cutter.ask(trial.path, {**trial.body, **wanted})).smallest_lead(position)

    for first in range(0, len(trials), at_once):
        await asyncio.gather(*(one(trial) for trial in trials[first : first + at_once]))
        if say is not None and (first + at_once) // SAID_AFTER > first // SAID_AFTER:
            say(figures.line())
    return figures


def _parting(quiet: Answer, cut: Answer) -> int | None:
    """Where the two texts part, `None` where only something else differs."""
    for at, (one, other) in enumerate(zip(quiet.text, cut.text, strict=False)):
        if one != other:
            return at
    shorter = min(len(quiet.text), len(cut.text))
    return None if len(quiet.text) == len(cut.text) else shorter


def _first_difference(quiet: Answer, cut: Answer) -> str:
    at = _parting(quiet, cut)
    if at is None or cut.error:
        return f"error {cut.error}, {len(quiet.text)} and {len(cut.text)} characters"
    return f"text from {at}: {quiet.text[max(0, at - 8) : at + 12]!r} and {cut.text[max(0, at - 8) : at + 12]!r}"
