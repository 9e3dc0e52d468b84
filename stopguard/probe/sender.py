"""Runs inside an engine: sends what the scheduler says to a collector, and brings its commands back.

What a plugin uses
------------------
    sender = Sender.from_environment("vllm", version, role="engine", rank=0, blocks_total=..., block_tokens=...)
    if sender is None: return                   # STOPGUARD_COLLECTOR is not set: do nothing at all
    sender.start()
    sender.send(frame)                          # after each step; about a microsecond, never waits, never raises
    for command in sender.commands():           # between two steps; empty nearly always, and then 50 ns
        sender.send(wire.CommandAnswer(command.command_id, "applied"))      # or a wire.Snapshot
    sender.describe(hooks_missing=("x",))       # what has become different since the start
    sender.close()

An engine that waits for work without stepping wants to be woken: `on_command` is called (from the sender's
thread, with nothing to give; must not wait) whenever commands came. `guard` is for the plugin's hooks.

The rules
---------
The engine is never slowed, never stopped and never made to fail by any of this. `send` puts a frame in a bounded
queue; when it is full the oldest frame goes and is counted, and the collector is told (`wire.Gap`). Answers and
snapshots are not dropped for frames (`sender_queue`). Two daemon threads do everything else: one writes, one reads. A
collector that is dead, slow, or not the one that knows the token costs one line in the log and a retry every few
seconds; one that sends too much is read more slowly. A process that is forked off has no sender: in the child `send`
does nothing and the parent's connection is closed.

Environment: `STOPGUARD_COLLECTOR` (tcp://HOST:PORT or the path of a Unix socket), `STOPGUARD_COLLECTOR_TOKEN` and,
where several engines of one kind are known to the gateway, `STOPGUARD_ENGINE_NAME` (its name there).
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, ParamSpec, TypeVar

import msgspec

from stopguard.errors import ConfigurationError
from stopguard.probe import wire
from stopguard.probe.sender_queue import SendQueue

__all__ = ["Guarded", "Sender", "guard", "parse_address"]

logger = logging.getLogger("stopguard.probe")

ADDRESS_VARIABLE: Final = "STOPGUARD_COLLECTOR"
TOKEN_VARIABLE: Final = "STOPGUARD_COLLECTOR_TOKEN"
NAME_VARIABLE: Final = "STOPGUARD_ENGINE_NAME"

_HANDSHAKE_SECONDS: Final = 5.0
_SEND_SECONDS: Final = 5.0
#: A collector pings every few seconds; after this much silence it is gone.
_SILENCE_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
#: A wrong token or version does not mend itself.
_REFUSED_RETRY_SECONDS: Final = 15.0
#: A connection that lasted less does not start the retries anew.
_STABLE_SECONDS: Final = 1.0
_SAY_AGAIN_SECONDS: Final = 10.0
_TROUBLES_MAX: Final = 16
#: Messages joined into one write.
_BURST_MESSAGES_MAX: Final = 64
_BURST_BYTES_MAX: Final = 256 * 1024
_COMMANDS_MAX: Final = 1024
#: A collector that says more than this in a second is read more slowly.
_MESSAGES_A_SECOND: Final = 5000
_COMMAND_BYTES_MAX: Final = 64 * 1024

#: (host, port), or the path of a Unix socket.
_Address = tuple[str, int] | str

P = ParamSpec("P")
R = TypeVar("R")


def parse_address(address: str) -> _Address:
    """`tcp://HOST:PORT`, `unix:PATH` or an absolute path; `ConfigurationError` for anything else."""
    if address.startswith("tcp://"):
        host, colon, port = address.removeprefix("tcp://").rpartition(":")
        if colon and host and port.isdecimal() and 0 < int(port) < 65536:
            return host.strip("[]"), int(port)
    else:
        path = address.removeprefix("unix:").removeprefix("//")
        if path.startswith("/"):
            return path
    raise ConfigurationError(f"probe address {address!r}: give tcp://HOST:PORT or an absolute path of a Unix socket")


class _RefusedError(Exception):
    """The collector, or we, will not have it: no use to try again at once."""


class Sender:
    """One connection to a collector, kept up in the background.

    `hello` says who speaks (its `proof`, `instance`, `host` and `process` are filled in here). `on_command` is called
    from the sender's thread when commands came. `frames_max` bounds what waits to be sent.
    """

    def __init__(
        self,
        address: str,
        token: str,
        hello: wire.Hello,
        *,
        frames_max: int = 1024,
        on_command: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        retry_seconds: Sequence[float] = _RETRY_SECONDS,
        refused_retry_seconds: float = _REFUSED_RETRY_SECONDS,
    ) -> None:
        self._target = parse_address(address)
        if len(token) < wire.TOKEN_CHARACTERS_MIN:
            raise ConfigurationError(
                f"the collector's token ({TOKEN_VARIABLE}) must have at least {wire.TOKEN_CHARACTERS_MIN} characters"
            )
        self.address = address
        self.on_command = on_command
        self.connected = False
        #: Frames that the collector will never see.
        self.frames_dropped = 0
        self.frames_sent = 0
        #: Answers and snapshots for which there was no room: the collector asks and does not read.
        self.answers_dropped = 0
        self.connects = 0
        #: Messages that could not be encoded: a plugin's mistake.
        self.broken_messages = 0
        self._token = token
        self._clock = clock
        self._retry_seconds = tuple(retry_seconds)
        self._refused_retry_seconds = refused_retry_seconds
        self._hello = msgspec.structs.replace(
            hello, instance=secrets.token_hex(8), host=socket.gethostname(), process=os.getpid()
        )
        self._frames_max = frames_max
        self._queue = SendQueue(frames_max)
        self._commands: deque[wire.Command] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: socket.socket | None = None
        self._broken = False
        self._inert = False
        self._said: dict[str, float] = {}
        self._worked_at = 0.0
        self._told_dropped = 0
        _senders.add(self)

    @classmethod
    def from_environment(
        cls,
        engine: str,
        engine_version: str,
        *,
        role: str = "engine",
        rank: int = 0,
        ranks: int = 1,
        blocks_total: int = 0,
        block_tokens: int = 0,
        commands: Sequence[wire.Action] = (),
        hooks_attached: Sequence[str] = (),
        hooks_missing: Sequence[str] = (),
        on_command: Callable[[], None] | None = None,
        frames_max: int = 1024,
        environment: Mapping[str, str] | None = None,
    ) -> Sender | None:
        """The sender that the environment asks for; `None`, with a line in the log if it asks wrongly, when none.

        `engine` is the kind of engine (the name of its adapter). Never raises.
        """
        variables = os.environ if environment is None else environment
        address = variables.get(ADDRESS_VARIABLE, "")
        if not address:
            return None
        token = variables.get(TOKEN_VARIABLE, "")
        if not token:
            logger.warning(
                "StopGuard's probe is off: %s is set, but %s is not (both come from the gateway's probe settings)",
                ADDRESS_VARIABLE,
                TOKEN_VARIABLE,
            )
            return None
        hello = wire.Hello(
            proof=b"",
            engine=engine,
            engine_version=engine_version,
            instance="",
            name=variables.get(NAME_VARIABLE, ""),
            role=role,
            rank=rank,
            ranks=ranks,
            blocks_total=blocks_total,
            block_tokens=block_tokens,
            commands=tuple(commands),
            hooks_attached=tuple(hooks_attached),
            hooks_missing=tuple(hooks_missing),
        )
        try:
            return cls(address, token, hello, frames_max=frames_max, on_command=on_command)
        except Exception as error:  # whatever is wrong with our settings, the engine runs
            logger.warning("StopGuard's probe is off: %s", error)
            return None

    # ---- what the engine's threads call ----------------------------------------------------------

    def start(self) -> None:
        """Connect in the background, for as long as the process lives or until `close`."""
        if self._thread is None and not self._inert:
            self._thread = threading.Thread(target=self._run, name="stopguard probe", daemon=True)
            self._thread.start()

    def send(self, message: wire.Frame | wire.Snapshot | wire.CommandAnswer) -> None:
        """Queue one message; about a microsecond. Never waits and never raises. Any thread."""
        if self._inert:
            return
        if isinstance(message, wire.Frame):
            self.frames_dropped += self._queue.put_frame(message)
        else:
            self.answers_dropped += not self._queue.put_word(message)

    def commands(self) -> Sequence[wire.Command]:
        """Take the commands that came since the last call, oldest first. Call it between two steps."""
        pending = self._commands
        if not pending:
            return ()
        taken: list[wire.Command] = []
        with contextlib.suppress(IndexError):  # another thread of the engine may take them too
            while pending:
                taken.append(pending.popleft())
        return taken

    def describe(self, **changes: Any) -> None:
        """Change fields of the hello (`blocks_total`, `hooks_missing`, ...) and tell the collector."""
        self._hello = msgspec.structs.replace(self._hello, **changes)
        if not self._inert:
            self._queue.put_word(self._hello)

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued if the collector takes it within `timeout` seconds, then disconnect."""
        self._closing.set()
        self._queue.wake()
        thread = self._thread
        if thread is None or self._inert:
            return
        thread.join(timeout)
        if thread.is_alive():
            self._shut()  # wakes a write that the collector does not take
            thread.join(timeout)

    # ---- inside ----------------------------------------------------------------------------------

    def _forked(self) -> None:
        """This is a forked child: the threads are not here, and the connection is the parent's."""
        self._inert = True
        self.connected = False
        self._queue = SendQueue(self._frames_max)  # a lock in it may have been held by a thread that is not here
        self._commands = deque()
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                os.close(connection.detach())  # only this copy; a shutdown would cut the parent off

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            began = time.monotonic()
            wait = self._retry_seconds[min(failures, len(self._retry_seconds) - 1)]
            try:
                self._converse()
            except _RefusedError as error:
                self._complain(str(error), str(error))
                wait = self._refused_retry_seconds
            except (OSError, msgspec.DecodeError, wire.ProbeProtocolError) as error:
                self._complain("gone", f"no collector ({str(error) or type(error).__name__})")
            except Exception:
                logger.exception("StopGuard's probe: a mistake of ours; the engine is not touched")
                wait = self._refused_retry_seconds
            failures = 0 if time.monotonic() - began > _STABLE_SECONDS else failures + 1
            self._closing.wait(wait)
        self.frames_dropped += self._queue.clear()

    def _complain(self, kind: str, text: str) -> None:
        """One line for each kind of trouble until it works again, and never one soon after the other."""
        now = time.monotonic()
        said_at = self._said.get(kind)
        news = said_at is None or (self._worked_at > said_at and now - said_at > _SAY_AGAIN_SECONDS)
        if news and not self._closing.is_set() and len(self._said) < _TROUBLES_MAX:
            self._said[kind] = now
            logger.warning(
                "StopGuard's probe at %s: %s; frames are dropped, the engine runs on, trying again", self.address, text
            )

    def _converse(self) -> None:
        """One connection, from its beginning to its end. Returns when it was closed by `close`."""
        with self._connect() as connection:
            self._connection = connection
            self._shake_hands(connection)
            self.connects += 1
            self._broken = False
            self._worked_at = time.monotonic()
            self.connected = True
            logger.info("StopGuard's probe: connected to %s", self.address)
            # The collector's books begin anew at each connection: it knows the first number it should see.
            self._told_dropped = self.frames_dropped
            reader = threading.Thread(target=self._read, args=(connection,), name="stopguard commands", daemon=True)
            reader.start()
            try:
                self._pump(connection)
            finally:
                self.connected = False
                self._shut()
                self._connection = None
                reader.join(_SEND_SECONDS)

    def _connect(self) -> socket.socket:
        target = self._target
        if isinstance(target, tuple):
            connection = socket.create_connection(target, timeout=_HANDSHAKE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        else:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(_HANDSHAKE_SECONDS)
                connection.connect(target)
            except BaseException:
                connection.close()
                raise
        return connection

    def _shake_hands(self, connection: socket.socket) -> None:
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        connection.sendall(wire.encode(wire.Greeting(wire.SCHEMA_VERSION, nonce)))
        challenge = self._receive(connection)
        if isinstance(challenge, wire.Refused):
            raise _RefusedError(f"the collector refuses: {challenge.detail or challenge.refusal}")
        if not isinstance(challenge, wire.Challenge):
            raise _RefusedError("what listens there is no collector of StopGuard's")
        if challenge.schema_version != wire.SCHEMA_VERSION:
            raise _RefusedError(
                f"the collector speaks schema version {challenge.schema_version} and this engine's StopGuard "
                f"{wire.SCHEMA_VERSION}: install the same version of StopGuard on both sides"
            )
        if not hmac.compare_digest(challenge.proof, wire.collector_proof(self._token, nonce, challenge.nonce)):
            raise _RefusedError(f"the collector has another token: {TOKEN_VARIABLE} must be the gateway's probe token")
        proof = wire.engine_proof(self._token, nonce, challenge.nonce)
        self._queue.forget_words()
        hello = msgspec.structs.replace(self._hello, proof=proof, at=self._clock(), frames_dropped=self.frames_dropped)
        connection.sendall(wire.encode(hello))
        answer = self._receive(connection)
        if isinstance(answer, wire.Refused):
            raise _RefusedError(f"the collector refuses: {answer.detail or answer.refusal}")
        if not isinstance(answer, wire.Welcome):
            raise _RefusedError("what listens there is no collector of StopGuard's")
        connection.settimeout(None)
        # Python's own timeouts would hold for both directions.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_SECONDS))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(_SILENCE_SECONDS))

    def _receive(self, connection: socket.socket) -> wire.FromCollector:
        size = int.from_bytes(_exactly(connection, 4), "big")
        if size > _COMMAND_BYTES_MAX:
            raise _RefusedError("what listens there is no collector of StopGuard's")
        payload = _exactly(connection, size)
        try:
            return wire.decode_from_collector(payload)
        except msgspec.DecodeError:
            raise _RefusedError("what listens there is no collector of StopGuard's") from None

    def _pump(self, connection: socket.socket) -> None:
        """Write until it is closed; `OSError` when the connection breaks (what was on its way is lost)."""
        last = False
        while not last:
            self._queue.wait()
            last = self._closing.is_set()  # looked at first: what was queued before the end is sent
            while True:
                if self._broken:
                    raise ConnectionError("the connection was closed")
                burst, frames = self._burst()
                if not burst:
                    break
                if self.frames_dropped != self._told_dropped:
                    self._told_dropped = self.frames_dropped
                    burst.insert(0, wire.encode(wire.Gap(self.frames_dropped)))
                try:
                    connection.sendall(b"".join(burst))
                except OSError:
                    self.frames_dropped += frames
                    raise
                self.frames_sent += frames

    def _burst(self) -> tuple[list[bytes], int]:
        """What is queued now, encoded, as far as it goes into one write: (messages, how many are frames)."""
        burst: list[bytes] = []
        frames = size = 0
        while len(burst) < _BURST_MESSAGES_MAX and size < _BURST_BYTES_MAX:
            item = self._queue.take()
            if item is None:
                break
            data = self._encode(item)
            burst.append(data)
            size += len(data)
            frames += isinstance(item, wire.Frame)
        return burst, frames

    def _encode(self, item: Any) -> bytes:
        try:
            if type(item) is tuple:
                ping, received_at = item
                item = wire.Pong(ping.ping_id, received_at, self._clock())
            return wire.encode(item)
        except Exception as error:  # a plugin gave us something that is no message
            if not self.broken_messages:
                logger.warning("StopGuard's probe: a message cannot be sent: %s: %s", type(error).__name__, error)
            self.broken_messages += 1
            self.frames_dropped += isinstance(item, wire.Frame)
            return b""

    # ---- the reading thread ----------------------------------------------------------------------

    def _read(self, connection: socket.socket) -> None:
        try:
            began, messages = time.monotonic(), 0
            while True:
                message = self._receive(connection)
                messages += 1
                if messages >= _MESSAGES_A_SECOND:
                    self._closing.wait(max(0.0, began + 1.0 - time.monotonic()))
                    began, messages = time.monotonic(), 0
                if isinstance(message, wire.Command):
                    self._take(message)
                elif isinstance(message, wire.Ping):
                    self._queue.put_word((message, self._clock()))
                else:
                    break
        except (OSError, _RefusedError):
            pass
        except Exception:
            logger.exception("StopGuard's probe: a mistake of ours; the engine is not touched")
        self._broken = True
        self._queue.wake()

    def _take(self, command: wire.Command) -> None:
        if len(self._commands) >= _COMMANDS_MAX:
            self._queue.put_word(
                wire.CommandAnswer(command.command_id, "refused", 1.0, "too many commands are waiting")
            )
            return
        self._commands.append(command)
        if self.on_command is not None:
            self.on_command()

    def _shut(self) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the collector closed the connection")
        data += part
    return bytes(data)


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for sender in list(_senders):
        sender._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- hooks --------------------------------------------------------------------------------------


class Guarded(Generic[P, R]):
    """A hook that cannot hurt: what it raises is counted, and after `limit` times it is `off` and does nothing.

    Calling it gives the hook's result, or `None` when it failed or is off. `on_off` is called once, with its name.
    """

    def __init__(
        self, function: Callable[P, R], name: str, limit: int, on_off: Callable[[str], None] | None = None
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = name
        self.limit = limit
        self.failures = 0
        self.off = False
        self.on_off = on_off
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.off:
            return None
        try:
            return self._function(*args, **kwargs)
        except Exception as error:  # that is the point of it
            with contextlib.suppress(Exception):
                self._failed(error)
            return None

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method: bound like one."""
        return self if instance is None else functools.partial(self, instance)  # type: ignore[arg-type]

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures >= self.limit:
            self.off = True
            logger.warning(
                "StopGuard's hook %s is off: it failed %d times, the last time with %s: %s (the engine is not touched)",
                self.name,
                self.failures,
                type(error).__name__,
                error,
            )
            if self.on_off is not None:
                self.on_off(self.name)
        elif self.failures == 1:
            logger.warning(
                "StopGuard's hook %s failed (%s: %s)", self.name, type(error).__name__, error, exc_info=error
            )


def guard(
    name: str, limit: int = 10, on_off: Callable[[str], None] | None = None
) -> Callable[[Callable[P, R]], Guarded[P, R]]:
    """Make the function under it `Guarded`: `@guard("schedule")`."""

    def wrap(function: Callable[P, R]) -> Guarded[P, R]:
        return Guarded(function, name, limit, on_off)

    return wrap
