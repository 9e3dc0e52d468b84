"""Thirty-one ways to get a stop wrong, each one seen in public.

Failure classes (the numbers in `failure_class`), as people report them:

 1 polled or masked disconnect                10 blocks reused too early
 2 blind before the first token               11 blocks held until a timeout
 3 blind when not streaming                   12 the clean-up needs what the leak exhausted
 4 abort accepted, nothing happens            13 histories of ranks diverge (this engine has one rank)
 5 abort at the last step booked as a finish  14 health stays 200 while wedged
 6 abort of an unknown id kills the engine    15 the watcher leaks
 7 wrong victim                               16 hand-balanced counters drift
 8 children survive                           17 metrics disagree or are blind
 9 a resource leaks on one exit path          18 preemption loses work, counters or the stop

A fault changes what the engine *does* at the injection points of `hooks`; its events tell what it did,
so the books have to find it by what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from stopguard.errors import ConfigurationError
from stopguard.probe.wire import SlotKind
from stopguard.refengine.hooks import Cause, Fault, FaultLedger
from stopguard.refengine.request import State

if TYPE_CHECKING:
    from stopguard.refengine.interface import Door, FinishReason
    from stopguard.refengine.request import Request

__all__ = ["FAULTS", "Fault", "FaultLedger", "fault_named"]

# Blocks ---------------------------------------------------------------------------------------------


class BlocksLeakedOnAbort(Fault):
    """Class 9: an aborted request's blocks stay held (vllm-project/vllm-ascend#16662, sgl-project/sglang#2238)."""

    name = "blocks-leaked-on-abort"
    failure_class = 9
    issues = ("vllm-project/vllm-ascend#16662", "sgl-project/sglang#2238")

    def keep_blocks(self, request: Request, cause: Cause, blocks: int) -> int:
        return blocks if cause == "abort" and self.fires() else 0


class BlocksLeakedBetweenChunks(Fault):
    """Class 9: an abort between two chunks of a prefill leaks its blocks (sgl-project/sglang#2238; the scheduler of
    DeepInfer 0.1.0 does it, measured).
    """

    name = "blocks-leaked-between-chunks"
    failure_class = 9
    issues = ("sgl-project/sglang#2238",)

    def keep_blocks(self, request: Request, cause: Cause, blocks: int) -> int:
        return blocks if cause == "abort" and request.prefilling and self.fires() else 0


class BlockFreedTwice(Fault):
    """Class 10: an abort frees a block twice, so two requests get it (vllm-project/vllm#38606: corruption on the
    cancel path when blocks are recycled).
    """

    name = "block-freed-twice"
    failure_class = 10
    issues = ("vllm-project/vllm#38606",)
    ledger: ClassVar[FaultLedger] = "kv"

    def free_again(self, request: Request, cause: Cause) -> bool:
        return cause == "abort" and self.fires()


class FenceSkipped(Fault):
    """Class 10: blocks are reused while a step in flight still writes them, and a live request reads what the dead
    one wrote (vllm-project/vllm#39146, sgl-project/sglang#24578, NVIDIA/TensorRT-LLM#12540).
    """

    name = "fence-skipped"
    failure_class = 10
    issues = ("vllm-project/vllm#39146", "sgl-project/sglang#24578", "NVIDIA/TensorRT-LLM#12540")
    ledger: ClassVar[FaultLedger] = "crosstalk"
    needs_depth = 2

    def skip_fence(self, request: Request, cause: Cause) -> bool:
        return self.fires()


class ReleaseOnlyAtTimeout(Fault):
    """Class 11: an aborted request's blocks wait for a long timeout, 480 s by default (vllm-project/vllm#41269,
    vllm-project/vllm#29906, vllm-project/vllm#46283).
    """

    name = "release-only-at-timeout"
    failure_class = 11
    issues = ("vllm-project/vllm#41269", "vllm-project/vllm#29906", "vllm-project/vllm#46283")

    def __init__(self, probability: float = 1.0, limit: int | None = None, seconds: float = 480.0) -> None:
        super().__init__(probability, limit)
        self.seconds = seconds

    def pin_seconds(self, request: Request, cause: Cause) -> float:
        return self.seconds if cause == "abort" and self.fires() else 0.0


