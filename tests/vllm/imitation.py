"""An imitation of the parts of vLLM 0.32's core that the plugin touches: same names, same signatures, same order.

One step computes one token for each running request. It is only as much of a scheduler as the hooks can see.
"""

from __future__ import annotations

import enum
import queue
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from stopguard.probe import wire


class RequestStatus(enum.IntEnum):
    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7


class Block:
    def __init__(self) -> None:
        self.ref_cnt = 0
        self.is_null = False


class Pool:
    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks + 1
        self.free = [Block() for _ in range(blocks)]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def take(self, count: int) -> list[Block]:
        taken = [self.free.pop() for _ in range(count)]
        for block in taken:
            block.ref_cnt += 1
        return taken

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free.append(block)


class Waiting(deque["Request"]):
    def prepend_request(self, request: Request) -> None:
        self.appendleft(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(map(id, requests))
        kept = [request for request in self if id(request) not in gone]
        self.clear()
        self.extend(kept)


class EncoderCache:
    """`EncoderCacheManager`: which requests keep which output of an encoder from being evicted."""

    def __init__(self) -> None:
        self.cached: dict[str, set[str]] = {}
        self.request_cached_ids: dict[str, set[int]] = {}

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        output = request.mm_features[input_id].identifier
        if output not in self.cached:
            return False
        self._refer(request, input_id, output)
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        output = request.mm_features[input_id].identifier
        self.cached.setdefault(output, set())
        self._refer(request, input_id, output)

    def _refer(self, request: Request, input_id: int, output: str) -> None:
        self.cached[output].add(request.request_id)
        self.request_cached_ids.setdefault(request.request_id, set()).add(input_id)

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        output, name = request.mm_features[input_id].identifier, request.request_id
        mine = self.request_cached_ids.get(name, set())
        mine.discard(input_id)
        if any(request.mm_features[other].identifier == output for other in mine):
            return
        self.cached.get(output, set()).discard(name)

    def free(self, request: Request) -> None:
        for input_id in list(self.request_cached_ids.get(request.request_id, ())):
            self.free_encoder_input(request, input_id)
        self.request_cached_ids.pop(request.request_id, None)

    def reset(self) -> None:
        self.cached.clear()
        self.request_cached_ids.clear()


class Grammar:
    """A compiled grammar: what Python frees when nobody refers to it."""


class Request:
    def __init__(
        self,
        name: str,
        prompt: int = 20,
        tokens: int = 100,
        client_index: int = 0,
        *,
        lora: int = 0,
        inputs: Iterable[str] = (),
        structured: bool = False,
    ) -> None:
        self.lora_request = SimpleNamespace(lora_int_id=lora) if lora else None
        self.mm_features = [SimpleNamespace(identifier=each) for each in inputs]
        self.structured_output_request = SimpleNamespace(grammar=Grammar()) if structured else None
        self.request_id = name
        self.client_index = client_index
        self.num_prompt_tokens = prompt
        self.num_computed_tokens = 0
        self.num_output_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.num_preemptions = 0
        self.is_prefill_chunk = False
        self.resumable = False
        self.max_tokens = tokens
        self.status = RequestStatus.WAITING

    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED


class Scheduler:
    block_size = 16

    def __init__(self, blocks: int = 40, *, defers: bool = False) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = Waiting()
        self.kv_holding_waiting = Waiting()
        self.deferred_waiting: set[Request] = set()
        self.running: list[Request] = []
        self.connector: Any = None
        self.lora_config = SimpleNamespace(max_loras=2)
        self.encoder_cache_manager = EncoderCache()
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.deferred_frees: deque[tuple[int, list[Block]]] = deque()
        self.processed_step_seq = 9
        self.defers = defers
        self.pool = Pool(blocks)
        self.req_to_blocks: dict[str, list[Block]] = {}
        single = SimpleNamespace(req_to_blocks=self.req_to_blocks)
        coordinator = SimpleNamespace(single_type_managers=(single,))
        self.kv_cache_manager = SimpleNamespace(coordinator=coordinator, block_pool=self.pool)

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        new, cached, fresh, resumed, counts = [], [], [], set(), {}
        for request in [*self.running, *self.waiting]:
            if request.num_output_tokens + request.num_output_placeholders >= request.max_tokens:
                continue
            was = request.status
            needed = -(-(request.num_prompt_tokens + request.num_output_tokens + 1) // self.block_size)
            table = self.req_to_blocks.setdefault(request.request_id, [])
            added = self.pool.take(max(0, needed - len(table)))
            table += added
            if was is not RequestStatus.RUNNING:
                self.waiting.remove_requests([request])
                self.running.append(request)
                request.status = RequestStatus.RUNNING
            for input_id in range(len(request.mm_features)) if was is not RequestStatus.RUNNING else ():
                if not self.encoder_cache_manager.check_and_update_cache(request, input_id):
                    self.encoder_cache_manager.allocate(request, input_id)
            if was is RequestStatus.WAITING:
                new.append(SimpleNamespace(req_id=request.request_id, block_ids=([0] * len(table),)))
            else:
                cached.append(request.request_id)
                if was is RequestStatus.PREEMPTED:
                    resumed.add(request.request_id)
                fresh.append(([0] * len(added),) if added else None)
            count = 1 if request.num_computed_tokens else request.num_prompt_tokens + request.num_output_tokens
            counts[request.request_id] = count
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            request.num_output_placeholders += 1
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(req_ids=cached, new_block_ids=fresh, resumed_req_ids=resumed),
            num_scheduled_tokens=counts,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        if self.deferred_frees:
            self._drain_deferred_frees()
        groups: dict[int, list[Any]] = {}
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None:
                continue
            request.num_in_flight_tokens -= count
            request.num_output_placeholders = max(0, request.num_output_placeholders - 1)
            request.num_output_tokens += 1
            reason = None
            if request.num_output_tokens >= request.max_tokens:
                request.status, reason = RequestStatus.FINISHED_STOPPED, "length"
                self._free_blocks(request)
                self.running.remove(request)
            output = SimpleNamespace(request_id=name, new_token_ids=[7], finish_reason=reason)
            groups.setdefault(request.client_index, []).append(output)
        return {client: SimpleNamespace(outputs=outputs) for client, outputs in groups.items()}

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        names = list(self.requests) if request_ids is None else list(request_ids)
        ended = []
        for request in [self.requests[name] for name in names if name in self.requests]:
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            self.waiting.remove_requests([request])
            request.status = finished_status
            self._free_blocks(request)
            ended.append(request)
        return ended

    def _free_blocks(self, request: Request) -> None:
        self.encoder_cache_manager.free(request)
        self._free_request_blocks(request)
        del self.requests[request.request_id]

    def _free_request_blocks(self, request: Request) -> None:
        blocks = self.req_to_blocks.pop(request.request_id, [])
        if self.defers and request.num_in_flight_tokens:
            self.deferred_frees.append((9, blocks))
        else:
            self.pool.free_blocks(blocks)

    def _drain_deferred_frees(self) -> None:
        while self.deferred_frees and self.deferred_frees[0][0] <= self.processed_step_seq:
            self.pool.free_blocks(self.deferred_frees.popleft()[1])

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self._free_request_blocks(request)
        self.encoder_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.prepend_request(request)


class Core:
    """The engine core's side: its queues, and a step."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self.scheduler = scheduler or Scheduler()
        self.input_queue: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self.engine_index = 0
        self.told: list[str] = []
        self.runs = True

    def is_running(self) -> bool:
        return self.runs

    def step(self, during: Any = None) -> None:
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        if during is not None:
            during()
        sampled = SimpleNamespace(
            sampled_token_ids=[[7]] * len(names), req_id_to_index={name: place for place, name in enumerate(names)}
        )
        self.scheduler.update_from_output(output, sampled)

    def _send_abort_outputs(self, requests: list[Request]) -> None:
        self.told += [request.request_id for request in requests]

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        if request_type == "add":
            self.scheduler.add_request(request)
        elif request_type == "abort":
            self.scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)


class Sink:
    """Keeps what a sender would send, and gives the commands that a test has put in."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.waiting: list[wire.Command] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def commands(self) -> list[wire.Command]:
        taken, self.waiting = self.waiting, []
        return taken

    @property
    def events(self) -> list[wire.Event]:
        return [event for message in self.sent if isinstance(message, wire.Frame) for event in message.events]

    @property
    def answers(self) -> list[tuple[str, str]]:
        return [(each.answer, each.detail) for each in self.sent if isinstance(each, wire.CommandAnswer)]

    def told(self, *kinds: type) -> list[str]:
        """The events so far, in words, without tokens unless asked for; forgets them."""
        quiet = (wire.TokensComputed, wire.TokensEmitted)
        lines = []
        for event in self.events:
            if isinstance(event, quiet) and type(event) not in kinds:
                continue
            rest = [getattr(event, name) for name in event.__struct_fields__[2:]]
            lines.append(" ".join(map(str, [type(event).__name__, event.request_id[-12:], *rest])).rstrip())
        self.sent.clear()
        return lines


def balance(events: list[wire.Event]) -> dict[str, tuple[int, int]]:
    """By request: blocks that are still held or fenced, and tokens that are computed and neither sent nor dropped."""
    blocks: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for event in events:
        name = event.request_id
        match event:
            case wire.BlocksHeld():
                blocks[name] = blocks.get(name, 0) + event.blocks
            case wire.BlocksReturned():
                blocks[name] = blocks.get(name, 0) - event.blocks
            case wire.TokensComputed():
                tokens[name] = tokens.get(name, 0) + event.tokens
            case wire.TokensEmitted() | wire.TokensDropped():
                tokens[name] = tokens.get(name, 0) - event.tokens
            case _:
                pass
    return {name: (blocks.get(name, 0), tokens.get(name, 0)) for name in blocks.keys() | tokens.keys()}
