"""The table `preemption`: classes, who goes first, and who makes room. See docs/preemption.md."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from stopguard.config.fields import Count, Seconds, Section, Share, names

__all__ = ["ClassEntry", "PreemptionEntry"]


class ClassEntry(Section):
    """One class of requests. The name of its table is what clients write in `X-StopGuard-Class`.

    Naming one class replaces all that are there by default.
    """

    urgency: int = Field(
        description="A higher number is more urgent. Engines with a `priority` get it, with the sign that they want."
    )
    preempts: bool = Field(default=False, description="Its requests may take the room of less urgent ones.")
    preemptible: bool = Field(default=True, description="Its requests may have to make room.")


def _usual_classes() -> dict[str, ClassEntry]:
    return {
        "background": ClassEntry(urgency=-10),
        "standard": ClassEntry(urgency=0),
        "urgent": ClassEntry(urgency=10, preempts=True, preemptible=False),
    }


class PreemptionEntry(Section):
    """Who goes first, and who makes room for it. See docs/preemption.md."""

    mode: Literal["off", "queue", "preempt"] = Field(
        default="off",
        description="`off`: one class, requests wait in the order of their arrival. `queue`: classes, fairness between "
        "tenants and deadlines decide who goes next. `preempt`: and what runs makes room for what is more urgent.",
        json_schema_extra=names(flag="--preemption"),
    )
    classes: dict[str, ClassEntry] = Field(
        default_factory=_usual_classes, max_length=16, description="The classes, by name."
    )
    default_class: str = Field(default="standard", description="The class of a request that does not ask for one.")
    ceiling: str = Field(
        default="standard",
        description="The most that a tenant may ask for, unless `policies.tenants.NAME.ceiling` says otherwise.",
    )
    promote_seconds: Seconds = Field(
        default=10.0, description="Whoever has waited this long counts as one class higher; again after as long."
    )
    policy: Literal[
        "least_work_lost", "fewest_output_first", "longest_output_first", "most_blocks_freed", "newest_first"
    ] = Field(default="least_work_lost", description="Who makes room, among those of the least urgent class.")
    patience_seconds: Seconds = Field(
        default=0.05, description="An urgent request may wait in a full engine before somebody makes room."
    )
    blind_patience_seconds: Seconds = Field(
        default=0.5, description="The same, where the engine does not say how full it is."
    )
    kv_high: Share = Field(default=0.9, description="An engine with this share of its KV taken is full.")
    kv_low: Share = Field(
        default=0.8, description="Whoever made room comes back when no more than this would be taken afterwards."
    )
    cool_down_seconds: Seconds = Field(default=2.0, description="Whoever came back is left alone for as long as this.")
    hold_seconds: Seconds = Field(default=0.1, description="Whoever made room stays away for at least this.")
    longest_parked_seconds: Seconds = Field(
        default=30.0, description="After this it comes back as soon as there is a place, however full the engine is."
    )
    preemptions_per_request: Count = Field(default=3, description="How often one request may have to make room.")
    recomputed_share: Share = Field(
        default=0.1, description="When more than this share of all tokens is computed again, nobody is preempted."
    )
    window_seconds: Seconds = Field(default=60.0, description="Over which time that share is taken.")
    window_tokens: Count = Field(
        default=20_000, description="What is taken as computed in that time at least: what a start may cost."
    )
    remaining_tokens_min: int = Field(
        default=16, ge=0, description="Whoever has fewer tokens to come is left alone: it soon makes room by itself."
    )
    victims_at_once: Count = Field(default=4, description="Requests that make room for one at the same time.")
    assumed_tokens: Count = Field(default=256, description="The length of an answer that its request does not bound.")
    block_tokens: Count = Field(default=16, description="Tokens in a block, for engines that count in blocks.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for what, name in (("default_class", self.default_class), ("ceiling", self.ceiling)):
            if name not in self.classes:
                raise ValueError(f"{what} is {name!r}, which is no class; there are: {', '.join(sorted(self.classes))}")
        urgencies = [each.urgency for each in self.classes.values()]
        if len(set(urgencies)) != len(urgencies):
            raise ValueError("two classes have the same urgency: give each its own number")
        if self.kv_low > self.kv_high:
            raise ValueError(f"kv_low is {self.kv_low} and above kv_high, which is {self.kv_high}")
        return self