class CleanupNeedsAdmission(Fault):
    """Class 12: aborted blocks are freed only when the next request is admitted, which needs blocks
    (NVIDIA/TensorRT-LLM#12313, NVIDIA/TensorRT-LLM#12314).
    """

    name = "cleanup-needs-admission"
    failure_class = 12
    issues = ("NVIDIA/TensorRT-LLM#12313", "NVIDIA/TensorRT-LLM#12314")

    def wait_for_admission(self, request: Request, cause: Cause) -> bool:
        return cause == "abort" and self.fires()


class HostBackupLeaked(Fault):
    """Class 9: the host copy of a preempted request's KV stays when it is aborted (sgl-project/sglang#18705,
    sgl-project/sglang#37103). Needs `host_blocks` in the configuration.
    """

    name = "host-backup-leaked"
    failure_class = 9
    issues = ("sgl-project/sglang#18705", "sgl-project/sglang#37103")

    def keep_host(self, request: Request) -> bool:
        return request.state in {State.PREEMPTED, State.PAUSED, State.HELD} and self.fires()


# Slots ----------------------------------------------------------------------------------------------


class _SlotLeaked(Fault):
    kind: ClassVar[SlotKind]
    failure_class = 9

    def keep_slot(self, request: Request, kind: SlotKind, cause: Cause) -> bool:
        return kind == self.kind and cause == "abort" and self.fires()


class LoraSlotLeaked(_SlotLeaked):
    """Class 9: an aborted request's LoRA slot is never free again (vllm-project/vllm#26801)."""

    name = "lora-slot-leaked"
    issues = ("vllm-project/vllm#26801",)
    kind = "lora"


class EncoderSlotLeaked(_SlotLeaked):
    """Class 9: an aborted request's encoder cache stays taken (vllm-project/vllm#31857)."""

    name = "encoder-slot-leaked"
    issues = ("vllm-project/vllm#31857",)
    kind = "encoder"


class GrammarSlotLeaked(_SlotLeaked):
    """Class 9: an aborted request's compiled grammar stays (the kind of sgl-project/sglang#20182: state that was
    allocated beside the KV and that one exit forgets).
    """

    name = "grammar-slot-leaked"
    issues = ("sgl-project/sglang#20182",)
    kind = "grammar"


class SpeculativeSlotLeaked(_SlotLeaked):
    """Class 9: an aborted request's draft state stays (near vllm-project/vllm#49620)."""

    name = "speculative-slot-leaked"
    issues = ("vllm-project/vllm#49620",)
    kind = "speculative"


# Aborts that do nothing, too much, or the wrong thing -----------------------------------------------


class AbortLost(Fault):
    """Class 4: the abort is accepted, logged, and generation goes on (ggml-org/llama.cpp#11414,
    xorbitsai/inference#5548).
    """

    name = "abort-lost"
    failure_class = 4
    issues = ("ggml-org/llama.cpp#11414", "xorbitsai/inference#5548")
    ledger: ClassVar[FaultLedger] = "link"

    def lose_abort(self, request: Request) -> bool:
        return self.fires()


class AbortLostInDispatch(Fault):
    """Class 4: an abort before the request has reached the scheduler, or during a pause, is noted as sent and lost,
    and all later ones are suppressed (sgl-project/sglang#36333: the front end's state goes first).
    """

    name = "abort-lost-in-dispatch"
    failure_class = 4
    issues = ("sgl-project/sglang#36333",)
    ledger: ClassVar[FaultLedger] = "link"

    def lose_at_door(self, requests: Sequence[Request], dispatched: bool, paused: bool, door: Door) -> bool:
        return bool(requests) and (not dispatched or paused) and self.fires()


