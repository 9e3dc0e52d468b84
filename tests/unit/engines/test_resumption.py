"""The dialects: what each kind of engine is sent, and how its chunks are read. The chunks are real ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from stopguard.engines import OpenAIEngine
from stopguard.engines.resumption import Ask, AskKind, EngineUsage, Resumption, UnreadableChunk
from stopguard_llamacpp.resumption import RESUMPTION as LLAMACPP
from stopguard_refengine.resumption import RESUMPTION as REFERENCE
from stopguard_sglang.resumption import RESUMPTION as SGLANG
from stopguard_vllm.resumption import RESUMPTION as VLLM

BASE: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0}
ALL = (LLAMACPP, REFERENCE, SGLANG, VLLM)


def chat(**fields: Any) -> Ask:
    messages = [{"role": "user", "content": "hi"}]
    return Ask(kind=AskKind.CHAT, path="/v1/chat/completions", fields={**BASE, "messages": messages, **fields})


def text(**fields: Any) -> Ask:
    return Ask(kind=AskKind.COMPLETIONS, path="/v1/completions", fields={**BASE, "prompt": "hi", **fields})


def encoded(event: Any) -> bytes:
    return json.dumps(event).encode()


@pytest.mark.parametrize("resumption", ALL)
def test_each_is_a_resumption(resumption: Resumption) -> None:
    assert isinstance(resumption, Resumption)
    assert resumption.family


@pytest.mark.parametrize("resumption", ALL)
@pytest.mark.parametrize("data", [b"nonsense", b"[]", b"\xff"])
def test_what_is_no_chunk_is_said_to_be_unreadable(resumption: Resumption, data: bytes) -> None:
    for reader in (resumption.first_reader(chat()), resumption.resume_reader(text())):
        with pytest.raises(UnreadableChunk):
            reader.read(data)


# ---- vLLM 0.32.0 ---------------------------------------------------------------------------------------


def test_vllm_asks_for_ids_and_goes_on_with_them() -> None:
    ask = chat(max_tokens=10, min_tokens=4, seed=3, user="u", stream_options={"include_usage": True}, top_p=0.9)
    first = VLLM.first(ask, None)
    assert (first.path, first.body) == ("/v1/chat/completions", {**ask.fields, "return_token_ids": True})
    resumed = VLLM.resume(ask, [1, 2], [3, 4, 5])
    assert resumed.path == "/v1/completions"
    assert resumed.body == {
        "model": "m",
        "temperature": 0,
        "top_p": 0.9,
        "seed": 3,
        "user": "u",
        "min_tokens": 1,
        "prompt": [1, 2, 3, 4, 5],
        "max_tokens": 7,
        "add_special_tokens": False,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("ask", "rest"),
    [(chat(), None), (text(), 13), (text(max_tokens=None), None), (text(max_tokens=2), 1), (chat(max_tokens=4), 1)],
)
def test_vllm_gets_the_rest_of_the_limit(ask: Ask, rest: int | None) -> None:
    assert VLLM.resume(ask, [1], [2, 3, 4]).body["max_tokens"] == rest


def test_vllm_chunks() -> None:
    reader = VLLM.first_reader(chat())
    (opening,) = reader.read(
        b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[{"index":0,"delta":'
        b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":[3,77],'
        b'"prompt_text":null}'
    )
    assert opening.opening
    assert opening.prompt_ids == [3, 77]
    assert opening.event is not None
    assert opening.event["prompt_token_ids"] is None
    (token,) = reader.read(
        b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[{"index":0,"delta":'
        b'{"content":"32"},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[1331]}]}'
    )
    assert (list(token.token_ids), token.text, token.finish_reason) == ([1331], "32", "length")
    assert token.stop_detail == {"stop_reason": None}
    assert token.event is not None
    assert token.event["choices"][0]["token_ids"] is None
    (usage,) = reader.read(
        b'{"id":"1","choices":[],"usage":{"prompt_tokens":5,"total_tokens":8,"completion_tokens":3}}'
    )
    assert usage.usage == EngineUsage(prompt_tokens=5, completion_tokens=3)


def test_vllm_leaves_the_ids_to_a_client_that_asked_for_them() -> None:
    (token,) = VLLM.first_reader(chat(return_token_ids=True)).read(
        encoded({"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [4]}]})
    )
    assert token.event is not None
    assert token.event["choices"][0]["token_ids"] == [4]


def test_vllm_log_probabilities_of_a_chat_come_from_completions() -> None:
    ask = chat(logprobs=True)
    assert VLLM.resume(ask, [1], []).body["logprobs"] == 0
    columns = {"text_offset": [0], "token_logprobs": [-1.5], "tokens": [" é"], "top_logprobs": [{" é": -1.5}]}
    (piece,) = VLLM.resume_reader(ask).read(
        encoded({"choices": [{"index": 0, "text": " é", "logprobs": columns, "token_ids": [9]}]})
    )
    assert piece.logprobs == [{"token": " é", "logprob": -1.5, "bytes": [32, 195, 169], "top_logprobs": []}]


def test_an_error_in_the_stream_and_a_parsers_output_are_noticed() -> None:
    reader = VLLM.first_reader(chat())
    (failed,) = reader.read(encoded({"error": {"message": "EngineCore died", "code": 500}}))
    assert failed.error == "EngineCore died"
    (thought,) = reader.read(encoded({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}))
    assert thought.unresumable
    with pytest.raises(UnreadableChunk):
        reader.read(encoded({"choices": [{"index": 1, "delta": {"content": "x"}}]}))


# ---- SGLang 0.5.23 -------------------------------------------------------------------------------------


def test_sglang_runs_a_chat_as_a_completion_and_gives_it_a_chats_form() -> None:
    ask = chat(max_tokens=10)
    assert SGLANG.prepares
    first = SGLANG.first(ask, [1, 2])
    assert first.path == "/v1/completions"
    assert (first.body["prompt"], first.body["max_tokens"], first.body["return_token_ids"]) == ([1, 2], 10, True)
    assert "messages" not in first.body
    reader = SGLANG.first_reader(ask)
    head = {"id": "r", "object": "text_completion", "created": 7, "model": "m"}
    choice = {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length", "matched_stop": None}
    pieces = reader.read(encoded({**head, "choices": [{**choice, "token_ids": [5], "prompt_token_ids": [1, 2]}]}))
    assert [piece.opening for piece in pieces] == [True, False, False]
    events = [piece.event for piece in pieces]
    assert all(event is not None and event["object"] == "chat.completion.chunk" for event in events)
    deltas = [event["choices"][0]["delta"] for event in events if event is not None]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "ab"}, {}]
    assert [piece.finish_reason for piece in pieces] == [None, None, "length"]
    assert list(pieces[1].token_ids) == [5]
    (usage,) = reader.read(encoded({**head, "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}))
    assert usage.event is not None
    assert usage.event["object"] == "chat.completion.chunk"


def test_sglang_chunks_without_text_show_nothing() -> None:
    reader = SGLANG.first_reader(chat(max_tokens=3))
    event = {"choices": [{"index": 0, "text": "", "finish_reason": None, "token_ids": [5]}]}
    opening, held = reader.read(encoded(event))
    assert opening.opening
    assert held.event is None
    assert list(held.token_ids) == [5]


# ---- llama.cpp, xllamacpp 2026.10.11549 --------------------------------------------------------------


def test_llamacpp_ids_come_with_log_probabilities_that_nobody_sees() -> None:
    ask = chat(max_tokens=9)
    body = LLAMACPP.first(ask, None).body
    assert (body["logprobs"], body["top_logprobs"], body["timings_per_token"]) == (True, 1, True)
    reader = LLAMACPP.first_reader(ask)
    (piece,) = reader.read(
        b'{"choices":[{"finish_reason":null,"index":0,"delta":{"content":"\xc3\xa9"},"logprobs":{"content":[{"id":169,'
        b'"token":"x","bytes":[169],"logprob":-0.5,"top_logprobs":[]}]}}],"created":1,"id":"c","model":"t",'
        b'"system_fingerprint":"b0","object":"chat.completion.chunk","timings":{"cache_n":0,"predicted_n":27}}'
    )
    assert (list(piece.token_ids), piece.text, piece.position) == ([169], "é", 27)
    assert piece.event is not None
    assert "timings" not in piece.event
    assert "logprobs" not in piece.event["choices"][0]


def test_llamacpp_goes_on_in_its_own_words() -> None:
    ask = text(max_tokens=9, top_k=1, repeat_penalty=1.1, stop=None)
    resumed = LLAMACPP.resume(ask, [1, 2], [3])
    assert resumed.path == "/completion"
    assert resumed.body == {
        "temperature": 0,
        "top_k": 1,
        "repeat_penalty": 1.1,
        "prompt": [1, 2, 3],
        "n_predict": 8,
        "return_tokens": True,
        "stream": True,
    }
    assert LLAMACPP.resume(text(), [1], [2]).body["n_predict"] == -1
    reader = LLAMACPP.resume_reader(ask)
    (token,) = reader.read(
        b'{"index":0,"content":"\xc3\xa9","tokens":[169],"stop":false,"id_slot":-1,"tokens_predicted":2,'
        b'"tokens_evaluated":3}'
    )
    assert (list(token.token_ids), token.text, token.position) == ([169], "é", 2)
    (end,) = reader.read(
        encoded(
            {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": "limit", "tokens_predicted": 8,
             "tokens_evaluated": 3, "timings": {"cache_n": 2}}
        )
    )  # fmt: skip
    assert end.finish_reason == "length"
    assert end.usage == EngineUsage(prompt_tokens=3, completion_tokens=8, cached_tokens=2)
    assert end.shows_usage


class Server:
    """An engine's control side; answers by path."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Any]] = []

    def engine(self) -> OpenAIEngine:
        return OpenAIEngine("engine", "http://engine.test", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json=self.answers[request.url.path])


