"""One typed configuration, from a TOML file, the environment and flags.

`load` puts the layers together (flags over environment over file over defaults) and answers with a
`Configuration`, or with `InvalidConfiguration`, whose `problems` are one line each. What a setting does is
written beside it in `models`; docs/configuration.md is generated from there.
"""

from stopguard.config.layers import Loaded, load, setting
from stopguard.config.models import (
    Aborts,
    Admin,
    Books,
    Configuration,
    ConnectionSettings,
    EngineEntry,
    JournalSettings,
    LimitSettings,
    ListenSettings,
    LivenessSettings,
    LogSettings,
    PolicySettings,
    ServerTls,
    StopSettings,
    Tenant,
    TimeoutSettings,
    UpstreamTls,
)
from stopguard.config.preemption import ClassEntry, PreemptionEntry
from stopguard.config.probe import ProbeEntry
from stopguard.config.problems import InvalidConfiguration
from stopguard.config.resume import ResumeEntry
from stopguard.config.values import (
    Address,
    format_policy,
    parse_address,
    parse_engine,
    parse_policy,
    parse_route_policy,
    read_secret,
)

__all__ = [
    "Aborts",
    "Address",
    "Admin",
    "Books",
    "ClassEntry",
    "Configuration",
    "ConnectionSettings",
    "EngineEntry",
    "InvalidConfiguration",
    "JournalSettings",
    "LimitSettings",
    "ListenSettings",
    "LivenessSettings",
    "Loaded",
    "LogSettings",
    "PolicySettings",
    "PreemptionEntry",
    "ProbeEntry",
    "ResumeEntry",
    "ServerTls",
    "StopSettings",
    "Tenant",
    "TimeoutSettings",
    "UpstreamTls",
    "format_policy",
    "load",
    "parse_address",
    "parse_engine",
    "parse_policy",
    "parse_route_policy",
    "read_secret",
    "setting",
]
