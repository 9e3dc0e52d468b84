"""Small whole requests for the tests of the journal: one that finishes, one that is cancelled, one that leaks."""

from __future__ import annotations

from stopguard.ledger import Account, Book, Evidence, Leak, RequestLedgers, StopSummary

ENGINE, MODEL = "local", "small"


def begin(book: Book, request_id: str, at: float, *, engine: str = ENGINE, model: str = MODEL) -> RequestLedgers:
    request = book.open(request_id, at, engine=engine, model=model)
    request.post(Account.STREAM_CLIENTS, Account.STREAM_CONNECTED, 1, at)
    request.post(Account.QUEUE_ARRIVALS, Account.QUEUE_WAITING, 1, at)
    request.post(Account.KV_CLAIMABLE, Account.KV_CLAIMED, 1, at + 0.002)
    request.post(Account.QUEUE_WAITING, Account.QUEUE_RUNNING, 1, at + 0.010)
    return request


def finish(book: Book, request: RequestLedgers, at: float, *, tokens: int = 32) -> RequestLedgers:
    request.tokens_computed += tokens
    request.tokens_delivered += tokens
    request.bytes_received += 4096
    request.bytes_sent += 4096
    request.fold(at)
    request.post(Account.QUEUE_RUNNING, Account.QUEUE_GONE, 1, at, Evidence.STREAM_CLOSED)
    request.post(Account.KV_CLAIMED, Account.KV_CLAIMABLE, 1, at, Evidence.STREAM_CLOSED)
    request.post(Account.STREAM_CONNECTED, Account.STREAM_CLOSED, 1, at)
    assert book.settle(request, at)
    return request


def finished(book: Book, request_id: str, at: float = 1000.0, **options: str) -> RequestLedgers:
    return finish(book, begin(book, request_id, at, **options), at + 1.5)


def stop(request: RequestLedgers, at: float) -> RequestLedgers:
    """A client left: its cancel is in progress, with 13 blocks seen by the probe, nothing confirmed yet."""
    request.blocks_taken += 13
    request.tokens_computed += 21
    request.tokens_delivered += 18
    request.bytes_received += 3000
    request.bytes_sent += 2600
    request.fold(at)
    request.stop = StopSummary(
        semantics="cancel",
        source="client",
        reason="client closed the connection",
        observed_at=at,
        occurred_at=at - 0.0004,
        actor="10.0.0.7:51244",
        evidence=Evidence.SENT,
        attempts=1,
        notified_at=at + 0.0002,
    )
    request.mark(at, "cancel observed: end of file on the client's socket")
    request.post(Account.STREAM_CONNECTED, Account.STREAM_CLOSED, 1, at)
    request.post(Account.STREAM_BUFFERED, Account.STREAM_DROPPED, 400, at)
    request.post(Account.LINK_STOPS, Account.LINK_AWAITING, 1, at + 0.0002, Evidence.SENT)
    request.pend(Account.LINK_AWAITING, Account.LINK_ACKNOWLEDGED, 1, at + 0.0002, at + 5.0, note="abort sent")
    request.pend(Account.KV_HELD, Account.KV_POOL, 13, at + 0.0002, at + 5.0, note="blocks to come back")
    return request


def cancelled(book: Book, request_id: str, at: float = 1000.0) -> RequestLedgers:
    """A cancel, confirmed by the probe and settled."""
    request = stop(begin(book, request_id, at), at + 0.8)
    at += 0.8
    request.leave(Account.LINK_AWAITING, Account.LINK_ACKNOWLEDGED, 1, at + 0.012, Evidence.PROBE, "applied")
    request.leave(Account.OUTPUT_IN_FLIGHT, Account.OUTPUT_DISCARDED, 3, at + 0.013, Evidence.PROBE)
    request.leave(Account.KV_HELD, Account.KV_POOL, 13, at + 0.020, Evidence.PROBE, "", at + 0.0185)
    request.leave(Account.KV_CLAIMED, Account.KV_CLAIMABLE, 1, at + 0.020, Evidence.PROBE)
    request.leave(Account.QUEUE_RUNNING, Account.QUEUE_GONE, 1, at + 0.020, Evidence.PROBE)
    summary = request.stop
    assert summary is not None
    summary.outcome, summary.evidence, summary.retry = "confirmed", Evidence.PROBE, "yes"
    summary.acked_at, summary.output_settled_at = at + 0.012, at + 0.013
    summary.released_at, summary.settled_at = at + 0.020, at + 0.021
    request.labels = {"tenant": "blue"}
    assert book.settle(request, at + 0.021)
    return request


def leaking(book: Book, request_id: str, at: float = 1000.0) -> tuple[RequestLedgers, list[Leak]]:
    """A cancel whose 13 blocks never came back; still open."""
    request = stop(begin(book, request_id, at), at + 0.8)
    at += 0.8
    request.leave(Account.LINK_AWAITING, Account.LINK_ACKNOWLEDGED, 1, at + 0.012, Evidence.PROBE)
    request.leave(Account.OUTPUT_IN_FLIGHT, Account.OUTPUT_DISCARDED, 3, at + 0.013)
    request.leave(Account.KV_CLAIMED, Account.KV_CLAIMABLE, 1, at + 0.020, Evidence.PROBE)
    request.leave(Account.QUEUE_RUNNING, Account.QUEUE_GONE, 1, at + 0.020, Evidence.PROBE)
    assert request.stop is not None
    request.stop.acked_at, request.stop.output_settled_at = at + 0.012, at + 0.013
    return request, book.expire(request, at + 5.5)


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
