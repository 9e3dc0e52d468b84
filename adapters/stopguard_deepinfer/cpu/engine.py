"""DeepInfer's real C++ scheduler, driven the way its `LLMEngine` drives it, without a model.

What is DeepInfer's: the whole of `csrc/engine/scheduler.hpp` (queues, chunks, blocks, aborts, preemption). What is not:
the forward pass is a pause, and a token follows from the prompt and its place, so that equal prompts have equal texts.
The order of one step is that of `deepinfer/engine/llm_engine.py: LLMEngine.step` and `worker/worker.py:
execute_model_step` with `DEEPINFER_ZERO_OVERHEAD_SCHEDULING` off: schedule, forward, finish what the scheduler calls
finished (`pre_sampler_sync` → `finalize_seq` → `free_seq`), post-process.

Runs in the engine's own environment (torch, numpy and the extension module that `build.py` made).
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VOCABULARY = 900
#: Ids below are special; 2 ends a text.
_FIRST_TOKEN = 3
_FINISHED = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "abort",
    "FINISHED_IGNORED": "error",
    "FINISHED_PREEMPTED": "error",
}


@dataclass(frozen=True)
class Output:
    """One token of one sequence, or its end (then `token_id` may be -1)."""

    request_id: str
    sequence: int
    token_id: int
    finish_reason: str = ""


@dataclass(frozen=True)
class Sizes:
    """How large the engine is. `chunk_tokens` is the most that one step computes of prompts."""

    blocks: int = 512
    block_tokens: int = 16
    chunk_tokens: int = 64
    sequences: int = 8
    model_tokens: int = 4096
    step_seconds: float = 0.004


def load(extension: Path) -> Any:
    """The extension module at `extension`; its submodule `engine` is what is wanted."""
    os.environ.setdefault("DEEPINFER_USE_NEXTN_DECODE", "0")
    os.environ.setdefault("DEEPINFER_CPP_LOG_LEVEL", "warn")
    importlib.import_module("torch")  # its libraries must be there before the extension's are looked for

    spec = importlib.util.spec_from_file_location("_C", extension)
    if spec is None or spec.loader is None:
        raise ImportError(f"no extension module at {extension}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["_C"] = module
    spec.loader.exec_module(module)
    return module.engine


class SchedulerEngine:
    """The methods of `LLMEngine` that a server uses, over the real scheduler.

    `step` may run in one thread while others call `add_request` and `abort_request`: they wait for the scheduler, not
    for the forward pass, as with a real one that is busy on its accelerator.
    """

    def __init__(self, extension: Path, sizes: Sizes | None = None) -> None:
        numpy = importlib.import_module("numpy")
        torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")

        self.sizes = sizes = sizes or Sizes()
        self._numpy, self._torch = numpy, torch
        self._native = native = load(extension)
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        self.block_manager = native.BlockManager(sizes.blocks)
        #: Block 0 is never used (`block_manager.hpp`).
        self.blocks_total = sizes.blocks - 1
        config = SimpleNamespace(
            max_model_len=sizes.model_tokens,
            runtime_max_model_len=sizes.model_tokens + 1,
            max_num_batched_tokens=sizes.chunk_tokens,
            max_num_seqs=sizes.sequences,
            stop_preempted_request=False,
            chunked_prefill=True,
            engine_type=0,
            prefill_attempt_interval=1,
            prefill_any_attempt_interval=2,
        )
        # block size, blocks, states, end token, group, configuration, truncation, lookahead, longest prefill sum, cost
        # estimator, lookup table, context-parallel size, vocabulary, statistics: `LLMEngine._create_scheduler`.
        self.scheduler = native.Scheduler(
            *(sizes.block_tokens, self.block_manager, None, 2, distributed.group.WORLD, config),
            *(0, 0, 1 << 20, None, [], 1, VOCABULARY + _FIRST_TOKEN, False),
        )
        self.scheduler.decode_perf_curve = [(1, 1.0), (sizes.sequences, 1.0)]
        self._pool = native.SequenceMetadataPool()
        self._scheduling = threading.Lock()
        self._numbers = itertools.count(1)
        self._live: dict[int, tuple[Any, int, int]] = {}
        self.steps_total = 0
        self.tokens_total = 0

    # ---- what LLMEngine has -----------------------------------------------------------------------

    def add_request(
        self, user_id: str, request_id: str, sampling_params: dict[str, Any], prompt_token_ids: list[int]
    ) -> Any:
        """A new sequence. Several of one `request_id` are its choices."""
        prompt = self._numpy.asarray(prompt_token_ids, dtype=self._numpy.int32)
        number = next(self._numbers)
        parameters = SimpleNamespace(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seq_seed=0,
            top_logprobs=0,
            prompt_logprobs=False,
            first_n_token_no_eos=0,
            eos_id=2,
            ignore_eos=True,
            max_tokens=int(sampling_params.get("max_tokens", 16)),
            so_args=None,
        )
        sequence = self._native.Sequence(
            seq_id=number,
            prompt_token_ids=prompt,
            compressed_prompt_token_ids=prompt,
            multi_modal_data=None,
            block_size=self.sizes.block_tokens,
            request_id=request_id,
            user_id=user_id,
            sampling_params=parameters,
            arrival_time=time.perf_counter(),
            golden_token_ids=None,
        )
        with self._scheduling:
            self._live[number] = (sequence, zlib.crc32(prompt.tobytes()), len(prompt_token_ids))
            self.scheduler.add_sequence(sequence)
        return sequence

    def abort_request(self, request_ids: list[str]) -> tuple[int, int]:
        """(aborted sequences, sum of their tokens), as `LLMEngine.abort_request`."""
        with self._scheduling:
            sequences = self.scheduler.abort_sequence(request_ids)
            return len(sequences), sum(sequence.get_len() for sequence in sequences)

    def has_unfinished_requests(self) -> bool:
        with self._scheduling:
            return bool(self.scheduler.has_unfinished_seqs())

    def step(self) -> list[Output]:
        """One step; what it made."""
        torch = self._torch
        with self._scheduling:
            metadata, scheduled = self.scheduler.schedule(self._pool)
            sequences = list(scheduled.scheduled_seqs)
            for sequence in scheduled.finished_seqs:
                self.scheduler.free_seq(sequence)
        # The forward pass: whoever aborts now finds the scheduler between two of its moments.
        self.forward()
        with self._scheduling:
            tokens = [self._token(sequence) for sequence in sequences]
            lengths = [sequence.get_len() for sequence in sequences]
            self._native.process_MTPInfo(scheduled, False, torch.empty((1, 0), dtype=torch.int32), None)
            self.scheduler.process_outputs(
                scheduled, torch.empty(0, dtype=torch.int32), torch.tensor(tokens, dtype=torch.int32), None
            )
            outputs = [
                Output(sequence.request_id, sequence.seq_id, token)
                for sequence, token, length in zip(sequences, tokens, lengths, strict=True)
                if sequence.get_len() > length
            ]
            self._pool.release(metadata)
            self.steps_total += 1
            self.tokens_total += len(outputs)
            return outputs + self._ended()

    # ---- what a server further wants to know ------------------------------------------------------

    def gauges(self) -> dict[str, int]:
        """Places in requests' sequences, blocks in blocks; what the scheduler says now."""
        with self._scheduling:
            scheduler = self.scheduler
            queued = [*scheduler.running, *scheduler.waiting]
            # Finished ones stay in these lists until a later step takes them out. One that is in flight in a prefill
            # is in neither list.
            in_flight = sum(not _reason(sequence) for sequence, _, _ in self._live.values())
            waiting = sum(not _reason(sequence) for sequence in scheduler.waiting)
            return {
                "running": max(0, in_flight - waiting),
                "waiting": waiting,
                "ending": sum(bool(_reason(sequence)) for sequence in queued),
                "blocks_used": self.blocks_total - int(self.block_manager.get_num_free_blocks()),
                "blocks_total": self.blocks_total,
                "block_tokens": self.sizes.block_tokens,
                "steps_total": self.steps_total,
                "generated_tokens_total": self.tokens_total,
                "aborts_total": int(scheduler.get_num_aborted_seqs()),
                "preemptions_total": int(scheduler.get_num_preempted_seqs()),
            }

    def forward(self) -> None:
        """The forward pass of one step: a pause."""
        time.sleep(self.sizes.step_seconds)

    # ---- private ----------------------------------------------------------------------------------

    def _token(self, sequence: Any) -> int:
        _, prompt, length = self._live.get(sequence.seq_id, (None, 0, 0))
        place = sequence.get_len() - length
        return _FIRST_TOKEN + zlib.crc32(f"{prompt}/{place}".encode()) % VOCABULARY

    def _ended(self) -> list[Output]:
        """The ends that have come about since the last time."""
        ended = []
        for number, (sequence, _, _) in list(self._live.items()):
            reason = _reason(sequence)
            if reason:
                ended.append(Output(sequence.request_id, number, -1, reason))
                del self._live[number]
        return ended


def _reason(sequence: Any) -> str:
    """Why it has ended; empty while it lives."""
    return _FINISHED.get(sequence.status.name, "error" if sequence.status.name.startswith("FINISHED") else "")
