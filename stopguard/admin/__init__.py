"""The admin side: everything about every request, over HTTP, on a port and a thread of its own.

`create_app(view)` makes the app from anything that fulfils `View`; `live.LiveView` is the view of a running
gateway, and `thread.AdminThread` serves an app beside it.
"""

from stopguard.admin.app import create_app
from stopguard.admin.view import EngineFacts, LifeSigns, StopTaken, StopWanted, View

__all__ = ["EngineFacts", "LifeSigns", "StopTaken", "StopWanted", "View", "create_app"]
