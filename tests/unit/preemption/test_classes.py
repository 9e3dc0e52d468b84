"""Who gets which class: the least of what was asked for and what the tenant may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopguard.errors import ConfigurationError
from stopguard.preemption import Claim, Classes, ClassSettings, PreemptionSettings, TenantStanding, UnknownClass

SETTINGS = PreemptionSettings(
    tenants={
        "trusted": TenantStanding(ceiling="urgent"),
        "batch": TenantStanding(ceiling="background", usual_class="background"),
        "eager": TenantStanding(ceiling="urgent", usual_class="urgent", weight=3.0),
    }
)
CLASSES = Classes(SETTINGS)


def granted(tenant: str, **asked: object) -> tuple[str, str]:
    found = CLASSES.grant(tenant, **asked)  # type: ignore[arg-type]
    return found.priority_class.name, found.lowered_from


@pytest.mark.parametrize(
    ("tenant", "asked", "expected"),
    [
        ("nobody", {}, ("standard", "")),
        ("nobody", {"header": "urgent"}, ("standard", "urgent")),
        ("nobody", {"header": "BACKGROUND"}, ("background", "")),
        ("trusted", {"header": "urgent"}, ("urgent", "")),
        ("trusted", {}, ("standard", "")),
        ("eager", {}, ("urgent", "")),
        ("batch", {}, ("background", "")),
        ("batch", {"header": "standard"}, ("background", "standard")),
        # service_tier: the words of OpenAI's API.
        ("trusted", {"tier": "priority"}, ("urgent", "")),
        ("nobody", {"tier": "priority"}, ("standard", "urgent")),
        ("trusted", {"tier": "flex"}, ("background", "")),
        ("trusted", {"tier": "auto"}, ("standard", "")),
        ("trusted", {"tier": "default"}, ("standard", "")),
        ("trusted", {"tier": "somebody else's word"}, ("standard", "")),
        # priority: the engines' own number, with the engine's sign.
        ("trusted", {"priority": -10}, ("urgent", "")),
        ("trusted", {"priority": -9}, ("standard", "")),
        ("trusted", {"priority": 0}, ("standard", "")),
        ("trusted", {"priority": 3}, ("background", "")),
        ("trusted", {"priority": 10_000}, ("background", "")),
        ("trusted", {"priority": 10, "lower_is_more_urgent": False}, ("urgent", "")),
        ("nobody", {"priority": -(10**9)}, ("standard", "urgent")),
        # The header goes before the tier, the tier before the number.
        ("trusted", {"header": "background", "tier": "priority", "priority": -10}, ("background", "")),
        ("trusted", {"tier": "flex", "priority": -10}, ("background", "")),
        ("trusted", {"tier": "default", "priority": -10}, ("standard", "")),
    ],
)
def test_what_is_granted(tenant: str, asked: dict[str, object], expected: tuple[str, str]) -> None:
    assert granted(tenant, **asked) == expected


@given(
    tenant=st.sampled_from(["nobody", "trusted", "batch", "eager"]),
    header=st.sampled_from(["", "background", "standard", "urgent"]),
    tier=st.sampled_from(["", "auto", "default", "flex", "scale", "priority", "urgent", "?"]),
    priority=st.none() | st.integers(-(10**12), 10**12),
    lower=st.booleans(),
)
def test_nobody_raises_themselves_above_their_ceiling(
    tenant: str, header: str, tier: str, priority: int | None, lower: bool
) -> None:
    found = CLASSES.grant(tenant, header=header, tier=tier, priority=priority, lower_is_more_urgent=lower)
    ceiling = SETTINGS.tenants[tenant].ceiling if tenant in SETTINGS.tenants else SETTINGS.ceiling
    assert found.priority_class.rank <= CLASSES.by_name[ceiling].rank
    if found.lowered_from:
        assert CLASSES.by_name[found.lowered_from].rank > found.priority_class.rank


def test_an_unknown_class_by_header_is_the_clients_error() -> None:
    with pytest.raises(UnknownClass, match=r"'vip' is no class here; there are: background, standard, urgent"):
        CLASSES.grant("nobody", header="vip")


def test_an_engine_is_told_the_class_with_its_own_sign() -> None:
    claim = Claim(priority_class=CLASSES.by_name["urgent"], tenant="t", weight=1.0, arrived_at=0.0)
    assert claim.engine_priority(lower_is_more_urgent=True) == -10
    assert claim.engine_priority(lower_is_more_urgent=False) == 10
    # Whoever made room goes before those of its class that came later, and keeps the class to which it rose.
    claim.returned = True
    claim.served_as = CLASSES.by_name["standard"]
    assert claim.engine_priority(lower_is_more_urgent=False) == 1


def test_the_blocks_that_a_request_needs_have_room_for_one_more_token() -> None:
    claim = Claim(priority_class=CLASSES.default, tenant="t", weight=1.0, arrived_at=0.0, prompt_tokens=31)
    assert claim.blocks(16) == 2
    assert claim.blocks(16, output_tokens=1) == 3
    assert claim.blocks(1) == 32


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"classes": {}}, "at least one class"),
        ({"default_class": "vip"}, "default_class is 'vip'"),
        ({"ceiling": "vip"}, "ceiling is 'vip'"),
        ({"tenants": {"a": TenantStanding(ceiling="vip")}}, "a tenant's ceiling is 'vip'"),
        ({"tenants": {"a": TenantStanding(usual_class="vip")}}, "a tenant's class is 'vip'"),
        ({"classes": {"standard": ClassSettings(urgency=0), "b": ClassSettings(urgency=0)}}, "the same urgency"),
        ({"kv_low": 0.95}, "kv_low"),
        ({"recomputed_share": 0.0}, "recomputed_share"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        PreemptionSettings(**settings)  # type: ignore[arg-type]
