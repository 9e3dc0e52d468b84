"""The layers of the configuration, and how they become one: flags over environment over file over defaults.

Each layer is a tree of plain values with the origin of every leaf, so that an error can say where the
value was written. Trees are merged key by key; an engine or a policy that a higher layer names is set
there and the others stay.

Environment variables are named after the key: `timeouts.head_seconds` is STOPGUARD_TIMEOUTS_HEAD_SECONDS;
the most used ones have a short name beside it. A variable that begins with STOPGUARD_ and means nothing is
a warning, not an error: Kubernetes sets variables of this form for a Service that is called stopguard.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from stopguard.config.models import Configuration
from stopguard.config.problems import InvalidConfiguration, explain
from stopguard.config.values import environment_name, parse_engine, parse_route_policy

__all__ = ["Loaded", "Setting", "load", "setting", "settings"]

_PREFIX = "STOPGUARD_"
_FILE_BYTES_MAX = 1024 * 1024
_NOT_SETTINGS = {"CONFIG", "DEBUG", "COLLECTOR", "HYPOTHESIS"}
_ENGINE_KEY = re.compile(r"ENGINES_([A-Z0-9_]+)_API_KEY")
_SERVICE_LINK = re.compile(r"(?:[A-Z0-9_]+_)?(?:SERVICE_(?:HOST|PORT(?:_\w+)?)|PORT(?:_\d+_(?:TCP|UDP|SCTP)\w*)?)")


class Loaded(NamedTuple):
    """A configuration, what is strange about it without being wrong, and the origin of each key that was set."""

    configuration: Configuration
    warnings: tuple[str, ...]
    origins: dict[str, str]


class Setting(NamedTuple):
    """One key: its path, its field, and its names in the environment (the short one first) and on the command line."""

    path: tuple[str, ...]
    field: FieldInfo
    variables: tuple[str, ...]
    flag: str

    @property
    def key(self) -> str:
        return ".".join(self.path)


def setting(key: str) -> Setting:
    """The setting with this dotted key; `KeyError` if there is none."""
    return _SETTINGS[key]


def settings(model: type[BaseModel] = Configuration, path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Every key with a fixed path, tables aside; a table with free keys (engines, tenants) is one setting."""
    for name, field in model.model_fields.items():
        inner = _inner_table(field.annotation)
        here = (*path, name)
        if inner is not None:
            yield from settings(inner, here)
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        long_name = _PREFIX + "_".join(here).upper()
        short_name = str(extra.get("variable") or long_name)
        yield Setting(here, field, tuple(dict.fromkeys((short_name, long_name))), str(extra.get("flag") or ""))


