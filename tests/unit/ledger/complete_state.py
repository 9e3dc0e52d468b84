"""Everything that books hold, as values: a test compares it before and after what must change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from stopguard.errors import StopGuardError
from stopguard.ledger import Account, Book, Obligation, RequestLedgers

A = Account


def frozen(value: Any) -> Any:
    """`value` in a form that no later change can reach."""
    if isinstance(value, Obligation):
        return (value.entry, value.remaining, value.expired)
    if isinstance(value, dict):
        return tuple((key, frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    if isinstance(value, msgspec.Struct) and not value.__struct_config__.frozen:
        return msgspec.structs.astuple(value)
    return value


def state_of(ledgers: RequestLedgers) -> dict[str, Any]:
    """Every attribute of one request's books."""
    return {name: frozen(getattr(ledgers, name)) for name in RequestLedgers.__slots__}


def state_of_book(book: Book) -> dict[str, Any]:
    """Every attribute of a book and of all requests that it knows."""
    state: dict[str, Any] = {}
    for name, value in vars(book).items():
        if name in ("_open", "_overdue", "_recent_by_id"):
            state[name] = [(key, state_of(ledgers)) for key, ledgers in value.items()]
        elif name == "_recent":
            state[name] = [state_of(ledgers) for ledgers in value]
        elif name == "_leaks":
            state[name] = list(value)
        else:
            state[name] = frozen(value)
    return state


@contextmanager
def refused(of: Book | RequestLedgers, error: type[StopGuardError], match: str) -> Iterator[None]:
    """The block raises exactly `error` with a text that matches, and nothing whatever has changed."""

    def take() -> dict[str, Any]:
        return state_of_book(of) if isinstance(of, Book) else state_of(of)

    before = take()
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
    assert take() == before


def opened(**arguments: Any) -> RequestLedgers:
    """The books of a request `r1` that arrived at second 1."""
    return RequestLedgers("r1", 1.0, engine="e", model="m", **arguments)


def running(book: Book | None = None, request_id: str = "r1") -> tuple[Book, RequestLedgers]:
    """A book with one request that runs in an engine: 4 blocks, 3 tokens in flight, 10 bytes buffered."""
    book = Book() if book is None else book  # an empty book is false
    ledgers = book.open(request_id, 1.0, engine="e", model="m")
    ledgers.post(A.STREAM_CLIENTS, A.STREAM_CONNECTED, 1, 1.0)
    ledgers.post(A.QUEUE_ARRIVALS, A.QUEUE_RUNNING, 1, 1.0)
    ledgers.post(A.KV_POOL, A.KV_HELD, 4, 2.0)
    ledgers.post(A.OUTPUT_MODEL, A.OUTPUT_IN_FLIGHT, 3, 2.0)
    ledgers.post(A.STREAM_ENGINE, A.STREAM_BUFFERED, 10, 2.0)
    return book, ledgers


def end(ledgers: RequestLedgers, at: float) -> None:
    """Close everything that `running` opened."""
    for debit, credit in (
        (A.STREAM_CONNECTED, A.STREAM_CLOSED),
        (A.STREAM_BUFFERED, A.STREAM_SENT),
        (A.QUEUE_RUNNING, A.QUEUE_GONE),
        (A.KV_HELD, A.KV_POOL),
        (A.OUTPUT_IN_FLIGHT, A.OUTPUT_DELIVERED),
    ):
        if ledgers.balances[debit]:
            ledgers.leave(debit, credit, ledgers.balances[debit], at)