class AbortLostInPrefill(Fault):
    """Class 4: an abort while a prefill step is in flight answers "0 aborted" and is forgotten
    (ai-dynamo/dynamo#14507: prefills go on; the scheduler of DeepInfer 0.1.0 does it, measured).
    """

    name = "abort-lost-in-prefill"
    failure_class = 4
    issues = ("ai-dynamo/dynamo#14507",)
    ledger: ClassVar[FaultLedger] = "link"

    def lose_in_prefill(self, request: Request) -> bool:
        return self.fires()

    def lose_abort(self, request: Request) -> bool:
        return request.prefilling and self.fires()


class UnknownAbortCrashes(Fault):
    """Class 6: an abort for an id that the core never had kills it (tenstorrent/vllm#145, LMCache/LMCache#3688)."""

    name = "unknown-abort-crashes"
    failure_class = 6
    issues = ("tenstorrent/vllm#145", "LMCache/LMCache#3688")
    ledger: ClassVar[FaultLedger] = "health"

    def crash_on_noop(self, request_id: str, ended_before: bool) -> str:
        return "" if ended_before or not self.fires() else f"KeyError: {request_id!r}"


class EndedAbortCrashes(Fault):
    """Class 6: an abort for a request that has just ended kills the core (vllm-project/vllm#25067)."""

    name = "ended-abort-crashes"
    failure_class = 6
    issues = ("vllm-project/vllm#25067",)
    ledger: ClassVar[FaultLedger] = "health"

    def crash_on_noop(self, request_id: str, ended_before: bool) -> str:
        return f"KeyError: {request_id!r} has ended" if ended_before and self.fires() else ""


