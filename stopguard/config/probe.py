"""The table `[probe]`: where probes inside engines report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from stopguard.config.fields import Seconds, Section, names
from stopguard.errors import ConfigurationError
from stopguard.probe.sender import parse_address
from stopguard.probe.wire import TOKEN_CHARACTERS_MIN

__all__ = ["ProbeEntry"]


def _addresses(value: Any) -> Any:
    if isinstance(value, str):
        return () if value == "off" else (value,)
    return tuple(value) if isinstance(value, list) else value


def _address(text: str) -> str:
    try:
        parse_address(text)
    except ConfigurationError as error:
        raise ValueError(str(error)) from None
    return text


_FilePath = Annotated[Path, BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value)]


class ProbeEntry(Section):
    """Probes inside engines: where they report, and the token that both sides know. See docs/probe.md."""

    listen: Annotated[tuple[Annotated[str, AfterValidator(_address)], ...], BeforeValidator(_addresses)] = Field(
        default=(),
        max_length=16,
        description="Where to listen: the path of a Unix socket or `tcp://HOST:PORT`, one or a list. Empty: nowhere.",
        json_schema_extra=names(flag="--probe"),
    )
    token: SecretStr | None = Field(
        default=None,
        description="What engines have in the same variable.",
        json_schema_extra=names(variable="STOPGUARD_COLLECTOR_TOKEN"),
    )
    token_file: _FilePath | None = Field(
        default=None, description="A file with the token, better than writing it here."
    )
    gone_seconds: Seconds = Field(
        default=5.0, description="How long a probe may be away before its requests are judged without it."
    )

    @model_validator(mode="after")
    def _only_with_a_token(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("give token or token_file, not both")
        if self.token is not None and len(self.token.get_secret_value()) < TOKEN_CHARACTERS_MIN:
            raise ValueError(f"the token is shorter than {TOKEN_CHARACTERS_MIN} characters: try `openssl rand -hex 32`")
        if self.listen and self.token is None and self.token_file is None:
            raise ValueError(
                "probes are listened for without a token: set STOPGUARD_COLLECTOR_TOKEN or probe.token_file, "
                "and the same token in the engines' STOPGUARD_COLLECTOR_TOKEN"
            )
        return self
