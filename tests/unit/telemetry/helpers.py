"""A storm that telemetry watches, and a reader of expositions."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from stopguard.ledger import Book, Evidence
from stopguard.stops import Controller, Door, DoorKind, Effect, EngineProfile
from stopguard.telemetry import Telemetry, create_telemetry
from stopguard.testing.plan import StormPlan, plan_storm
from stopguard.testing.storm import Storm, StormConfig

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

PROBED = EngineProfile(
    name="alpha",
    doors=(Door(name="abort", kind=DoorKind.CALL, worth=Evidence.PROBE),),
    best_evidence=Evidence.PROBE,
)
BLIND = EngineProfile(name="beta")


class WatchedStorm(Storm):
    """A storm whose effects go to telemetry, in its virtual time."""

    def __init__(self, plan: StormPlan, config: StormConfig | None = None) -> None:
        super().__init__(plan, config or StormConfig(solo_outputs=False))
        self.telemetry = create_telemetry(self.book, self.controller, [self.profile], lambda _: ("tiny",))

    def _do(self, effect: Effect) -> Sequence[Effect]:
        result = super()._do(effect)
        self.telemetry(effect, self.clock.now)
        return result


def run_storm(seed: int = 3, requests: int = 120, **config: object) -> WatchedStorm:
    storm = WatchedStorm(plan_storm(seed, requests), StormConfig(solo_outputs=False, **config))  # type: ignore[arg-type]
    storm.run()
    return storm


class Edge:
    """The smallest edge: a controller whose effects are observed and else ignored."""

    def __init__(self, *profiles: EngineProfile, models: Sequence[str] = ("small",)) -> None:
        self.book = Book()
        self.controller = Controller(self.book)
        self.telemetry: Telemetry = create_telemetry(
            self.book, self.controller, profiles or (PROBED, BLIND), lambda _: models
        )

    def see(self, wanted: Sequence[Effect], at: float) -> None:
        for effect in wanted:
            self.telemetry(effect, at)

    def samples(self) -> Samples:
        return samples(self.telemetry.render()[0])


def samples(body: bytes) -> Samples:
    """Every sample of a text exposition by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    """The sum of the samples of `name` that have these labels."""
    wanted = labels.items()
    chosen = [number for (each, pairs), number in found.items() if each == name and wanted <= pairs]
    assert chosen, f"no sample of {name} with {labels}"
    return sum(chosen)


def present(found: Samples, name: str, **labels: str) -> bool:
    wanted = labels.items()
    return any(each == name and wanted <= pairs for each, pairs in found)
