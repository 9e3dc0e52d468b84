"""What is wrong with a configuration, one line each: where it came from, which key, what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from stopguard.errors import ConfigurationError

__all__ = ["InvalidConfiguration", "explain", "nearest"]

_SECRET_KEYS = {"token", "api_key", "key_password"}
_WANTED = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
}


class InvalidConfiguration(ConfigurationError):
    """The configuration cannot work. `problems` has one line for each thing to mend; the text is the first."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems
        more = f" (and {len(problems) - 1} more: see stopguard serve --check)" if len(problems) > 1 else ""
        super().__init__(problems[0] + more)
        self.problems = tuple(problems)


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` for the known word that is most like `word`, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def explain(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]) -> list[str]:
    """One line for each error. `origins` says for a dotted key where its value was written."""
    lines: list[str] = []
    seen: set[str] = set()
    for detail in error.errors(include_url=False):
        location = _location(model, detail["loc"])
        key = ".".join(location)
        origin = _origin(location, origins)
        if any(earlier == key or earlier.startswith(key + ".") for earlier in seen if key):
            continue  # every alternative of a union complains, and a list about its items: the first says enough
        seen.add(key)
        prefix = f"{origin}: " if origin else ""
        lines.append(prefix + _line(model, key, location, detail["type"], detail))
    return lines


def _line(model: type[BaseModel], key: str, location: Sequence[str], kind: str, detail: Any) -> str:
    context = detail.get("ctx") or {}
    if kind == "extra_forbidden":
        parent = _model_at(model, location[:-1])
        known = list(parent.model_fields) if parent is not None else []
        hint = nearest(location[-1], known)
        if not hint and known:
            hint = f"; known here: {', '.join(known[:12])}{', …' if len(known) > 12 else ''}"
        return f"{key} is not a known key{hint}"
    if kind == "missing":
        return f"{key} is missing"
    if kind == "literal_error":
        return f"{key} must be one of {str(context['expected']).replace(' or ', ', ')}{_given(location, detail)}"
    if kind == "greater_than":
        return f"{key} must be more than {context['gt']:g}{_given(location, detail)}"
    if kind == "greater_than_equal":
        return f"{key} must be at least {context['ge']:g}{_given(location, detail)}"
    if kind == "less_than_equal":
        return f"{key} must be at most {context['le']:g}{_given(location, detail)}"
    if kind in ("value_error", "assertion_error"):
        # A check over a whole table has no key of its own; the top one has no key at all.
        return f"{key}: {context['error']}" if key else str(context["error"])
    if kind in _WANTED:
        return f"{key} {_WANTED[kind]}{_given(location, detail)}"
    return f"{key}: {detail['msg']}"


def _given(location: Sequence[str], detail: Any) -> str:
    given = detail.get("input")
    if not isinstance(given, (str, int, float, bool)) or any(part in _SECRET_KEYS for part in location):
        return ""
    shown = repr(given)
    return f", not {shown if len(shown) <= 80 else shown[:77] + '...'}"


def _location(model: type[BaseModel], raw: tuple[int | str, ...]) -> list[str]:
    """The keys of an error's location, without the names of validators that pydantic puts between them."""
    keys: list[str] = []
    for part in raw:
        text = str(part)
        parent = _model_at(model, keys)
        if parent is not None and text not in parent.model_fields and part != raw[-1]:
            continue
        if isinstance(part, str) and ("[" in text or text in ("float", "int", "str", "bool", "none")):
            continue
        keys.append(text)
    return keys


def _model_at(model: type[BaseModel], keys: Sequence[str]) -> type[BaseModel] | None:
    """The model of the table at `keys`, or `None` where there is a plain value or a table with free keys."""
    current: Any = model
    free = False
    for key in keys:
        if free:
            free = False
            continue
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            return None
        field = current.model_fields.get(key)
        if field is None:
            return None
        current, free = _table_of(field.annotation)
    if free or not (isinstance(current, type) and issubclass(current, BaseModel)):
        return None
    return current


def _table_of(annotation: Any) -> tuple[Any, bool]:
    """The model inside an annotation, and whether it is the value of a table with free keys."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for argument in get_args(annotation):
        found, free = _table_of(argument)
        if found is not None:
            return found, free or getattr(annotation, "__origin__", None) is dict
    return None, False


def _origin(location: Sequence[str], origins: Mapping[str, str]) -> str:
    for length in range(len(location), 0, -1):
        origin = origins.get(".".join(location[:length]))
        if origin is not None:
            return origin
    return ""
