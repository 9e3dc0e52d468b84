"""What the reference engine takes and gives: plain data, no behaviour.

Times are seconds on the caller's clock (`at`, monotonic, virtual or real); amounts are tokens, blocks
and slots. Priorities are neutral: a *higher* number is more urgent, whatever the imitated engine's
own sign is.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stopguard.errors import BookkeepingError, ClientError, ConfigurationError, EngineError
from stopguard.probe import wire

__all__ = [
    "AbortAnswer",
    "AbortKind",
    "Door",
    "DuplicateRequest",
    "EngineConfig",
    "EngineCrashed",
    "EngineSnapshot",
    "FinishReason",
    "Gauges",
    "Health",
    "NotSupported",
    "Output",
    "PauseMode",
    "PoolCorrupted",
    "RequestRejected",
    "RequestSpec",
    "RequestView",
    "SamplingParameters",
    "SlotCorrupted",
    "StepCost",
    "StepResult",
    "TimeWentBackwards",
    "Usage",
]

#: How an abort gets in: the engine's HTTP route or Python call (`api`), the engine's own reaction to a
#: closed connection (`socket`), or a probe inside the engine that posts to the scheduler (`inside`).
Door = Literal["api", "socket", "inside"]

#: What a door says. `accepted`: 2xx, nothing is proved. `aborted`: the scheduler did it now (`count`).
#: `try_again`: refused for the moment. `unknown`: the door looked and found nothing. `no_door`: this
#: engine has no such door. `suppressed`: the front end believes that it has already sent one.
AbortKind = Literal["accepted", "aborted", "try_again", "unknown", "no_door", "suppressed"]

PauseMode = Literal["abort", "retract", "hold", "wait"]

#: `preempted` ends a structured output that an engine finishes instead of recomputing.
FinishReason = Literal["stop", "length", "abort", "cancelled", "preempted", "error"]


class PoolCorrupted(BookkeepingError):
    """A block was freed twice, freed by someone who does not own it, or the pool's sums are wrong."""


class SlotCorrupted(BookkeepingError):
    """A slot was given back twice or by someone who does not hold it."""


class TimeWentBackwards(BookkeepingError):
    """A call carried an earlier `at` than the one before it."""


class RequestRejected(ClientError):
    """The request can never be served by this engine as configured (too long, bad parameters)."""


class DuplicateRequest(ClientError):
    """A live request bears this id already."""


class NotSupported(ClientError):
    """The imitated engine has no such command."""

    status_hint = 404


class EngineCrashed(EngineError):
    """The engine's core is dead; only a restart helps."""

    status_hint = 503


class StepCost(msgspec.Struct, frozen=True):
    """What one step takes: `base_seconds` + prefill tokens x per token + decoding sequences x per sequence."""

    base_seconds: float = 0.008
    prefill_token_seconds: float = 0.00004
    decode_sequence_seconds: float = 0.0001

    def seconds(self, prefill_tokens: int, decode_sequences: int) -> float:
        return (
            self.base_seconds
            + prefill_tokens * self.prefill_token_seconds
            + decode_sequences * self.decode_sequence_seconds
        )


class EngineConfig(msgspec.Struct, frozen=True):
    """Sizes and limits of one engine. Everything has a limit; 0 slots means that the feature is absent."""

    blocks: int = 512
    block_tokens: int = 16
    max_running: int = 32
    max_waiting: int = 4096
    max_model_tokens: int = 4096
    max_batch_tokens: int = 512
    prefill_chunk_tokens: int = 256
    #: Batches in flight: 1 is synchronous, 2 asynchronous; None takes the imitated engine's default.
    pipeline_depth: int | None = None
    prefix_cache: bool = True
    #: Sort the waiting queue by priority (a running request never yields to a waiting one by it alone).
    priority_scheduling: bool = True
    #: Where the policy preempts at admission: how much more urgent the newcomer must be.
    admission_preemption_threshold: int = 10
    lora_slots: int = 4
    encoder_slots: int = 16
    grammar_slots: int = 32
    speculative_slots: int = 32
    #: Draft tokens a step of a speculative request (always accepted: the draft model is the model).
    speculative_tokens: int = 1
    #: Blocks of host memory for the KV of preempted requests; 0 recomputes instead.
    host_blocks: int = 0
    step_cost: StepCost = StepCost()
    #: How long the policy's front end sleeps before it aborts a closed stream (None: the policy's own).
    stream_detection_seconds: float | None = None

    def check(self) -> EngineConfig:
        """Itself, or `ConfigurationError` with what to change."""
        positive = ("blocks", "block_tokens", "max_running", "max_waiting", "max_batch_tokens", "prefill_chunk_tokens")
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigurationError(f"reference engine: {name} must be at least 1, not {getattr(self, name)}")
        if self.pipeline_depth is not None and not 1 <= self.pipeline_depth <= 8:
            raise ConfigurationError(f"reference engine: pipeline_depth must be 1 to 8, not {self.pipeline_depth}")
        if self.max_batch_tokens < self.max_running * (1 + self.speculative_tokens):
            raise ConfigurationError(
                "reference engine: max_batch_tokens must let every running request decode: "
                f"at least {self.max_running * (1 + self.speculative_tokens)}, not {self.max_batch_tokens}"
            )
        return self


