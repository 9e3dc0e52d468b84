"""What a request has in vLLM's scheduler beside its KV blocks: a LoRA place, encoder outputs, a grammar.

Only requests that have such a thing cost anything here. What counts, all of vLLM 0.32:

* **lora**: `Scheduler.schedule` derives the adapters in use from its list of running requests and compares their number
  with `max_loras`. So a request has its place from when it is scheduled until that list has lost it.
* **encoder**: `EncoderCacheManager.cached` names, for each output of an image's or a sound's encoder, the requests that
  keep it from being evicted. Each output that names the request counts one, whoever computed it.
* **grammar**: the compiled grammar of a structured output belongs to its request
  (`structured_output_request.grammar`) and to nothing else. It is given back when Python has freed it. A grammar that
  outlives its request is kept by somebody, and stays in the books. While the request itself is still referred to (the
  core's input thread has the last one that came in a variable) nothing is concluded from its grammar's being there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from stopguard.probe import wire

__all__ = ["SlotWatch", "encoder_references"]

_KEPT_MAX: Final = 4096
_LOOK_SECONDS: Final = (0.5, 64.0)
"""When what is kept is looked at again where no step is made: the first time, and the longest wait."""


def encoder_references(manager: Any) -> dict[str, set[str]] | None:
    """By output of an encoder, the requests that keep it; `None` where this manager does not say (encoder-decoders)."""
    cached = getattr(manager, "cached", None)
    methods = ("check_and_update_cache", "allocate", "free_encoder_input")
    return (
        cached if isinstance(cached, dict) and all(callable(getattr(manager, name, None)) for name in methods) else None
    )


class SlotWatch:
    """The slots of one scheduler's requests, by internal id. Everything is called in the engine's own thread.

    `tell` books an event. `held` is what each request has now.
    """

    def __init__(self, scheduler: Any, tell: Callable[[wire.Event], None], clock: Callable[[], float]) -> None:
        self.held: dict[str, dict[wire.SlotKind, int]] = {}
        self._scheduler = scheduler
        self._tell = tell
        self._clock = clock
        self._adapters = getattr(scheduler, "lora_config", None) is not None
        self._references = encoder_references(getattr(scheduler, "encoder_cache_manager", None))
        #: The encoder outputs that name a request in our books.
        self._outputs: dict[str, set[str]] = {}
        #: Of requests that are over: their id, the request, and its grammar.
        self._ended: list[tuple[str, weakref.ref[Any], weakref.ref[Any] | None]] = []
        self._kept: dict[str, weakref.ref[Any]] = {}
        #: Has `settle` called after so many seconds, although the engine may be idle then.
        self.look_again: Callable[[float], None] | None = None
        self._wait_seconds = _LOOK_SECONDS[0]
        self._look_at = 0.0

    def added(self, request: Any) -> None:
        """The scheduler has it."""
        if getattr(request, "structured_output_request", None) is not None:
            self._change(request.request_id, "grammar", 1)

    def runs(self, internal: str) -> None:
        """It is among those that run."""
        if self._adapters and _adapter(self._scheduler.requests.get(internal)):
            self._change(internal, "lora", 1 - self._count(internal, "lora"))

    def set_aside(self, request: Any) -> None:
        """It does not run any more, and lives on."""
        if self.held and self._count(request.request_id, "lora") and not self._still_runs(request):
            self._change(request.request_id, "lora", -1)

    def encoder_output(self, request: Any, input_id: int) -> None:
        """The encoder's cache was asked for one input of the request, given it, or told that it is done with."""
        if self._references is None:
            return
        internal, output = request.request_id, request.mm_features[input_id].identifier
        outputs = self._outputs.get(internal, ())
        named = internal in self._references.get(output, ())
        if named and output not in outputs:
            self._outputs.setdefault(internal, set()).add(output)
            self._change(internal, "encoder", 1)
        elif not named and output in outputs:
            self._output_gone(internal, output)

    def encoder_emptied(self) -> None:
        """The encoder's cache was emptied (`EncoderCacheManager.reset`)."""
        for internal, outputs in list(self._outputs.items()):
            for output in list(outputs):
                if internal not in (self._references or {}).get(output, ()):
                    self._output_gone(internal, output)

    def gone(self, request: Any) -> None:
        """The scheduler forgets it; what becomes of its slots is looked at by `settle`."""
        held = self.held.get(request.request_id)
        if held:
            structured = getattr(request, "structured_output_request", None) if "grammar" in held else None
            self._ended.append((request.request_id, weakref.ref(request), _grammar(structured)))

    def settle(self) -> None:
        """Between two steps: what those that are over do not have any more is given back."""
        if self._ended:
            # One that still runs although it is over is looked at again.
            self._ended = [each for each in self._ended if not self._given_back(*each)]
        if self._kept:
            for internal in [name for name, grammar in self._kept.items() if grammar() is None]:
                del self._kept[internal]
                self._change(internal, "grammar", -1)
        if self._ended or self._kept:
            self._look_later()
        else:
            self._wait_seconds = _LOOK_SECONDS[0]

    # ---- inside ----------------------------------------------------------------------------------

    def _look_later(self) -> None:
        """Something is still here that no step may ever ask for again."""
        at = self._clock()
        if self.look_again is not None and at >= self._look_at:
            self._look_at = at + self._wait_seconds
            self.look_again(self._wait_seconds)
            self._wait_seconds = min(2 * self._wait_seconds, _LOOK_SECONDS[1])

    def _given_back(self, internal: str, request: weakref.ref[Any], grammar: weakref.ref[Any] | None) -> bool:
        """Book what is certain about one that is over; whether there is nothing more to look at."""
        held, alive = self.held.get(internal, {}), request()
        if "grammar" in held and internal not in self._kept:
            kept = alive is None and grammar is not None and grammar() is not None
            if kept and grammar is not None and len(self._kept) < _KEPT_MAX:
                self._kept[internal] = grammar
            else:
                self._change(internal, "grammar", -1)
        if "lora" in held:
            if alive is not None and self._still_runs(alive):
                return False
            self._change(internal, "lora", -1)
        return True

    def _count(self, internal: str, kind: wire.SlotKind) -> int:
        return self.held.get(internal, {}).get(kind, 0)

    def _still_runs(self, request: Any) -> bool:
        return any(each is request for each in self._scheduler.running)

    def _output_gone(self, internal: str, output: str) -> None:
        outputs = self._outputs[internal]
        outputs.discard(output)
        if not outputs:
            del self._outputs[internal]
        self._change(internal, "encoder", -1)

    def _change(self, internal: str, kind: wire.SlotKind, change: int) -> None:
        if not change:
            return
        held = self.held.setdefault(internal, {})
        held[kind] = held.get(kind, 0) + change
        if not held[kind]:
            del held[kind]
        if not held:
            del self.held[internal]
        event = wire.SlotTaken if change > 0 else wire.SlotReturned
        self._tell(event(internal, self._clock(), kind, abs(change)))


def _adapter(request: Any) -> bool:
    lora = getattr(request, "lora_request", None)
    return lora is not None and lora.lora_int_id > 0


def _grammar(structured: Any) -> weakref.ref[Any] | None:
    """The compiled grammar; `None` where there is none (yet), or none whose end can be seen."""
    grammar = getattr(structured, "grammar", None)
    try:
        return None if grammar is None or isinstance(grammar, Exception) else weakref.ref(grammar)
    except TypeError:
        return None