def load(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    need_engines: bool = True,
) -> Loaded:
    """Read all layers. `flags` maps dotted keys to values (or text, as in the environment), unset ones left out;
    its `engines` and `policies` are the lists of what was given with `--engine` and `--policy`.

    Raises `InvalidConfiguration` with everything that is wrong.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    warnings: list[str] = []
    if file is not None:
        _merge(tree, _read_file(file, problems), (), str(file), origins)
    _merge_environment(tree, environment or {}, origins, problems, warnings)
    _merge_flags(tree, flags or {}, origins, problems)
    _merge_engine_keys(tree, environment or {}, origins, warnings)
    if need_engines and not tree.get("engines") and not problems:
        problems.append(
            "there is no engine: give --engine KIND=URL (like --engine openai=http://127.0.0.1:8000), "
            "or an [engines.NAME] table in the file"
        )
    try:
        configuration = Configuration.model_validate(tree)
    except ValidationError as error:
        problems = explain(error, Configuration, origins) + problems
        raise InvalidConfiguration(problems) from None
    if problems:
        raise InvalidConfiguration(problems)
    return Loaded(configuration, tuple(warnings), origins)


# ---- the file ---------------------------------------------------------------------------------------------


def _read_file(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            data = stream.read(_FILE_BYTES_MAX + 1)
        if len(data) > _FILE_BYTES_MAX:
            problems.append(f"{file} is longer than {_FILE_BYTES_MAX} bytes: is it the right file?")
            return {}
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        problems.append(f"{file}: {error.strerror or error}")
    except UnicodeDecodeError:
        problems.append(f"{file} is not UTF-8 text")
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{file} is not TOML: {error}")
    return {}


# ---- the environment ------------------------------------------------------------------------------------------


def _merge_environment(
    tree: dict[str, Any],
    environment: Mapping[str, str],
    origins: dict[str, str],
    problems: list[str],
    warnings: list[str],
) -> None:
    for variable in sorted(name for name in environment if name.startswith(_PREFIX)):
        rest, text = variable.removeprefix(_PREFIX), environment[variable]
        known = _BY_VARIABLE.get(variable)
        if known is None:
            if rest not in _NOT_SETTINGS and not _ENGINE_KEY.fullmatch(rest) and not _SERVICE_LINK.fullmatch(rest):
                near = difflib.get_close_matches(variable, _BY_VARIABLE, n=1)
                hint = f": did you mean {near[0]}?" if near else ""
                warnings.append(f"the environment variable {variable} means nothing{hint}")
            continue
        short = known.variables[0]
        if variable != short and short in environment:
            problems.append(f"{variable} and {short} are the same setting: set one of them")
        elif known.key == "engines":
            _merge_engines(tree, _words(text), variable, origins, problems)
        elif known.key == "policies.routes":
            _merge_policies(tree, _words(text), variable, origins, problems)
        elif get_origin(known.field.annotation) is dict:
            problems.append(f"{variable}: {known.key} can only be set in a file")
        else:
            _set(tree, known.path, value_of(known.field.annotation, text), variable, origins)


def _merge_engine_keys(
    tree: dict[str, Any], environment: Mapping[str, str], origins: dict[str, str], warnings: list[str]
) -> None:
    """STOPGUARD_ENGINES_GPU_0_API_KEY is the key of the engine `gpu-0`, whichever layer named that engine."""
    entries = tree.get("engines")
    engines = {environment_name(str(name)): name for name in entries} if isinstance(entries, dict) else {}
    for variable in sorted(environment):
        match = _ENGINE_KEY.fullmatch(variable.removeprefix(_PREFIX)) if variable.startswith(_PREFIX) else None
        if match is None:
            continue
        name = engines.get(match[1])
        entry = entries[name] if name is not None and isinstance(entries, dict) else None
        if not isinstance(entry, dict):
            warnings.append(f"the environment variable {variable} means nothing: no engine has this name")
            continue
        for key in ("api_key", "api_key_file"):
            entry.pop(key, None)
        _set(tree, ("engines", str(name), "api_key_env"), variable, variable, origins)


def value_of(annotation: Any, text: str) -> Any:
    """`text` as the plain value that the file would have had; `text` itself where it does not fit."""
    kinds = set(_kinds(annotation))
    word = text.strip()
    if tuple in kinds:
        return _words(text)
    if bool in kinds and word.lower() in _BOOLEANS:
        return _BOOLEANS[word.lower()]
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(word)
            except ValueError:
                continue
    return word


_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False}


def _kinds(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for argument in get_args(annotation):
            yield from _kinds(argument)
    elif origin is tuple:
        yield tuple
    elif origin is Literal:
        yield str
    elif origin is not None and hasattr(annotation, "__metadata__"):
        yield from _kinds(get_args(annotation)[0])
    else:
        yield annotation


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


# ---- the flags ------------------------------------------------------------------------------------------------


def _merge_flags(tree: dict[str, Any], flags: Mapping[str, Any], origins: dict[str, str], problems: list[str]) -> None:
    for key, value in flags.items():
        if key == "engines":
            _merge_engines(tree, value, "--engine", origins, problems)
        elif key == "policies":
            _merge_policies(tree, value, "--policy", origins, problems)
        else:
            known = setting(key)
            plain = value_of(known.field.annotation, value) if isinstance(value, str) else value
            _set(tree, known.path, plain, known.flag or key, origins)


def _merge_engines(
    tree: dict[str, Any], texts: list[str], origin: str, origins: dict[str, str], problems: list[str]
) -> None:
    """Engines from one layer. Without a name the kind is the name, with a number when it is taken in this layer."""
    taken: set[str] = set()
    for text in texts:
        try:
            name, kind, url = parse_engine(text)
        except ValueError as error:
            problems.append(f"{origin}: {error}")
            continue
        if name in taken:
            problems.append(f"{origin}: two engines are called {name}")
            continue
        number = 2
        unnamed = not name
        name = name or kind
        while unnamed and name in taken:
            name, number = f"{kind}-{number}", number + 1
        taken.add(name)
        _merge(tree, {"engines": {name: {"kind": kind, "url": url}}}, (), origin, origins)


def _merge_policies(
    tree: dict[str, Any], texts: list[str], origin: str, origins: dict[str, str], problems: list[str]
) -> None:
    for text in texts:
        try:
            route, policy = parse_route_policy(text)
        except ValueError as error:
            problems.append(f"{origin}: {error}")
            continue
        path = ("policies", "routes", route) if route else ("policies", "default")
        _set(tree, path, policy, origin, origins)


# ---- trees ----------------------------------------------------------------------------------------------------


def _merge(
    tree: dict[str, Any], layer: Mapping[str, Any], path: tuple[str, ...], origin: str, origins: dict[str, str]
) -> None:
    for name, value in layer.items():
        here = (*path, name)
        present = tree.get(name)
        if isinstance(value, dict):
            origins.setdefault(".".join(here), origin)
            if not isinstance(present, dict):
                present = tree[name] = {}
            _merge(present, value, here, origin, origins)
        else:
            origins[".".join(here)] = origin
            tree[name] = value


def _set(tree: dict[str, Any], path: tuple[str, ...], value: Any, origin: str, origins: dict[str, str]) -> None:
    layer: dict[str, Any] = {path[-1]: value}
    for name in reversed(path[:-1]):
        layer = {name: layer}
    _merge(tree, layer, (), origin, origins)


def _inner_table(annotation: Any) -> type[BaseModel] | None:
    candidates = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


_SETTINGS: dict[str, Setting] = {one.key: one for one in settings()}
_BY_VARIABLE: dict[str, Setting] = {variable: one for one in _SETTINGS.values() for variable in one.variables}
