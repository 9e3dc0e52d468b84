"""Gauges in the style of the engine that is imitated: its names, its labels, and its ways to be late or silent.

* vLLM 0.32.0: Prometheus, fresh at each scrape; counts no cancels (`finished_reason="abort"` stays 0).
* SGLang 0.5.23: Prometheus gauges from every 40th decode step, `/v1/loads` from every 15th; both at once
  when idle; `num_retracted_reqs` and `queues.retracted` stay 0.
* llama.cpp: `/metrics` and `/slots`; what a slot shows persists after its release.
* TensorRT-LLM: `/metrics` is a JSON list of iteration records that is drained on read.
* DeepInfer 0.1.0 has no server; the face in its adapter package shows totals (`http_routes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from stopguard.refengine.http_face import Face
from stopguard.refengine.interface import EngineConfig, Gauges, RequestView, StepResult

__all__ = ["IterationRecords", "LateGauges", "SlotBoard", "llama_metrics", "loads", "sglang_metrics", "vllm_metrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

#: (name, type, help, [(labels, value)]); a counter's name already ends in `_total`.
Sample = tuple[Mapping[str, str], float]
Family = tuple[str, str, str, list[Sample]]


def render(families: Iterable[Family]) -> bytes:
    """Prometheus text format 0.0.4."""
    lines: list[str] = []
    for name, kind, text, samples in families:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for labels, value in samples:
            inside = ",".join(f'{label}="{_escape(content)}"' for label, content in labels.items())
            lines.append(f"{name}{{{inside}}} {float(value)!r}" if inside else f"{name} {float(value)!r}")
    return ("\n".join(lines) + "\n").encode()


def _escape(content: str) -> str:
    return content.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def vllm_metrics(face: Face) -> bytes:
    """`/metrics` of vLLM, from the present totals."""
    gauges, config, driver = face.engine.gauges(), face.engine.config, face.driver
    labels = {"engine": "0", "model_name": face.options.defaults.model}

    def one(name: str, kind: str, text: str, value: float) -> Family:
        return name, kind, text, [(labels, value)]

    finished = gauges.finished_total
    reasons = {"stop": finished.get("stop", 0), "length": finished.get("length", 0), "abort": 0}
    cache_config = {
        **labels,
        "block_size": str(config.block_tokens),
        "num_gpu_blocks": str(config.blocks),
        "enable_prefix_caching": str(config.prefix_cache),
    }
    return render(
        [
            one("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", gauges.running),
            one(
                "vllm:num_requests_waiting",
                "gauge",
                "Number of requests waiting to be processed.",
                gauges.waiting + gauges.preempted + gauges.paused + gauges.transferring,
            ),
            one("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent.", gauges.blocks_used_ratio),
            one("vllm:num_preemptions_total", "counter", "Cumulative number of preemptions.", gauges.preemptions_total),
            one("vllm:prompt_tokens_total", "counter", "Number of prefill tokens.", gauges.prompt_tokens_total),
            one(
                "vllm:generation_tokens_total", "counter", "Number of generated tokens.", gauges.generated_tokens_total
            ),
            one("vllm:prefix_cache_queries_total", "counter", "Queried tokens.", driver.prompt_tokens_ended),
            one("vllm:prefix_cache_hits_total", "counter", "Cached tokens.", driver.cached_tokens_ended),
            (
                "vllm:request_success_total",
                "counter",
                "Count of successfully processed requests.",
                [({**labels, "finished_reason": reason}, count) for reason, count in reasons.items()],
            ),
            ("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", [(cache_config, 1.0)]),
        ]
    )


class LateGauges:
    """Totals as of every `period`-th step; at once when nothing runs or waits."""

    def __init__(self, face: Face, period: int) -> None:
        self._face = face
        self._period = period
        self._step = 0
        self.gauges: Gauges = face.engine.gauges()
        self._looked_at = face.clock.wall()
        face.driver.on_step.append(self._look)

    def _look(self, result: StepResult) -> None:
        frame = result.frame
        idle = not frame.running_now and not frame.waiting_now
        if idle or frame.step - self._step >= self._period:
            self._step = frame.step
            self.gauges = self._face.engine.gauges()
            self._looked_at = self._face.clock.wall()

    @property
    def taken_at(self) -> float:
        """Wall time of these totals; an idle engine publishes all the time."""
        idle = not self.gauges.running and not self.gauges.waiting
        return self._face.clock.wall() if idle else self._looked_at


def _used_tokens(gauges: Gauges, config: EngineConfig) -> int:
    return (gauges.blocks_held + gauges.blocks_fenced) * config.block_tokens


def sglang_metrics(face: Face, late: LateGauges) -> bytes:
    """`/metrics` of SGLang: late gauges, counters of the front end that are not late."""
    gauges, config = late.gauges, face.engine.config
    fresh = face.engine.gauges()
    labels = {"engine_type": "unified", "model_name": face.options.defaults.model, "tp_rank": "0", "pp_rank": "0"}

    def one(name: str, kind: str, text: str, value: float) -> Family:
        return f"sglang:{name}", kind, text, [(labels, value)]

    queued = gauges.waiting + gauges.preempted + gauges.paused
    return render(
        [
            one("num_running_reqs", "gauge", "The number of running requests.", gauges.running),
            one("num_used_tokens", "gauge", "The number of used tokens.", _used_tokens(gauges, config)),
            one("token_usage", "gauge", "The token usage.", gauges.blocks_used_ratio),
            one("num_queue_reqs", "gauge", "The number of requests in the waiting queue.", queued),
            one("num_grammar_queue_reqs", "gauge", "The number of requests in the grammar waiting queue.", 0),
            one("num_retracted_reqs", "gauge", "The number of retracted requests.", 0),
            one(
                "max_total_num_tokens", "gauge", "Maximum total number of tokens.", config.blocks * config.block_tokens
            ),
            one("prompt_tokens_total", "counter", "Number of prefill tokens processed.", fresh.prompt_tokens_total),
            one("generation_tokens_total", "counter", "Number of generation tokens.", fresh.generated_tokens_total),
            one("num_requests_total", "counter", "Number of requests processed.", sum(fresh.finished_total.values())),
            one("num_aborted_requests_total", "counter", "Number of requests aborted.", fresh.aborts_total),
            one("num_retracted_requests_total", "counter", "Number of retracted requests.", fresh.preemptions_total),
        ]
    )


def loads(face: Face, late: LateGauges) -> dict[str, Any]:
    """`/v1/loads` of SGLang (`entrypoints/v1_loads.py`, `managers/load_snapshot.py`)."""
    gauges, config = late.gauges, face.engine.config
    used, total = _used_tokens(gauges, config), config.blocks * config.block_tokens
    load = {
        "dp_rank": 0,
        "timestamp": late.taken_at,
        "num_running_reqs": gauges.running,
        "num_waiting_reqs": gauges.waiting + gauges.preempted,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": total,
        "max_running_requests": config.max_running,
        "token_usage": gauges.blocks_used_ratio,
        "utilization": gauges.running / config.max_running,
        "queues": {"waiting": gauges.waiting, "grammar": 0, "paused": gauges.paused, "retracted": 0},
    }
    if config.lora_slots:
        held = gauges.slots_held.get("lora", 0)
        load["lora"] = {
            "slots_used": held,
            "slots_total": config.lora_slots,
            "utilization": held / config.lora_slots,
        }
    moment = datetime.fromtimestamp(face.clock.wall(), UTC).isoformat()
    return {"timestamp": moment, "version": face.style.version, "num_accelerators": 1, "loads": [load]}


def llama_metrics(face: Face) -> bytes:
    """`/metrics` of llama.cpp."""
    gauges = face.engine.gauges()

    def one(name: str, kind: str, text: str, value: float) -> Family:
        return f"llamacpp:{name}", kind, text, [({}, value)]

    busy = gauges.running + gauges.transferring
    return render(
        [
            one("prompt_tokens_total", "counter", "Number of prompt tokens processed.", gauges.prompt_tokens_total),
            one("tokens_predicted_total", "counter", "Number of tokens generated.", gauges.generated_tokens_total),
            one("n_decode_total", "counter", "Total number of llama_decode() calls", gauges.steps_total),
            one("requests_processing", "gauge", "Number of requests processing.", busy),
            one("requests_deferred", "gauge", "Number of requests deferred.", gauges.waiting),
        ]
    )


class _Slot(msgspec.Struct):
    request_id: str = ""
    view: RequestView | None = None
    task: int = -1


class SlotBoard:
    """`/slots` of llama.cpp: who sits where. A slot's figures persist after its release, as they do there."""

    def __init__(self, face: Face) -> None:
        self._face = face
        self._slots = [_Slot() for _ in range(face.engine.config.max_running)]
        self._tasks = 0

    def read(self) -> list[dict[str, Any]]:
        """All slots. Reading goes through the task queue, which the caller reports to the engine."""
        face = self._face
        views = {
            view.request_id: view
            for view in face.engine.snapshot(face.driver.catch_up()).requests
            if view.place == "running"
        }
        for slot in self._slots:
            if slot.request_id in views:
                slot.view = views.pop(slot.request_id)
            else:
                slot.request_id = ""
        free = (slot for slot in self._slots if not slot.request_id)
        for view, slot in zip(views.values(), free, strict=False):
            self._tasks += 1
            slot.request_id, slot.view, slot.task = view.request_id, view, self._tasks
        return [self._show(number, slot) for number, slot in enumerate(self._slots)]

    def _show(self, number: int, slot: _Slot) -> dict[str, Any]:
        view = slot.view
        return {
            "id": number,
            "id_task": slot.task,
            "n_ctx": self._face.engine.config.max_model_tokens,
            "speculative": bool(view and view.slots.get("speculative")),
            "is_processing": bool(slot.request_id),
            "n_prompt_tokens": view.prompt_tokens if view else 0,
            "n_prompt_tokens_processed": min(view.computed_tokens, view.prompt_tokens) if view else 0,
            "n_prompt_tokens_cache": view.cached_tokens if view else 0,
            "next_token": [{"has_next_token": bool(slot.request_id), "n_decoded": view.output_tokens if view else 0}],
        }


