"""The waiting queue: by priority, then by place; a preempted request can go to the front or the back."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from stopguard.refengine.request import Request

__all__ = ["WaitingQueue"]


def _key(request: Request) -> tuple[int, int]:
    return request.order


class WaitingQueue:
    """Requests in the order in which they will be admitted. `Request.order` is its place here."""

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._items: list[Request] = []
        self._front = 0
        self._back = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Request:
        return self._items[index]

    def push_back(self, request: Request) -> None:
        """Behind all of its priority."""
        self._back += 1
        self._insert(request, self._back)

    def push_front(self, request: Request) -> None:
        """Before all of its priority."""
        self._front -= 1
        self._insert(request, self._front)

    def remove(self, request: Request) -> None:
        """Out of the queue, wherever it stands; `ValueError` when it is not in it."""
        index = bisect_left(self._items, request.order, key=_key)
        if index == len(self._items) or self._items[index] is not request:
            raise ValueError(f"{request.request_id} is not waiting")
        del self._items[index]

    def _insert(self, request: Request, place: int) -> None:
        request.order = (-request.spec.priority if self._by_priority else 0, place)
        insort(self._items, request, key=_key)
