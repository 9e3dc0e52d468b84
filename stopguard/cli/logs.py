"""What a served gateway says: one line an event, for people or as JSON, on stderr.

A record may carry `event` (a stable word) and `fields` (a flat mapping) in its `extra`. Ids are said, secrets
and prompts never are: nothing of a request's head or body reaches a logger.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

__all__ = ["JsonFormatter", "TextFormatter", "configure", "say"]

_LETTERS = {"DEBUG": "debug", "INFO": "info", "WARNING": "warn", "ERROR": "error", "CRITICAL": "error"}


class TextFormatter(logging.Formatter):
    """``14:03:07.250 warn  stops: leak: kv.held …``"""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, tz=UTC).astimezone()
        word = _LETTERS.get(record.levelname, "info")
        where = record.name.removeprefix("stopguard.").removeprefix("stopguard")
        text = f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d} {word:<5} {where + ': ' if where else ''}"
        text += _one_line(record.getMessage())
        if record.exc_info and record.exc_info[0] is not None:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, `event`, `message`, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, tz=UTC)
        document: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": _LETTERS.get(record.levelname, "info"),
            "logger": record.name,
            "event": getattr(record, "event", "message"),
            "message": _one_line(record.getMessage()),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            document |= {name: value for name, value in fields.items() if name not in document}
        if record.exc_info and record.exc_info[0] is not None:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False, default=str)


def configure(form: str, level: str, stream: TextIO | None = None) -> logging.Handler:
    """Send everything from `level` up to `stream` (stderr), and nothing anywhere else. Returns the handler."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("stopguard").setLevel(level.upper())
    # httpx logs every control request at INFO, with its URL.
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    return handler


def say(logger: logging.Logger, level: int, event: str, message: str, /, **fields: Any) -> None:
    """Log one event with its fields."""
    logger.log(level, "%s", message, extra={"event": event, "fields": fields})


def _one_line(text: str) -> str:
    return " ".join(text.split())