class IterationRecords:
    """`/metrics` of TensorRT-LLM: one record an iteration, the last `records_max`, gone when they were read."""

    def __init__(self, face: Face, records_max: int = 1000) -> None:
        self._face = face
        self._records: deque[dict[str, Any]] = deque(maxlen=records_max)
        self._step = 0
        self._at = 0.0
        face.driver.on_step.append(self._look)

    def drain(self) -> list[dict[str, Any]]:
        records = list(self._records)
        self._records.clear()
        return records

    def _look(self, result: StepResult) -> None:
        frame = result.frame
        if frame.step == self._step and not frame.events:
            return
        gauges = self._face.engine.gauges()
        used = gauges.blocks_held + gauges.blocks_fenced
        queued = gauges.waiting + gauges.preempted
        latency, self._at = frame.at - self._at, frame.at
        self._step = frame.step
        self._records.append(
            {
                "iter": frame.step,
                "iterLatencyMS": round(latency * 1000.0, 3),
                "timestamp": self._face.clock.wall(),
                "numActiveRequests": gauges.running + gauges.paused + gauges.transferring,
                "numQueuedRequests": queued,
                "maxNumActiveRequests": self._face.engine.config.max_running,
                "inflightBatchingStats": {
                    "numScheduledRequests": gauges.running,
                    "numPausedRequests": gauges.paused,
                },
                "kvCacheStats": {
                    "maxNumBlocks": gauges.blocks_total,
                    "freeNumBlocks": gauges.blocks_total - used,
                    "usedNumBlocks": used,
                    "tokensPerBlock": self._face.engine.config.block_tokens,
                },
            }
        )