class ChildSurvives(Fault):
    """Class 8: with `n` > 1 the abort does not reach the last child (vllm-project/vllm#14326,
    vllm-project/vllm#14512, vllm-project/vllm#53936).
    """

    name = "child-survives"
    failure_class = 8
    issues = ("vllm-project/vllm#14326", "vllm-project/vllm#14512", "vllm-project/vllm#53936")
    ledger: ClassVar[FaultLedger] = "queue"

    def spare(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests[:-1] if self.fires() else requests


class PrefixVictim(Fault):
    """Class 7: ids are compared by prefix, so an abort of `job1` also hits `job10` (sgl-project/sglang#30912)."""

    name = "prefix-victim"
    failure_class = 7
    issues = ("sgl-project/sglang#30912", "sgl-project/sglang#25561")
    ledger: ClassVar[FaultLedger] = "queue"

    def extra_victims(self, request_id: str, matched: Sequence[Request], live: Iterable[Request]) -> Sequence[Request]:
        found = [request for request in live if request.root_id.startswith(request_id) and request not in matched]
        return found if found and self.fires() else ()


class GlobalStopFlag(Fault):
    """Class 7: a stop of a queued request sets a flag of the whole process, and the running one stops
    (ikawrakow/ik_llama.cpp#1929).
    """

    name = "global-stop-flag"
    failure_class = 7
    issues = ("ikawrakow/ik_llama.cpp#1929",)
    ledger: ClassVar[FaultLedger] = "queue"

    def extra_victims(self, request_id: str, matched: Sequence[Request], live: Iterable[Request]) -> Sequence[Request]:
        if not any(request.state is State.WAITING for request in matched):
            return ()
        running = [request for request in live if request.state is State.RUNNING and request not in matched]
        return running[:1] if running and self.fires() else ()


class AbortTreatedAsFinish(Fault):
    """Class 5: an abort is booked as a normal finish and the blocks stay pinned for whoever should fetch them, until
    a timeout (vllm-project/vllm#29987, vllm-project/vllm#26400, sgl-project/sglang#34149).
    """

    name = "abort-treated-as-finish"
    failure_class = 5
    issues = ("vllm-project/vllm#29987", "vllm-project/vllm#26400", "sgl-project/sglang#34149")

    def __init__(self, probability: float = 1.0, limit: int | None = None, seconds: float = 480.0) -> None:
        super().__init__(probability, limit)
        self.seconds = seconds

    def abort_as_finish(self, request: Request) -> FinishReason | None:
        return "stop" if self.fires() else None

    def pin_seconds(self, request: Request, cause: Cause) -> float:
        return self.seconds if cause == "finish" and request.abort_applied_at is not None else 0.0


class FinishTreatedAsAbort(Fault):
    """Class 17: a request that ended by itself is reported as aborted (vllm-project/aibrix#2224: a normal end that
    is counted as a failure).
    """

    name = "finish-treated-as-abort"
    failure_class = 17
    issues = ("vllm-project/aibrix#2224",)
    ledger: ClassVar[FaultLedger] = "stream"

    def rename_finish(self, request: Request, reason: FinishReason) -> FinishReason:
        return "abort" if reason in {"stop", "length"} and self.fires() else reason


class AbortUndoneByPreemption(Fault):
    """Class 18: an abort of a preempted request is applied, then the preemption completes and puts the request back
    (sgl-project/sglang#37100, sgl-project/sglang#37103).
    """

    name = "abort-undone-by-preemption"
    failure_class = 18
    issues = ("sgl-project/sglang#37100", "sgl-project/sglang#37103")
    ledger: ClassVar[FaultLedger] = "queue"

    def undo_abort(self, request: Request) -> bool:
        return self.fires()


# Output ---------------------------------------------------------------------------------------------


class StaleOutputDelivered(Fault):
    """Class 4: tokens that were in flight when the abort was applied reach the stream after it
    (vllm-project/vllm#6586: late output for a request that has gone). Shows where a step is in flight at the stop.
    """

    name = "stale-output-delivered"
    failure_class = 4
    issues = ("vllm-project/vllm#6586", "sgl-project/sglang#36333")
    ledger: ClassVar[FaultLedger] = "output"
    needs_depth = 2

    def deliver_stale(self, request: Request) -> bool:
        return self.fires()


class TokensDeliveredTwice(Fault):
    """Class 18: after a preemption the recomputed tokens are delivered once more (sgl-project/sglang#20724)."""

    name = "tokens-delivered-twice"
    failure_class = 18
    issues = ("sgl-project/sglang#20724",)
    ledger: ClassVar[FaultLedger] = "output"

    def replay(self, request: Request) -> bool:
        return self.fires()


# Counters, watchers, health -------------------------------------------------------------------------


class RunningGaugeDrifts(Fault):
    """Class 16: the running gauge is counted by hand and an abort forgets to count down (vllm-project/router#215,
    Avarok-Cybersecurity/atlas#368, vllm-project/vllm#18784).
    """

    name = "running-gauge-drifts"
    failure_class = 16
    issues = ("vllm-project/router#215", "Avarok-Cybersecurity/atlas#368", "vllm-project/vllm#18784")
    ledger: ClassVar[FaultLedger] = "counters"

    def drift(self, request: Request, cause: Cause) -> int:
        return 1 if cause == "abort" and self.fires() else 0


class AbortCounterBlind(Fault):
    """Class 17: aborts are not counted (vllm-project/vllm#31503)."""

    name = "abort-counter-blind"
    failure_class = 17
    issues = ("vllm-project/vllm#31503", "vllm-project/vllm#55634")
    ledger: ClassVar[FaultLedger] = "counters"

    def blind_counter(self, request: Request, cause: Cause) -> bool:
        return self.fires()


class WatcherLeaks(Fault):
    """Class 15: one watcher a request lives as long as its keep-alive connection (NVIDIA/TensorRT-LLM#13806)."""

    name = "watcher-leaks"
    failure_class = 15
    issues = ("NVIDIA/TensorRT-LLM#13806", "NVIDIA/TensorRT-LLM#13777")
    ledger: ClassVar[FaultLedger] = "stream"

    def keep_watcher(self, request: Request) -> bool:
        return self.fires()


class HealthyWhileWedged(Fault):
    """Class 14: after an abort the core makes no more progress and `/health` says 200 (NVIDIA/TensorRT-LLM#12313)."""

    name = "healthy-while-wedged"
    failure_class = 14
    issues = ("NVIDIA/TensorRT-LLM#12313", "NVIDIA/TensorRT-LLM#13713")
    ledger: ClassVar[FaultLedger] = "health"

    def wedge(self, request: Request, cause: Cause) -> bool:
        return cause == "abort" and self.fires()


class DisconnectMasked(Fault):
    """Class 1: a middleware in the stack hides every disconnect (vllm-project/vllm#10087, sgl-project/sglang#20623)."""

    name = "disconnect-masked"
    failure_class = 1
    issues = ("vllm-project/vllm#10087", "sgl-project/sglang#20623")
    ledger: ClassVar[FaultLedger] = "stream"

    def ignore_disconnect(self, requests: Sequence[Request]) -> bool:
        return self.fires()


class DisconnectIgnoredBeforeFirstToken(Fault):
    """Class 2: a client that leaves before the first token is not noticed (BerriAI/litellm#31499,
    ai-dynamo/dynamo#13691, ollama/ollama#11889).
    """

    name = "disconnect-ignored-before-first-token"
    failure_class = 2
    issues = ("BerriAI/litellm#31499", "ai-dynamo/dynamo#13691", "ollama/ollama#11889")
    ledger: ClassVar[FaultLedger] = "stream"

    def ignore_disconnect(self, requests: Sequence[Request]) -> bool:
        return not any(request.outputs for request in requests) and self.fires()


class DisconnectIgnoredWithoutStream(Fault):
    """Class 3: a client that does not stream is not noticed when it leaves (vllm-project/vllm#10806,
    vllm-project/production-stack#634, BerriAI/litellm#37140).
    """

    name = "disconnect-ignored-without-stream"
    failure_class = 3
    issues = ("vllm-project/vllm#10806", "vllm-project/production-stack#634", "BerriAI/litellm#37140")
    ledger: ClassVar[FaultLedger] = "stream"

    def ignore_disconnect(self, requests: Sequence[Request]) -> bool:
        return not requests[0].spec.stream and self.fires()


FAULTS: Final[dict[str, type[Fault]]] = {
    fault.name: fault
    for fault in (
        BlocksLeakedOnAbort,
        BlocksLeakedBetweenChunks,
        BlockFreedTwice,
        FenceSkipped,
        ReleaseOnlyAtTimeout,
        CleanupNeedsAdmission,
        HostBackupLeaked,
        LoraSlotLeaked,
        EncoderSlotLeaked,
        GrammarSlotLeaked,
        SpeculativeSlotLeaked,
        AbortLost,
        AbortLostInDispatch,
        AbortLostInPrefill,
        UnknownAbortCrashes,
        EndedAbortCrashes,
        ChildSurvives,
        PrefixVictim,
        GlobalStopFlag,
        AbortTreatedAsFinish,
        FinishTreatedAsAbort,
        AbortUndoneByPreemption,
        StaleOutputDelivered,
        TokensDeliveredTwice,
        RunningGaugeDrifts,
        AbortCounterBlind,
        WatcherLeaks,
        HealthyWhileWedged,
        DisconnectMasked,
        DisconnectIgnoredBeforeFirstToken,
        DisconnectIgnoredWithoutStream,
    )
}


def fault_named(text: str) -> Fault:
    """`NAME` or `NAME:PROBABILITY` as a fault; `ConfigurationError` with the names that exist."""
    name, _, probability = text.partition(":")
    kind = FAULTS.get(name)
    if kind is None:
        raise ConfigurationError(f"no fault {name!r}; there are: {', '.join(FAULTS)}")
    try:
        return kind(float(probability)) if probability else kind()
    except ValueError:
        raise ConfigurationError(f"fault {name}: {probability!r} is no probability") from None
