"""Scenarios in which the client goes: every window of a request's life, and every way of closing."""

from __future__ import annotations

from stopguard.audit.scenario import scenario
from stopguard.audit.stage import Skip, Stage, Ticket, why

__all__: list[str] = []

#: A prompt of about this many × 12 words takes several chunks of prefill.
_LONG_PROMPT_WORDS = 40
#: How long those that fill the slots run, of the deadline.
_FILLER_SHARE = 0.6
#: A half-closed client that has got so many more events is being served.
_SERVED_ON_EVENTS = 20


@scenario("finish", "plain ends", requests=4)
async def finish(stage: Stage) -> None:
    """Requests that nobody stops, streamed and not: they end normally and hold nothing afterwards."""
    for number in range(len(stage.canaries)):
        await stage.canary(number)
    await stage.open("companion", stream=False, tokens=8, must_finish=True)
    await stage.all_ended(stage.tickets, stage.plan.deadline_seconds * 4)


@scenario("mid-stream", "left in the middle of a stream", requests=4, long=3)
async def mid_stream(stage: Stage) -> None:
    """Three clients close their connections in the middle of a stream; a fourth stream must go on unchanged."""
    victims = [await stage.open() for _ in range(3)]
    for victim in victims:
        await stage.speaking(victim)
    await stage.canary(0)
    for victim in victims:
        await stage.leave(victim)


@scenario("non-streaming", "left without a stream", requests=2, long=2)
async def non_streaming(stage: Stage) -> None:
    """Clients that wait for a whole answer close their connections while it is computed."""
    for _ in range(2):
        victim = await stage.open(stream=False)
        await stage.speaking(victim)
        await stage.leave(victim)


@scenario("busy-neighbour", "left without a stream, while a neighbour streams", requests=2, long=1)
async def busy_neighbour(stage: Stage) -> None:
    """As `non-streaming`, while another stream is delivered all the time: it may starve whoever looks at sockets."""
    neighbour = await stage.open("companion", tokens=min(400, stage.long_tokens()), must_finish=True)
    await stage.speaking(neighbour)
    victim = await stage.open(stream=False)
    await stage.speaking(victim)
    await stage.leave(victim)


@scenario("before-headers", "left before the response has a head", requests=2, long=2)
async def before_headers(stage: Stage) -> None:
    """Clients close their connections right after sending the request, streamed and not."""
    for stream in (True, False):
        victim = await stage.open(stream=stream)
        if victim.reply.head_at is not None and not stream:
            raise Skip("the whole answer was there before the client could go")
        await stage.leave(victim)


@scenario("before-first-byte", "left after the head, before the first byte", requests=3, long=1)
async def before_first_byte(stage: Stage) -> None:
    """The response's head has come and no byte of its body; then the client closes its connection."""
    for _ in range(3):
        victim = await stage.open(words=_LONG_PROMPT_WORDS)
        reply = victim.reply
        await stage.world.wait(lambda reply=reply: reply.head_at is not None, stage.plan.deadline_seconds)  # type: ignore[misc]
        if reply.head_at is not None and reply.first_at is None and not reply.ended:
            await stage.leave(victim)
            return
        victim.role = "companion"
    raise Skip("this server sends its head together with the first byte")


@scenario("prefill", "left during the prefill", requests=3, long=2)
async def prefill(stage: Stage) -> None:
    """Clients leave while their long prompts are computed in chunks, streamed and not; a neighbour goes on."""
    await stage.canary(1)
    for stream in (True, False):
        victim = await stage.open(stream=stream, words=_LONG_PROMPT_WORDS)
        await in_prefill(stage, victim)
        await stage.leave(victim)


async def in_prefill(stage: Stage, victim: Ticket) -> None:
    """Wait until the prompt is being computed: not waiting any more, and no token yet. `Skip` if that is too short."""
    until = stage.world.now() + stage.plan.deadline_seconds
    pause = max(0.001, min(0.01, stage.measured.token_seconds / 2))
    while stage.world.now() < until:
        if victim.reply.ended and victim.reply.status != 200:
            raise Skip(f"a long prompt was refused ({why(victim.reply)})")
        if victim.reply.first_at is not None:
            raise Skip("the prompt was computed too quickly to leave in the middle of it")
        if not stage.events:
            await stage.world.sleep(stage.measured.first_token_seconds / 2)
            return
        await stage.watch.events()
        traces = stage.traces(victim)
        if any(trace.computed for trace in traces):
            raise Skip("the prompt was computed too quickly to leave in the middle of it")
        if any(trace.place == "running" or trace.blocks_held for trace in traces):
            return
        await stage.world.sleep(pause)


