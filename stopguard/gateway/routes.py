"""Routes: which API a path belongs to, and what a request's body says about it.

Every path goes through the same relay under the same rule. The kind only decides the shape of what
StopGuard itself says to a client (a terminal event, an error body) and which policy applies; an unknown
path is passed on as ``other``.
"""

from __future__ import annotations

import enum
import re
from hashlib import sha256

import msgspec

from stopguard.gateway.settings import Policies
from stopguard.stops import ClientPolicy

__all__ = ["BodyFacts", "RouteKind", "key_digest", "kind_of", "policy_for", "read_facts"]


class RouteKind(enum.StrEnum):
    """The API that a path belongs to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    AUDIO = "audio"
    NATIVE = "native"
    """An engine's own way to generate."""
    OTHER = "other"


_KINDS: dict[str, RouteKind] = {
    "/v1/chat/completions": RouteKind.CHAT,
    "/chat/completions": RouteKind.CHAT,
    "/v1/completions": RouteKind.COMPLETIONS,
    "/v1/responses": RouteKind.RESPONSES,
    "/v1/messages": RouteKind.MESSAGES,
    "/v1/embeddings": RouteKind.EMBEDDINGS,
    "/embeddings": RouteKind.EMBEDDINGS,
    "/embedding": RouteKind.EMBEDDINGS,
    "/pooling": RouteKind.EMBEDDINGS,
    "/classify": RouteKind.EMBEDDINGS,
    "/encode": RouteKind.EMBEDDINGS,
    "/v1/rerank": RouteKind.RERANK,
    "/v2/rerank": RouteKind.RERANK,
    "/rerank": RouteKind.RERANK,
    "/reranking": RouteKind.RERANK,
    "/score": RouteKind.RERANK,
    "/v1/score": RouteKind.RERANK,
    "/v1/audio/transcriptions": RouteKind.AUDIO,
    "/v1/audio/translations": RouteKind.AUDIO,
    "/v1/audio/speech": RouteKind.AUDIO,
    "/generate": RouteKind.NATIVE,
    "/completion": RouteKind.NATIVE,
    "/completions": RouteKind.NATIVE,
    "/infill": RouteKind.NATIVE,
    "/inference/v1/generate": RouteKind.NATIVE,
}


def kind_of(path: str) -> RouteKind:
    """The API that `path` (without its query) belongs to."""
    return _KINDS.get(path, RouteKind.OTHER)


class BodyFacts(msgspec.Struct, gc=False):
    """What the gateway wants to know of a body; everything else stays unread."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    best_of: int | None = None

    @property
    def choices(self) -> int:
        """How many answers were asked for, 1 to 128."""
        return min(max(self.n or 1, 1), 128)


_NO_FACTS = BodyFacts()
_facts_decoder = msgspec.json.Decoder(BodyFacts)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FORM_MODEL = re.compile(rb'name="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')


def read_facts(body: bytes, content_type: bytes) -> BodyFacts:
    """The facts in `body`. What cannot be read is left out: judging the body is the engine's task."""
    if not body:
        return _NO_FACTS
    if content_type[:19].lower() == b"multipart/form-data":
        return _form_facts(body)
    try:
        return _facts_decoder.decode(body)
    except msgspec.ValidationError:
        return _lenient_facts(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _NO_FACTS


def _lenient_facts(body: bytes) -> BodyFacts:
    """Field by field, where one field of an unexpected type must not hide the others."""
    try:
        fields = _fields_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _NO_FACTS
    facts = BodyFacts()
    for name, wanted in (("model", str), ("stream", bool), ("n", int), ("best_of", int)):
        if name in fields:
            try:
                setattr(facts, name, msgspec.json.decode(fields[name], type=wanted))
            except msgspec.DecodeError:
                continue
    return facts


def _form_facts(body: bytes) -> BodyFacts:
    """The model of a multipart upload; the audio in it is only searched for the field's own head."""
    match = _FORM_MODEL.search(body)
    if match is None:
        return _NO_FACTS
    try:
        return BodyFacts(model=match[1].decode())
    except UnicodeDecodeError:
        return _NO_FACTS


def key_digest(credential: bytes) -> str:
    """The SHA-256 of an API key in hexadecimal: what identifies a tenant, here and in the configuration."""
    return sha256(credential).hexdigest()


def policy_for(policies: Policies, path: str, kind: RouteKind, digest: str) -> ClientPolicy:
    """What happens when the client of such a request leaves."""
    if policies.by_key and (policy := policies.by_key.get(digest)) is not None:
        return policy
    by_route = policies.by_route
    if by_route:
        policy = by_route.get(path) or by_route.get(kind.value)
        if policy is not None:
            return policy
    return policies.default
