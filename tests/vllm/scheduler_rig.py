"""Our plugin on an imitated core: what the tests of its parts share."""

from __future__ import annotations

from typing import Any

from stopguard.probe import wire
from stopguard_vllm.plugin_attach import Hooks, attach
from stopguard_vllm.plugin_commands import Commands
from stopguard_vllm.plugin_probe import SchedulerProbe
from tests.vllm.imitation import Core, Request, RequestStatus, Scheduler, Sink

__all__ = ["ID", "OURS", "Rig", "short"]

OURS = "sg-" + "a" * 32
ID = f"chatcmpl-{OURS}-12345678"


class Rig:
    """A core with our hooks on it, and a sink in place of the gateway."""

    def __init__(self, scheduler: Scheduler | None = None, **options: Any) -> None:
        self.core = Core(scheduler or Scheduler(**options))
        self.scheduler = self.core.scheduler
        self.sink = Sink()
        self.at = 0.0
        self.failed: list[str] = []
        self.probe = SchedulerProbe(self.scheduler, self.sink, self.clock)
        self.hooks = Hooks(self.failed.append)
        self.missing = attach(self.scheduler, self.probe, self.hooks)
        self.commands = Commands(self.core, self.probe, self.sink, RequestStatus)

    @classmethod
    def around(cls, core: Core) -> Rig:
        """Hooks on a core that has been made already."""
        return cls(core.scheduler)

    def clock(self) -> float:
        self.at += 0.001
        return self.at

    def add(self, name: str = ID, **options: Any) -> Request:
        request = Request(name, **options)
        self.scheduler.add_request(request)
        return request

    def order(self, action: Any, name: str = OURS) -> str:
        self.sink.waiting.append(wire.Command(len(self.sink.sent), action, name))
        self.commands.run()
        return self.sink.answers[-1][0]

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)


def short(name: str = ID) -> str:
    return name[-12:]