class SamplingParameters(msgspec.Struct, frozen=True):
    """How one request samples. Output is a pure function of the KV content, `seed` and the child's index."""

    max_tokens: int = 64
    n: int = 1
    stop: tuple[str, ...] = ()
    #: The chance of the end-of-sequence token at each position (drawn from the context, so repeatable).
    eos_probability: float = 0.0
    ignore_eos: bool = False
    #: 0 is greedy; any other number gives another, equally repeatable, output.
    seed: int = 0


class RequestSpec(msgspec.Struct, frozen=True):
    """One request as the front end hands it over."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParameters = SamplingParameters()
    priority: int = 0
    stream: bool = True
    lora: str = ""
    images: int = 0
    grammar: str = ""
    speculative: bool = False
    #: Steps until the prompt's KV has come from a prefill instance; 0 computes it here.
    transfer_steps: int = 0
    #: The client may leave without ending the request (llama.cpp's `X-Conversation-Id`).
    detached: bool = False


class AbortAnswer(msgspec.Struct, frozen=True):
    """What the door answered: never a proof, except for `aborted`."""

    kind: AbortKind
    #: The HTTP status that the imitated engine answers with.
    status: int = 200
    #: What the imitated engine would count: ids *given* for some, sequences really aborted for others.
    count: int = 0
    retry_after_seconds: float = 0.0


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one ended sequence, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Output(msgspec.Struct, frozen=True, gc=False):
    """Tokens handed to the front end. `request_id` is the caller's, `index` the child's number.

    `text` may be shorter than the tokens: the bytes of an unfinished character are held back, and so
    is what could still become a stop string. The last output of a sequence carries `finish_reason`
    and `usage`.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


class StepResult(msgspec.Struct, frozen=True):
    """What one call of `step` changed. `duration_seconds` is that of the batches launched in it (0: none)."""

    frame: wire.Frame
    outputs: list[Output]
    duration_seconds: float
    #: Number of the last step whose results have been processed.
    steps_done: int


class Gauges(msgspec.Struct, frozen=True):
    """Totals as the engine itself counts them (a fault may make them lie)."""

    running: int
    waiting: int
    preempted: int
    paused: int
    transferring: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_fenced: int
    host_blocks_held: int
    slots_held: dict[wire.SlotKind, int]
    watchers: int
    steps_total: int
    prompt_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    recomputed_tokens_total: int
    aborts_total: int
    finished_total: dict[str, int]

    @property
    def blocks_used_ratio(self) -> float:
        """Blocks that nobody else could take, of all; 0 to 1."""
        return (self.blocks_held + self.blocks_fenced) / self.blocks_total


class RequestView(msgspec.Struct, frozen=True):
    """One live request as the scheduler sees it."""

    request_id: str
    parent_id: str
    root_id: str
    index: int
    place: wire.Place
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks_held: int
    blocks_fenced: int
    in_flight_tokens: int
    preemptions: int
    slots: dict[wire.SlotKind, int]
    abort_pending: bool


class EngineSnapshot(msgspec.Struct, frozen=True):
    """Everything that is open, at one moment. `idle` is the empty engine's only allowed picture."""

    at: float
    steps_done: int
    requests: list[RequestView]
    gauges: Gauges
    commands_pending: int
    fences_pending: int
    outputs_deferred: int

    @property
    def settled(self) -> bool:
        """Nothing is held, fenced, taken, watched, pending or deferred."""
        gauges = self.gauges
        return (
            not self.requests
            and gauges.running == gauges.waiting == gauges.preempted == gauges.paused == gauges.transferring == 0
            and gauges.blocks_held == gauges.blocks_fenced == gauges.host_blocks_held == 0
            and gauges.blocks_free + gauges.blocks_cached == gauges.blocks_total
            and not any(gauges.slots_held.values())
            and gauges.watchers == 0
            and self.commands_pending == self.fences_pending == self.outputs_deferred == 0
        )


class Health(msgspec.Struct, frozen=True):
    """What `/health` must answer, and the truth beside it."""

    status: int
    #: True when the core can still make progress.
    alive: bool
    reason: str = ""
