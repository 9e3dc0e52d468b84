"""What the admin API answers and takes. The words are those of the books; units stand in the names."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "AccountDue",
    "AnomalyLine",
    "BooksPage",
    "ClassOrder",
    "ClassReport",
    "DifferenceLine",
    "EngineLine",
    "EnginePage",
    "Health",
    "JournalLine",
    "LeakLine",
    "LeakPage",
    "LedgerState",
    "Problem",
    "Readiness",
    "RecoveredLine",
    "RequestDetail",
    "RequestLine",
    "RequestPage",
    "State",
    "StopLine",
    "StopOrder",
    "StopPage",
    "StopReport",
    "StopResult",
    "StopStepLine",
    "TimelineLine",
    "TotalsLine",
    "Verdict",
]

State = Literal[
    "queued", "running", "preempted", "draining", "stopping", "overdue", "settling", "settled", "written_off"
]
LedgerName = Literal["queue", "kv", "output", "link", "stream"]
Semantics = Literal["cancel", "preempt", "finish", "fail"]

EXAMPLE_ID = "sg-5f1c0e9ab27d4c3e8b6a90d1f2e3c4b5"
IDS_MAX = 1000
WAIT_SECONDS_MAX = 60.0


class Answer(BaseModel):
    """An answer: immutable, and nothing in it by accident."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Problem(Answer):
    """Why something was not done, in one line, with what to do."""

    detail: str = Field(examples=["sg-0 is not here: it never was, or it ended too long ago"])


class Health(Answer):
    """Whether the relay's own loop answers."""

    status: Literal["ok", "stuck"]


class Readiness(Answer):
    """Whether clients can be served now. Only words that anybody may read."""

    ready: bool
    draining: bool
    reasons: list[str] = Field(examples=[["no engine answers"]])


class StopLine(Answer):
    """A stop: why, by whom, how far it is, and how surely."""

    semantics: Semantics
    source: str = Field(examples=["client"])
    reason: str = Field(examples=["eof"])
    actor: str = ""
    outcome: str = Field(description="pending, confirmed, unconfirmed, raced_finish or failed")
    evidence: str = Field(description="none, sent, accepted, stream_closed, gauge or probe")
    attempts: int = Field(description="Knocks at the engine's doors.")
    observed: datetime
    age_seconds: float = Field(description="Since it was observed, until now or until it was settled.")
    detection_seconds: float | None = Field(description="From when it happened to when it was observed, where known.")
    retry: str = Field(description="What the client was told about sending it again.")


class RequestLine(Answer):
    """One request in a list."""

    id: str = Field(examples=[EXAMPLE_ID])
    state: State
    engine: str
    model: str
    group: str
    place: str = Field(description="Where it is: the open account of the queue ledger, or `gone`.")
    open: list[str] = Field(description="The ledgers that are open.", examples=[["kv", "link"]])
    overdue: list[str] = Field(description="The ledgers with something overdue: leaks.")
    opened: datetime
    age_seconds: float
    tokens_computed: int
    tokens_delivered: int
    bytes_sent: int
    stop: StopLine | None


class RequestPage(Answer):
    """A page of requests. `next` is what to give as `after` to go on; null on the last page."""

    requests: list[RequestLine]
    next: str | None
    open_requests: int = Field(description="Of all, whatever was filtered.")


class AccountDue(Answer):
    """An amount that something is waited for: an obligation."""

    account: str
    amount: int
    unit: str
    due_in_seconds: float | None = Field(description="Negative when it is overdue.")
    overdue: bool


class LedgerState(Answer):
    """One of the five ledgers of a request."""

    name: LedgerName
    closed: bool
    overdue: bool
    balances: dict[str, int] = Field(description="By account, those of the outside world and zeros left out.")
    due: list[AccountDue]


class TimelineLine(Answer):
    """One entry of the books, or a mark that moved nothing."""

    time: datetime
    since_open_seconds: float
    ledger: str
    what: str
    kind: str
    amount: int | None
    unit: str
    evidence: str
    note: str


class StopStepLine(Answer):
    """One of the steps of a stop. Null: it has not happened."""

    name: str
    after_seconds: float | None = Field(description="Since the stop was observed.")
    took_seconds: float | None = Field(description="Since the step before it.")


class Verdict(Answer):
    """How it ended, in one word and one sentence."""

    word: str
    text: str
    good: bool


class LeakLine(Answer):
    """Something that was due and did not come by its deadline."""

    id: str = Field(examples=[EXAMPLE_ID])
    engine: str
    model: str
    ledger: str
    account: str
    amount: int
    unit: str
    found: datetime
    overdue_seconds: float = Field(description="From its deadline until now, or until it closed late.")
    open: bool = Field(description="Whether it is still open. A leak that closed stays a fact.")
    opened_by: str = Field(description="The entry that opened it.")


class RequestDetail(Answer):
    """Everything about one request. `source`: from the open books, the closed ones, or the journal."""

    request: RequestLine
    source: Literal["open", "recent", "journal"]
    ledgers: list[LedgerState]
    steps: list[StopStepLine]
    timeline: list[TimelineLine]
    timeline_total: int = Field(description="How many rows there are; the newest are here.")
    leaks: list[LeakLine]
    verdict: Verdict
    labels: dict[str, str]


class StopResult(Answer):
    """What became of the wish for one request."""

    id: str
    result: Literal["stopping", "already", "unknown"]
    state: State | None = Field(description="Its state when this was answered.")
    outcome: str | None
    evidence: str | None