async def fill(stage: Stage) -> Ticket:
    """Fill the slots until calls have to wait; gives a long call that waits. `Skip` if none ever does.

    Those that run do so for a part of the deadline only: an engine that looks at a closed connection when
    nobody streams is slow, and not broken.
    """
    if await stage.reading() is None:
        raise Skip("this engine does not show who waits")
    limit = stage.plan.fill_max - 1
    tokens = min(stage.long_tokens(), int(_FILLER_SHARE * stage.plan.deadline_seconds / stage.measured.token_seconds))
    for _ in range(limit):
        ticket = await stage.open("companion", tokens=max(16, tokens))
        if ticket.reply.ended:
            raise Skip("the engine refused a call while its slots were being filled")
        if await _waits(stage):
            break
    else:
        raise Skip(f"{limit} requests at once do not fill this engine's slots (its queue stays empty)")
    victim = await stage.open("victim")
    if not await _waits(stage) or not await queues(stage, victim):
        raise Skip("the queue moves too quickly to be held")
    return victim


async def _waits(stage: Stage) -> bool:
    """Somebody waits, and still does a few steps later."""
    for _ in range(3):
        reading = await stage.reading()
        if reading is None or not reading.gauges.waiting:
            return False
        await stage.world.sleep(2 * stage.measured.token_seconds)
    return True


async def queues(stage: Stage, ticket: Ticket) -> bool:
    """Whether the call waits in the engine's queue and has never run."""
    if stage.events:
        await stage.watch.events()
        traces = stage.traces(ticket)
        return bool(traces) and all(trace.place in {"", "waiting"} for trace in traces)
    return ticket.reply.events == 0


@scenario("queued", "left while it waits in the queue", requests=lambda plan: plan.fill_max, long=1)
async def queued_behind_others(stage: Stage) -> None:
    """All slots are busy; a client whose request waits leaves. Those that run must go on."""
    victim = await fill(stage)
    await stage.leave(victim)


@scenario("half-close", "half-closed in the middle of a stream", requests=2, long=2)
async def half_close(stage: Stage) -> None:
    """Clients end their own direction only (FIN, and they would go on reading): by HTTP/1.1 servers' habit, gone.

    A gateway may also take them for clients that wait, and go on serving them. Then they close altogether, and that
    must be seen: neither serving them nor telling the engine is what nobody may do.
    """
    for _ in range(2):
        victim = await stage.open()
        await stage.speaking(victim)
        await stage.leave(victim, "half-close")
        if stage.through_gateway and await _served_on(stage, victim):
            victim.stopped_at, victim.how = None, ""
            await stage.leave(victim)


async def _served_on(stage: Stage, victim: Ticket) -> bool:
    """Whether a client that has half-closed still gets its stream: more of it than can have been under way."""
    reply, enough = victim.reply, victim.reply.events + _SERVED_ON_EVENTS
    pause = 4 * _SERVED_ON_EVENTS * stage.measured.token_seconds
    exchange = victim.exchange
    await stage.world.wait(
        lambda: reply.ended or reply.events >= enough or not exchange.open, min(stage.plan.deadline_seconds, pause)
    )
    served = reply.events >= enough and not reply.ended
    if served:
        stage.notes.append("the gateway serves a client that has half-closed; it was then closed altogether")
    return served


@scenario("reset", "reset in the middle of a stream", requests=2, long=2)
async def reset(stage: Stage) -> None:
    """The connection is reset (RST), as by a client that crashed or a middlebox."""
    for _ in range(2):
        victim = await stage.open()
        await stage.speaking(victim)
        await stage.leave(victim, "reset")


@scenario("stalled-reader", "a reader that stalls, then goes", requests=2, long=1)
async def stalled_reader(stage: Stage) -> None:
    """A client stops reading in the middle of its stream and later resets the connection; a neighbour goes on."""
    victim = await stage.open()
    await stage.speaking(victim)
    victim.exchange.stall()
    await stage.canary(2)
    await stage.world.sleep(min(1.0, stage.plan.deadline_seconds / 4))
    await stage.leave(victim, "reset")
