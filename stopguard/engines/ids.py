"""Our id inside an engine's own: which request a probe's event is about.

Engines wrap the id that they are given (`chatcmpl-…`, `cmpl-…-0`, with children `1_…`, with a random
suffix). Ours has one length and one alphabet, so it is found inside any of these, and nowhere else.
"""

from __future__ import annotations

import re

import msgspec

from stopguard.probe import wire

__all__ = ["OUR_ID", "with_our_ids"]

OUR_ID = re.compile(r"sg-[0-9a-f]{32}")


def with_our_ids(frame: wire.Frame) -> wire.Frame:
    """The frame with each new request owned by our id.

    Only the events that introduce a request are changed (`Added.parent_id`); from then on the
    controller knows the engine's own id as a part of ours.
    """
    if not any(type(event) is wire.Added for event in frame.events):
        return frame
    events: list[wire.Event] = []
    for event in frame.events:
        if isinstance(event, wire.Added):
            ours = OUR_ID.search(event.parent_id or event.request_id)
            if ours is not None and ours[0] != event.request_id:
                events.append(msgspec.structs.replace(event, parent_id=ours[0]))
                continue
        events.append(event)
    return msgspec.structs.replace(frame, events=events)