class StopOrder(BaseModel):
    """Which requests to stop: exactly one of `ids`, `group`, `model`, `engine`, `all`."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {"ids": [EXAMPLE_ID], "reason": "runaway", "wait_seconds": 5},
                {"group": "batch-7"},
                {"model": "llama-3.1-8b"},
                {"engine": "gpu0", "reason": "maintenance"},
                {"all": True},
            ]
        },
    )

    ids: list[Annotated[str, Field(min_length=1, max_length=128)]] | None = Field(
        default=None, min_length=1, max_length=IDS_MAX
    )
    group: str | None = Field(default=None, min_length=1, max_length=256)
    model: str | None = Field(default=None, min_length=1, max_length=256)
    engine: str | None = Field(default=None, min_length=1, max_length=64)
    all: Literal[True] | None = None
    reason: str = Field(
        default="admin", pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/-]{0,63}$", description="For the record; no secrets."
    )
    wait_seconds: float = Field(
        default=0, ge=0, le=WAIT_SECONDS_MAX, description="Answer when all are settled, at the latest after this."
    )

    @model_validator(mode="after")
    def _one_selector(self) -> Self:
        if sum(bool(chosen) for chosen in (self.ids, self.group, self.model, self.engine, self.all)) != 1:
            raise ValueError("give exactly one of ids, group, model, engine, all")
        return self


class ClassOrder(BaseModel):
    """Which class a request is to have."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [{"class": "urgent"}]})

    priority_class: str = Field(alias="class", min_length=1, max_length=64)


class ClassReport(Answer):
    """The class that a request has now."""

    id: str
    priority_class: str = Field(serialization_alias="class")
    changed: bool = Field(description="False when it had that class already.")


class StopReport(Answer):
    """What became of an order. `stops` has the first thousand; the counts are of all."""

    stopping: int
    already: int
    unknown: int
    settled: bool = Field(description="Whether the books of all that were found are closed now.")
    stops: list[StopResult]


class StopPage(Answer):
    """Stops: in progress, oldest first, then those that ended, newest first."""

    in_progress: list[RequestLine]
    ended: list[RequestLine]
    in_progress_total: int


class LeakPage(Answer):
    """The leaks found lately, newest first."""

    leaks: list[LeakLine]
    found_total: int
    open_total: int = Field(description="Requests with something overdue now.")


class DifferenceLine(Answer):
    """Our books against an engine's gauges, in one unit. Null where one side cannot say."""

    ledger: str
    unit: str
    expected: int | None
    reported: int | None
    orphans: int = Field(description="Work in the engine that no known request owns.")
    phantoms: int = Field(description="Work that we believe in and the engine does not have.")
    persistent: bool = Field(description="It was there in every one of the last comparisons.")


class ProbeLine(Answer):
    """One probe inside an engine."""

    kind: str
    version: str
    role: str
    rank: int
    host: str
    process: int
    connected_seconds: float
    frames: int
    gaps: int = Field(description="Holes in the numbers of its frames.")
    frames_missed: int
    frames_dropped: int = Field(description="What it says it could not send.")
    in_gap: bool = Field(description="Something was missed, and its snapshot has not come yet.")
    lag_seconds: float | None = Field(description="How old its newest frame was when it came.")
    clock_offset_seconds: float | None = Field(description="How far its clock is ahead of ours.")
    clock_error_seconds: float | None
    commands: list[str] = Field(description="What it can be told to do.")
    hooks_attached: list[str]
    hooks_missing: list[str]


class EngineLine(Answer):
    """One engine."""

    name: str
    base_url: str
    kind: str = Field(description="The adapter that speaks to it.")
    version: str = Field(description="What it says its version is; empty where it does not, or has not answered yet.")
    healthy: bool
    models: list[str]
    in_engine: int = Field(description="Requests in it, by the books.")
    stopping: int = Field(description="Of these: told to stop and not confirmed yet.")
    unconfirmed: int = Field(description="Of these: not confirmed by the deadline.")
    waiting_for_connection: int
    open_connections: int
    idle_connections: int
    failures: int
    ejections: int
    doors: list[str] = Field(description="The ways to stop a request there, in the order of trying.")
    best_evidence: str = Field(description="The highest grade of evidence that can be had from it.")
    probed: bool
    gauge_unit: str = Field(description="What its gauges count: `blocks`, `tokens`, or `none`.")
    compared_seconds_ago: float | None
    differences: list[DifferenceLine]
    probes: list[ProbeLine] = Field(description="The probes inside it that are connected.")


class EnginePage(Answer):
    """All engines."""

    engines: list[EngineLine]


class TotalsLine(Answer):
    """The balances of one engine and model, by `ledger.account`."""

    engine: str
    model: str
    balances: dict[str, int]


class AnomalyLine(Answer):
    """A statement of an engine that the books cannot hold."""

    time: datetime
    id: str
    text: str


class JournalLine(Answer):
    """The journal now."""

    queued: int
    backlog: int
    written: int
    open_books: int
    dropped: dict[str, int]
    failing: str | None
    file_bytes: int


class RecoveredLine(Answer):
    """A request that the last run left open."""

    id: str
    kind: str
    written: datetime


class BooksPage(Answer):
    """The book of all requests: counts, balances, and what does not fit."""

    started: datetime
    open_requests: int
    overdue_requests: int
    opened: int
    settled: int
    written_off: int
    leaks_found: int
    closed_late: int
    open_ledgers: dict[str, int] = Field(description="How many requests have this ledger open.")
    totals: list[TotalsLine]
    book_errors: int
    anomalies: list[AnomalyLine]
    late_events: dict[str, int]
    differences: dict[str, list[DifferenceLine]] = Field(description="By engine.")
    journal: JournalLine | None
    recovered: list[RecoveredLine]
    recovered_total: int
