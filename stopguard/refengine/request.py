"""One sequence inside the scheduler: its state, as a transition table, and what it holds.

Rule: a state changes through `Request.move` and nowhere else. An event that the table does not have
raises and changes nothing. `GONE` is terminal, so a request can be released only once.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from stopguard.errors import BookkeepingError
from stopguard.probe.wire import Place, SlotKind
from stopguard.refengine.interface import EngineConfig, RequestRejected, RequestSpec, RequestView
from stopguard.refengine.model import VOCABULARY, TextAssembler

if TYPE_CHECKING:
    from stopguard.refengine.policies import Policy

__all__ = ["PLACES", "TRANSITIONS", "Event", "IllegalMove", "Request", "State", "check_spec"]


class State(enum.Enum):
    """Where the scheduler has the request."""

    WAITING = "waiting"
    TRANSFERRING = "transferring"
    RUNNING = "running"
    PREEMPTED = "preempted"  # in the waiting queue again, without blocks
    PAUSED = "paused"  # the same, under the name that an engine with a capacity scheduler gives it
    HELD = "held"  # preempted on command and in no queue until it is resumed
    GONE = "gone"


class Event(enum.Enum):
    """What can happen to a request's place."""

    ADMIT = "admit"
    TRANSFER = "transfer"
    ARRIVE = "arrive"
    PREEMPT = "preempt"
    PAUSE = "pause"
    HOLD = "hold"
    RESUME = "resume"
    REQUEUE = "requeue"  # a request that was held before it ever ran
    END = "end"


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.WAITING: {
        Event.ADMIT: State.RUNNING,
        Event.TRANSFER: State.TRANSFERRING,
        Event.HOLD: State.HELD,
        Event.END: State.GONE,
    },
    State.TRANSFERRING: {Event.ARRIVE: State.RUNNING, Event.END: State.GONE},
    State.RUNNING: {
        Event.PREEMPT: State.PREEMPTED,
        Event.PAUSE: State.PAUSED,
        Event.HOLD: State.HELD,
        Event.END: State.GONE,
    },
    State.PREEMPTED: {Event.ADMIT: State.RUNNING, Event.HOLD: State.HELD, Event.END: State.GONE},
    State.PAUSED: {Event.ADMIT: State.RUNNING, Event.HOLD: State.HELD, Event.END: State.GONE},
    State.HELD: {Event.RESUME: State.PREEMPTED, Event.REQUEUE: State.WAITING, Event.END: State.GONE},
    State.GONE: {},
}

#: The probe's word for each state.
PLACES: Final[dict[State, Place]] = {
    State.WAITING: "waiting",
    State.TRANSFERRING: "transferring",
    State.RUNNING: "running",
    State.PREEMPTED: "preempted",
    State.PAUSED: "paused",
    State.HELD: "paused",
    State.GONE: "gone",
}


class IllegalMove(BookkeepingError):
    """The scheduler tried something that the transition table does not have."""


