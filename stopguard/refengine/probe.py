"""The reference engine's probe: what a plugin is inside a real engine, in its shortest form.

Each frame goes to the sender as it is, but for the names: whoever sent a request calls it by its `X-Request-Id`
(StopGuard's id, when the gateway sent it), and the engine's own request is a part of that. Commands come back in the
sender's thread and are carried out in the face's loop, between two steps.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from stopguard import __version__
from stopguard.probe import wire
from stopguard.probe.sender import ADDRESS_VARIABLE, NAME_VARIABLE, TOKEN_VARIABLE, Sender
from stopguard.refengine.http_face import Face
from stopguard.refengine.interface import AbortAnswer, NotSupported, RequestView

__all__ = ["ReferenceProbe"]

_ANSWERS: dict[str, wire.Answer] = {
    "accepted": "accepted",
    "suppressed": "accepted",
    "aborted": "applied",
    "try_again": "refused",
    "unknown": "unknown",
}


class ReferenceProbe:
    """Ties one face to one collector; made before the face serves.

    Raises `ConfigurationError` for an address or a token that cannot work.
    """

    def __init__(self, face: Face, address: str, token: str, name: str = "") -> None:
        engine = face.engine
        commands: tuple[wire.Action, ...] = ("abort", "snapshot")
        if engine.policy.holds:
            commands = (*commands, "preempt", "resume")
        hello = wire.Hello(
            proof=b"",
            engine="ref",
            engine_version=f"{__version__} ({engine.policy.name})",
            instance="",
            name=name,
            role="engine",
            blocks_total=engine.config.blocks,
            block_tokens=engine.config.block_tokens,
            commands=commands,
        )
        self.sender = Sender(address, token, hello, on_command=self._wake, clock=face.clock.now)
        self._face = face
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Snapshots that wait for the next frame, since something has happened that no frame has said.
        self._snapshots: list[int] = []
        self._owners: dict[str, str] = {}
        face.on_frame = self._on_frame
        face.on_start.append(self._start)

    @classmethod
    def from_environment(cls, face: Face, address: str | None, environment: dict[str, str]) -> ReferenceProbe | None:
        """The probe for `address`, or for the environment's; `None` where there is neither."""
        wanted = address or environment.get(ADDRESS_VARIABLE, "")
        if not wanted:
            return None
        return cls(face, wanted, environment.get(TOKEN_VARIABLE, ""), environment.get(NAME_VARIABLE, ""))

    def close(self) -> None:
        """Send what is queued, for a moment, and disconnect."""
        self.sender.close()

    # ---- from the face -----------------------------------------------------------------------------

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.sender.start()

    def _on_frame(self, frame: wire.Frame) -> None:
        events = frame.events
        if any(type(event) is wire.Added for event in events):
            events = [self._owned(event) if isinstance(event, wire.Added) else event for event in events]
            frame = msgspec.structs.replace(frame, events=events)
        for event in events:
            if isinstance(event, wire.Moved) and event.place == "gone":
                self._owners.pop(event.request_id, None)
        self.sender.send(frame)
        waiting, self._snapshots = self._snapshots, []
        for command_id in waiting:
            self._snapshot(command_id)

    def _owned(self, event: wire.Added) -> wire.Added:
        ticket = self._face.driver.tickets.get(event.parent_id or event.request_id)
        if ticket is None or not ticket.owner or ticket.owner == event.request_id:
            return event
        self._owners[event.request_id] = ticket.owner
        return msgspec.structs.replace(event, parent_id=ticket.owner)

    # ---- from the collector ------------------------------------------------------------------------

    def _wake(self) -> None:
        """In the sender's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        for command in self.sender.commands():
            try:
                answer = self._carry_out(command)
            except Exception as error:  # an engine is not harmed by whoever watches it
                answer = wire.CommandAnswer(command.command_id, "failed", 0.0, f"{type(error).__name__}: {error}")
            if answer is not None:
                self.sender.send(answer)

    def _carry_out(self, command: wire.Command) -> wire.CommandAnswer | None:
        driver, engine = self._face.driver, self._face.engine
        if command.action == "snapshot":
            driver.catch_up()
            if engine.between_frames:
                self._snapshot(command.command_id)
            else:
                self._snapshots.append(command.command_id)
            return None
        names = list(driver.by_owner.get(command.request_id, ()))
        if not names and command.request_id in driver.tickets:
            names = [command.request_id]
        if not names:
            return wire.CommandAnswer(command.command_id, "unknown")
        if command.action == "abort":
            answers: list[AbortAnswer] = []
            driver.command(lambda at: answers.extend(engine.abort(name, at, "inside") for name in names))
            worst = max(answers, key=lambda answer: answer.retry_after_seconds)
            return wire.CommandAnswer(command.command_id, _ANSWERS.get(worst.kind, "failed"), worst.retry_after_seconds)
        if command.action == "hold":
            return wire.CommandAnswer(command.command_id, "unsupported")
        call = engine.preempt if command.action == "preempt" else engine.resume
        try:
            for name in names:
                driver.command(partial(call, name))
        except NotSupported as error:
            return wire.CommandAnswer(command.command_id, "unsupported", 0.0, str(error))
        return wire.CommandAnswer(command.command_id, "accepted")

    def _snapshot(self, command_id: int) -> None:
        engine = self._face.engine
        picture = engine.snapshot(engine.now)
        gauges = picture.gauges
        self.sender.send(
            wire.Snapshot(
                command_id,
                engine.sequence,
                picture.steps_done,
                picture.at,
                [*(self._now(view) for view in picture.requests), *self._leaving()],
                gauges.running,
                gauges.waiting + gauges.preempted,
                gauges.blocks_free,
                gauges.blocks_cached,
            )
        )

    def _leaving(self) -> list[wire.RequestNow]:
        return [
            wire.RequestNow(request.request_id, "gone", blocks_held=held, blocks_fenced=request.blocks_fenced)
            for request, held in self._face.engine.leaving()
        ]

    def _now(self, view: RequestView) -> wire.RequestNow:
        return wire.RequestNow(
            view.request_id,
            view.place,
            prompt_tokens=view.prompt_tokens,
            parent_id=self._owners.get(view.request_id, view.parent_id),
            blocks_held=view.blocks_held,
            blocks_fenced=view.blocks_fenced,
            tokens_computed=view.output_tokens,
            tokens_emitted=view.output_tokens,
            tokens_dropped=0,
            slots=dict(view.slots),
        )