def test_llamacpp_asks_for_the_prompt_and_for_what_a_stream_left_out() -> None:
    async def main() -> None:
        answers = {
            "/apply-template": {"prompt": "<user>hi"},
            "/tokenize": {"tokens": [4, 5]},
            "/completion": {"content": "é", "tokens": [195, 169, 7]},
        }
        server = Server(answers)
        engine = server.engine()
        assert await LLAMACPP.prompt_ids(engine, chat()) == [4, 5]
        assert server.asked[1] == ("/tokenize", {"content": "<user>hi", "add_special": True, "parse_special": True})
        assert await LLAMACPP.prompt_ids(engine, text(prompt=[8, 9])) == [8, 9]
        assert await LLAMACPP.unreported(engine, chat(max_tokens=50), [4, 5, 6], 2) == [195, 169]
        assert server.asked[-1][1] == {
            "temperature": 0,
            "prompt": [4, 5, 6],
            "n_predict": 2,
            "return_tokens": True,
            "stream": False,
        }
        with pytest.raises(UnreadableChunk):
            await LLAMACPP.unreported(engine, chat(), [4], 4)
        await engine.aclose()

    asyncio.run(main())


def test_sglang_asks_for_the_ids_of_a_chat() -> None:
    async def main() -> None:
        server = Server({"/v1/tokenize": {"tokens": [1, 2], "count": 2}})
        engine = server.engine()
        assert await SGLANG.prompt_ids(engine, chat(max_tokens=3)) == [1, 2]
        path, body = server.asked[0]
        assert (path, sorted(body)) == ("/v1/tokenize", ["messages", "model"])
        assert await SGLANG.prompt_ids(engine, text()) == ()
        server.answers["/v1/tokenize"] = {"tokens": []}
        with pytest.raises(UnreadableChunk):
            await SGLANG.prompt_ids(engine, chat(max_tokens=3))
        await engine.aclose()

    asyncio.run(main())