class Request:
    """One sequence. `request_id` is the internal one; `root_id` the caller's; `index` its number among `n`."""

    __slots__ = (
        "abort_applied_at",
        "aborted_at",
        "added_at",
        "assembler",
        "blocks_fenced",
        "cached_tokens",
        "chain",
        "computed",
        "delivered",
        "device_token",
        "eos_threshold",
        "epoch",
        "front_stopped",
        "host_blocks",
        "host_tokens",
        "in_flight",
        "in_flight_tokens",
        "index",
        "last_step",
        "marked",
        "order",
        "outputs",
        "parent_id",
        "preemptions",
        "prefill_target",
        "prompt_tokens",
        "request_id",
        "root_id",
        "salt",
        "scheduled",
        "sealed",
        "slots",
        "spec",
        "state",
        "structured",
        "table",
        "tokens",
        "transfer_until",
    )

    def __init__(self, spec: RequestSpec, request_id: str, index: int, parent_id: str, added_at: float) -> None:
        self.spec = spec
        self.request_id = request_id
        self.root_id = spec.request_id
        self.parent_id = parent_id
        self.index = index
        self.state = State.WAITING
        self.added_at = added_at
        self.prompt_tokens = len(spec.prompt)
        #: Prompt and every token sampled so far.
        self.tokens: list[int] = list(spec.prompt)
        #: How many tokens were sampled and kept.
        self.outputs = 0
        #: How many of them were handed out.
        self.delivered = 0
        self.cached_tokens = 0
        self.assembler = TextAssembler(spec.sampling.stop)
        self.salt = spec.sampling.seed * 1_000_003 + index
        self.structured = bool(spec.grammar)
        self.eos_threshold = 0 if spec.sampling.ignore_eos else int(spec.sampling.eos_probability * 65536)
        # KV: what is written or in flight, and where.
        self.table: list[int] = []
        #: Blocks given up and still behind a fence.
        self.blocks_fenced = 0
        #: Tokens whose KV is written (`computed`) or will be by a step in flight (`scheduled`).
        self.computed = 0
        self.scheduled = 0
        #: Tokens to compute before the first (or next) one can be sampled.
        self.prefill_target = len(self.tokens)
        self.sealed = 0
        self.chain = 0
        #: Rises with each preemption, so that a late result is known to be late.
        self.epoch = 0
        # Steps in flight that contain it, the tokens they will sample, and the number of the last.
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.last_step = 0
        #: The last token sampled on the device, kept or not: what the next decode step writes.
        self.device_token = 0
        self.transfer_until = 0
        self.slots: dict[SlotKind, int] = {}
        self.host_blocks = 0
        self.host_tokens: list[int] = []
        self.preemptions = 0
        #: Place in the waiting queue (see `queue.py`).
        self.order: tuple[int, int] = (0, 0)
        # The stop: read by the scheduler and to be applied at its own time; known to the front end only.
        self.marked = False
        self.front_stopped = False
        self.aborted_at: float | None = None
        self.abort_applied_at: float | None = None

    def move(self, event: Event) -> State:
        """The state after `event`; `IllegalMove` (and no change) when the table has none."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise IllegalMove(f"{self.request_id}: {event.value} is not possible when {self.state.value}")
        self.state = following
        return following

    @property
    def place(self) -> Place:
        """The probe's word for where it is."""
        return PLACES[self.state]

    @property
    def prefilling(self) -> bool:
        """Running, and some of its known tokens are not computed yet."""
        return self.state is State.RUNNING and self.computed < self.prefill_target

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled, those in flight not counted."""
        return self.spec.sampling.max_tokens - self.outputs - self.in_flight_tokens

    def view(self) -> RequestView:
        """What a snapshot shows of it."""
        return RequestView(
            request_id=self.request_id,
            parent_id=self.parent_id,
            root_id=self.root_id,
            index=self.index,
            place=self.place,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed,
            output_tokens=self.outputs,
            blocks_held=len(self.table),
            blocks_fenced=self.blocks_fenced,
            in_flight_tokens=self.in_flight_tokens,
            preemptions=self.preemptions,
            slots=dict(self.slots),
            abort_pending=self.aborted_at is not None,
        )

    def __repr__(self) -> str:
        return (
            f"<{self.request_id} {self.state.value}: {self.computed}/{len(self.tokens)} computed, "
            f"{self.outputs} out, {len(self.table)} blocks, {self.in_flight} in flight>"
        )


def check_spec(spec: RequestSpec, config: EngineConfig, policy: Policy) -> None:
    """`RequestRejected`, with the reason, for a request that an engine of this size and kind can never serve."""
    sampling = spec.sampling
    if not spec.request_id:
        raise RequestRejected("a request needs an id")
    if not spec.prompt:
        raise RequestRejected("the prompt is empty")
    if not all(0 <= token < len(VOCABULARY) for token in spec.prompt):
        raise RequestRejected(f"token ids are 0 to {len(VOCABULARY) - 1}")
    if sampling.n < 1 or sampling.max_tokens < 1:
        raise RequestRejected(f"n and max_tokens must be at least 1, not {sampling.n} and {sampling.max_tokens}")
    tokens = len(spec.prompt) + sampling.max_tokens
    limit = min(config.max_model_tokens, config.blocks * config.block_tokens)
    if tokens > limit:
        raise RequestRejected(f"prompt and max_tokens are {tokens} tokens; this engine holds {limit}")
    if spec.transfer_steps and policy.in_transfer == "unsupported":
        raise RequestRejected(f"{policy.name} takes no KV from a prefill instance")
    wanted = {
        "lora": (bool(spec.lora), config.lora_slots),
        "encoder": (spec.images, config.encoder_slots),
        "grammar": (bool(spec.grammar), config.grammar_slots),
        "speculative": (spec.speculative, config.speculative_slots),
    }
    for kind, (count, size) in wanted.items():
        if count > size:
            raise RequestRejected(f"{int(count)} {kind} slots wanted; this engine has {size}")
