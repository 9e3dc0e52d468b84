"""What every table of the configuration is made of: its base class, and the types of its values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Count", "Seconds", "Section", "Share", "names"]

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


def names(*, variable: str = "", flag: str = "") -> dict[str, Any]:
    """The short names of a setting: its environment variable, where it is not the long one, and its flag."""
    return {"variable": variable, "flag": flag}


class Section(BaseModel):
    """A table of the configuration: strict, closed, and immutable once it is read."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True, hide_input_in_errors=True
    )
