"""Write docs/configuration.md from the models in stopguard.config: keys, types, defaults, variables, flags."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stopguard.config import Address, ClassEntry, Configuration, EngineEntry, Tenant, format_policy
from stopguard.config.layers import setting
from stopguard.stops import ClientPolicy

PAGE = Path(__file__).parent / "configuration.md"

INTRODUCTION = """# Configuration

This page is generated from the code (`make docs`); a test fails when it is out of date.

Four layers, each over the next: **flags**, **environment**, **file** (`--config stopguard.toml`), **defaults**. They
are merged key by key. Engines and policies of all layers stand side by side; a higher layer replaces one by its name.

```
stopguard serve --engine openai=http://127.0.0.1:8000          # everything else by default
stopguard serve --config stopguard.toml --listen 0.0.0.0:8080  # a flag over the file
stopguard serve --config stopguard.toml --check                # every problem, one line each; starts nothing
```

- Unknown keys are refused, with the nearest known one. [examples/stopguard.toml](../examples/stopguard.toml) is a file
  to begin with.
- Environment variables are the key in capitals, with `_` for `.`: `timeouts.head_seconds` is
  `STOPGUARD_TIMEOUTS_HEAD_SECONDS`. Some have a short name too, shown below. Lists are separated by commas or spaces.
  A variable that begins with `STOPGUARD_` and means nothing is a warning, since Kubernetes sets such variables for a
  Service called `stopguard` (`enableServiceLinks: false` turns that off).
- `off` is how "there is none" is written, in TOML as text: `queue_seconds = "off"`.
- Paths are relative to the working directory.
- Secrets (`admin.token`, `api_key`, `key_password`) are never printed. Give a file or a variable rather than the value:
  `admin.token_file`, `api_key_env`, `api_key_file`. The key of the engine `gpu-0` may also come as
  `STOPGUARD_ENGINES_GPU_0_API_KEY`.
- Other variables: `STOPGUARD_CONFIG` (the file), `STOPGUARD_DEBUG=1` (tracebacks).
"""

ENGINES = """
On the command line: `--engine KIND=URL` or `--engine NAME:KIND=URL`, several times. Without a name the kind is the
name (`openai`, then `openai-2`, …). `STOPGUARD_ENGINES` takes the same, separated by commas. Kinds other than `openai`
come from adapter packages ([adapters/README.md](../adapters/README.md)).
"""

POLICIES = """
On the command line: `--policy POLICY` is the default, `--policy ROUTE=POLICY` is for a route; several times.
"""


CLASSES = """
Without any such table there are `background` (urgency -10), `standard` (0) and `urgent` (10, preempts, not
preemptible).
"""


def page() -> str:
    """The whole text of docs/configuration.md."""
    parts = [INTRODUCTION, _top()]
    for name, field in Configuration.model_fields.items():
        model = _model_of(field.annotation)
        if name == "engines":
            parts.append(_section("[engines.NAME]", EngineEntry, "engines", fixed=False) + ENGINES)
        elif model is not None:
            parts.append(_section(f"[{name}]", model, name))
        if name == "policies":
            parts.append(POLICIES)
            parts.append(_section("[policies.tenants.NAME]", Tenant, "policies.tenants", fixed=False))
        if name == "preemption":
            parts.append(_section("[preemption.classes.NAME]", ClassEntry, "preemption.classes", fixed=False) + CLASSES)
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _top() -> str:
    fields = {
        name: field
        for name, field in Configuration.model_fields.items()
        if _model_of(field.annotation) is None and name != "engines"
    }
    return "## At the top of the file\n\n" + _table(fields, "", fixed=True)


def _section(title: str, model: type[BaseModel], path: str, *, fixed: bool = True) -> str:
    plain, inner = {}, []
    for name, field in model.model_fields.items():
        found = _model_of(field.annotation)
        if found is None:
            plain[name] = field
        else:
            inner.append((name, found))
    text = f"## {title}\n\n{_one_line(model.__doc__)}\n\n{_table(plain, path, fixed=fixed)}"
    for name, found in inner:
        text += "\n" + _section(f"{title[:-1]}.{name}]", found, f"{path}.{name}", fixed=fixed).replace("## ", "### ", 1)
    return text


def _table(fields: dict[str, FieldInfo], path: str, *, fixed: bool) -> str:
    names = " | variable, flag |" if fixed else " |"
    lines = [f"| key | type | default | what it does{names}", "|---|---|---|---|" + ("---|" if fixed else "")]
    for name, field in fields.items():
        if name in ("tenants", "classes"):
            continue
        cells = [f"`{name}`", _type(field), _default(field), _cell(field.description or "")]
        if fixed:
            cells.append(_names(f"{path}.{name}".lstrip(".")))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _names(key: str) -> str:
    one = setting(key)
    short = [f"`{variable}`" for variable in one.variables[: len(one.variables) - 1 or None]]
    # The long name follows from the key; only what does not follow is worth a column.
    names = short if len(one.variables) > 1 else []
    return ", ".join(names + ([f"`{one.flag}`"] if one.flag else []))


def _type(field: FieldInfo) -> str:
    words = list(dict.fromkeys(_words(field.annotation)))
    if not _takes_off(field.metadata, field.annotation):
        words = [word for word in words if word != "`off`" or get_origin(field.annotation) is Literal]
    text = " or ".join(words)
    limits = [text_of for item in field.metadata if (text_of := _limit(item))]
    return _cell(", ".join([text, *limits]))


def _words(annotation: Any) -> list[str]:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return [word for argument in get_args(annotation) for word in _words(argument)]
    if origin is Literal:
        return [f"`{value}`" for value in get_args(annotation)]
    if origin is tuple:
        return ["list of " + " or ".join(dict.fromkeys(_words(get_args(annotation)[0])))]
    if origin is dict:
        return ["table of " + " or ".join(dict.fromkeys(_words(get_args(annotation)[1])))]
    if hasattr(annotation, "__metadata__"):
        return _words(get_args(annotation)[0])
    plain = {
        bool: "true, false",
        int: "whole number",
        float: "number",
        str: "text",
        Path: "path",
        Address: "address",
        ClientPolicy: "policy",
        SecretStr: "secret",
        type(None): "`off`",
    }
    return [plain[annotation]]


def _limit(item: Any) -> str:
    for attribute, word in (("gt", "above"), ("ge", "at least")):
        if (value := getattr(item, attribute, None)) is not None:
            return f"{word} {value:g}"
    return ""


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "`off`" if _takes_off(field.metadata, field.annotation) else "none"
    if value in ({}, (), ""):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, ClientPolicy):
        return f"`{format_policy(value)}`"
    if isinstance(value, tuple) and not isinstance(value, Address):
        return ", ".join(f"`{one}`" for one in value)
    return f"`{int(value) if isinstance(value, float) and value.is_integer() else value}`"


def _takes_off(metadata: Iterable[Any], annotation: Any) -> bool:
    """Whether `off` may be written. A setting that is merely absent by default takes none."""
    if any(getattr(getattr(item, "func", None), "__name__", "") == "_off_is_none" for item in metadata):
        return True
    arguments = get_args(annotation)
    return any(_takes_off(getattr(argument, "__metadata__", ()), argument) for argument in arguments)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return re.sub(r"\|", r"\\|", _one_line(text))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
