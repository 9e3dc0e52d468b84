"""What waits to be sent from inside an engine: step frames, and the words in between (answers, snapshots, pongs).

When the collector does not keep up, the oldest *frames* go: a gap is seen, said, and closed by a snapshot. Words are
not dropped for frames, because somebody waits for each of them. They have a limit of their own, which only a collector
can reach that asks and does not read; then the newest word is turned away, and who waits for it is told by a timeout.
Both leave in the order in which they came: a snapshot is about the moment between two frames.

The engine's threads never wait here: a deque's ends are atomic in CPython, and no lock is held by anybody.
"""

from __future__ import annotations

import itertools
import queue
from collections import deque
from typing import Any, Final

from stopguard.probe import wire

__all__ = ["WORDS_MAX", "SendQueue"]

WORDS_MAX: Final = 4096


class SendQueue:
    """Filled by any thread, emptied by one. At most `frames_max` frames and `words_max` words wait."""

    def __init__(self, frames_max: int, words_max: int = WORDS_MAX) -> None:
        self._frames_max = frames_max
        self._words_max = words_max
        self._frames: deque[tuple[int, wire.Frame]] = deque()
        self._words: deque[tuple[int, Any]] = deque()
        #: Taken, and to be given after the words that are older.
        self._next: tuple[int, wire.Frame] | None = None
        self._tickets = itertools.count()
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    # ---- any thread ------------------------------------------------------------------------------

    def put_frame(self, frame: wire.Frame) -> bool:
        """Add a frame; whether an older one had to go for it."""
        frames = self._frames
        frames.append((next(self._tickets), frame))
        full = len(frames) > self._frames_max
        if full:
            try:
                frames.popleft()
            except IndexError:  # all of them have been taken meanwhile
                full = False
        if not self._woken.qsize():
            self._woken.put(None)
        return full

    def put_word(self, word: Any) -> bool:
        """Add anything else; False when there is no room for it."""
        words = self._words
        if len(words) >= self._words_max:
            return False
        words.append((next(self._tickets), word))
        self.wake()
        return True

    def wake(self) -> None:
        """Have `wait` return, whether or not there is anything."""
        if not self._woken.qsize():
            self._woken.put(None)

    # ---- the one that sends ----------------------------------------------------------------------

    def wait(self) -> None:
        """Until something was put or `wake` called since the last time."""
        self._woken.get()

    def take(self) -> Any:
        """The oldest that waits; `None` when nothing does."""
        # Looked at before the frames: whatever frame is older than this word has been put by now.
        word = self._words[0] if self._words else None
        frame, self._next = self._next, None
        if frame is None:
            try:
                frame = self._frames.popleft()
            except IndexError:
                frame = None
        if word is not None and (frame is None or word[0] < frame[0]):
            self._next = frame
            self._words.popleft()
            return word[1]
        return None if frame is None else frame[1]

    def forget_words(self) -> None:
        """They were for a collector that is not there any more."""
        self._words.clear()

    def clear(self) -> int:
        """Forget everything; how many frames that were."""
        self._words.clear()
        frames = len(self._frames) + (self._next is not None)
        self._frames.clear()
        self._next = None
        return frames
