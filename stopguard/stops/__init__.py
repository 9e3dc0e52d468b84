"""Stops: why a request ends, what that makes of client, engine and books, and who must be told.

Start at `machine` (the tables and their theory), then `cause`, then `controller` (events in, effects
out). `observations` reads what an engine's scheduler says.
"""

from stopguard.stops import effects, preemptions
from stopguard.stops.advice import retry_advice
from stopguard.stops.anomalies import Anomalies, BookError
from stopguard.stops.cause import Semantics, Source, StopCause, prevails
from stopguard.stops.controller import Controller
from stopguard.stops.doors import CLOSE_CONNECTION, AbortAnswer, Door, DoorKind, EngineProfile, RetryPolicy
from stopguard.stops.effects import Effect, RetryAdvice
from stopguard.stops.gauges import engine_died, observe_gauges
from stopguard.stops.machine import Books, Client, Engine, IllegalTransition, Machine
from stopguard.stops.observations import observe_frame
from stopguard.stops.patience import ClientPolicy, DeadlineKind, StopConfig
from stopguard.stops.timers import Timer, TimerWheel
from stopguard.stops.tracked import Tracked

__all__ = [
    "CLOSE_CONNECTION",
    "AbortAnswer",
    "Anomalies",
    "BookError",
    "Books",
    "Client",
    "ClientPolicy",
    "Controller",
    "DeadlineKind",
    "Door",
    "DoorKind",
    "Effect",
    "Engine",
    "EngineProfile",
    "IllegalTransition",
    "Machine",
    "RetryAdvice",
    "RetryPolicy",
    "Semantics",
    "Source",
    "StopCause",
    "StopConfig",
    "Timer",
    "TimerWheel",
    "Tracked",
    "effects",
    "engine_died",
    "observe_frame",
    "observe_gauges",
    "preemptions",
    "prevails",
    "retry_advice",
]
