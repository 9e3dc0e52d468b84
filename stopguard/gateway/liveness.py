"""How we know that a client is gone: the theory in one place, and the socket options behind it.

Theory
------
A client can leave in five ways, and each shows differently:

========== ============================== ============================================================
way        what the kernel sees           how it reaches us
========== ============================== ============================================================
``eof``    FIN                            `eof_received`; a half-close looks the same (see `HalfClose`)
``reset``  RST                            `connection_lost(ConnectionResetError)`
vanished   nothing                        keep-alive probes or unacknowledged data time out:
                                          `connection_lost(TimeoutError)`, called ``keepalive``
``stall``  acknowledged, never read       our buffer for it stays full until a deadline
write      RST in answer to our data      `connection_lost(BrokenPipeError)`, called ``write_error``
========== ============================== ============================================================

**A socket that is not read shows nothing.** An event loop that has stopped reading a socket waits for no
event on it, so neither FIN nor RST wakes it (measured with asyncio on Linux: after `pause_reading` neither
arrives until reading resumes). Hence the rule that the rest of this package follows: *a client's
connection is read at all times*, in every window, from accept to close. Memory stays bounded by other
means: a request's body has a limit, all bodies together have one, and requests pipelined beyond a limit
are read and dropped, the connection ending after those that were accepted.

**A vanished peer** sends nothing, so somebody must ask. While nothing is in flight, keep-alive probes ask;
while data is unacknowledged, TCP_USER_TIMEOUT bounds its retransmission. Linux applies the user timeout to
keep-alive as well (tcp(7)): with probes after 5 s and every 3 s, and a user timeout of 12 s, the probe at
14 s finds the time used up. Both bounds are below 15 s. A window of zero counts as unacknowledged too
(Linux since 5.11), so a client that reads nothing at all for 12 s *with its receive window full* is given
up as well, before the stall deadline: raise both together for clients that are known to sleep.

**How late we are** is known where the kernel has noted when it last heard of the peer (Linux's TCP_INFO, in
milliseconds): for a FIN, which always acknowledges something, and for a peer that vanished. An RST leaves no trace.

The options are set once, on the listening socket: Linux and macOS let accepted sockets inherit them, which
saves five system calls a connection.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import sys

from stopguard.gateway.settings import Liveness

__all__ = ["loss_method", "set_listener_options", "silent_seconds"]

_LAST_ACK_RECEIVED = struct.Struct("=56xI")
_TIMED_OUT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


def set_listener_options(listener: socket.socket, liveness: Liveness) -> None:
    """Set on `listener` what accepted sockets shall inherit; options that the system lacks are left out."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if liveness.keep_alive_idle_seconds:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set(listener, "TCP_KEEPIDLE", liveness.keep_alive_idle_seconds)
    _set(listener, "TCP_KEEPALIVE", liveness.keep_alive_idle_seconds)  # the name on macOS
    _set(listener, "TCP_KEEPINTVL", liveness.keep_alive_interval_seconds)
    _set(listener, "TCP_KEEPCNT", liveness.keep_alive_probes)
    _set(listener, "TCP_USER_TIMEOUT", int(liveness.user_timeout_seconds * 1000))


def loss_method(error: BaseException | None) -> str:
    """The way in which a connection was lost, by the exception that the loop gives `connection_lost`."""
    if error is None:
        return "eof"
    if isinstance(error, ConnectionResetError | ConnectionAbortedError):
        return "reset"
    if isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _TIMED_OUT):
        return "keepalive"
    if isinstance(error, BrokenPipeError):
        return "write_error"
    return "reset"


def silent_seconds(transport: asyncio.BaseTransport) -> float | None:
    """Seconds since the peer's last acknowledgement arrived, to the millisecond; `None` where nobody says.

    That is `tcpi_last_ack_recv` of Linux (include/uapi/linux/tcp.h): the thirteenth number behind eight bytes.
    """
    connection = transport.get_extra_info("socket")
    if sys.platform != "linux" or connection is None:
        return None
    try:
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_RECEIVED.size)
        (milliseconds,) = _LAST_ACK_RECEIVED.unpack(information)
    except (OSError, struct.error):  # a Unix socket, or a sandbox without it
        return None
    return float(milliseconds) / 1000.0


def _set(listener: socket.socket, option: str, value: int) -> None:
    number = getattr(socket, option, None)
    if number is not None and value:
        listener.setsockopt(socket.IPPROTO_TCP, number, value)
