"""The OpenAI routes, in virtual time, for every style."""

from __future__ import annotations

from typing import Any

import pytest

from stopguard.refengine.model import BOS, decode, encode
from tests.unit.refengine_http.helpers import (
    CHAT,
    COMPLETIONS,
    POLICIES,
    all_ended,
    any_ended,
    assert_settled,
    chat,
    completion,
    server,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("policy", POLICIES)
async def test_chat_streamed_and_whole_say_the_same(policy: str) -> None:
    async with server(policy) as virtual:
        whole = await virtual.fetch("POST", CHAT, chat(24))
        assert whole.status == 200
        answer = whole.json()
        streamed = await virtual.fetch("POST", CHAT, chat(24, stream=True, stream_options={"include_usage": True}))
        events = streamed.events
        assert events[-1] == "[DONE]"
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert streamed.text() == answer["choices"][0]["message"]["content"] != ""
        reasons = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["length"]
        assert events[-2]["choices"] == []
        usage = events[-2]["usage"]
        assert usage["completion_tokens"] == 24
        assert usage["total_tokens"] == usage["prompt_tokens"] + 24
        assert {**answer["usage"], "prompt_tokens_details": None} == {**usage, "prompt_tokens_details": None}
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0, "the second run finds the first one's prefix"
        await assert_settled(virtual)


@pytest.mark.parametrize("policy", POLICIES)
async def test_n_choices_differ_and_are_numbered(policy: str) -> None:
    async with server(policy) as virtual:
        whole = (await virtual.fetch("POST", CHAT, chat(16, n=3))).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in whole["choices"]]
        assert len(set(texts)) == 3
        assert whole["usage"]["completion_tokens"] == 48
        streamed = await virtual.fetch("POST", CHAT, chat(16, n=3, stream=True))
        assert [streamed.text(index) for index in range(3)] == texts
        await assert_settled(virtual)


@pytest.mark.parametrize("policy", POLICIES)
async def test_completions_take_text_ids_and_lists(policy: str) -> None:
    async with server(policy) as virtual:
        text = "the river and the stone"
        one = (await virtual.fetch("POST", COMPLETIONS, {"prompt": text, "max_tokens": 6})).json()
        ids = [BOS, *encode(text)]
        same = (await virtual.fetch("POST", COMPLETIONS, {"prompt": ids, "max_tokens": 6})).json()
        assert one["choices"][0]["text"] == same["choices"][0]["text"]
        assert one["usage"]["prompt_tokens"] == len(ids)
        both = (await virtual.fetch("POST", COMPLETIONS, {"prompt": [text, "a song"], "max_tokens": 6, "n": 2})).json()
        assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
        assert both["choices"][0]["text"] == one["choices"][0]["text"] != both["choices"][2]["text"]
        assert both["usage"]["completion_tokens"] == 24
        lists = (await virtual.fetch("POST", COMPLETIONS, {"prompt": [ids, ids], "max_tokens": 6})).json()
        assert {choice["text"] for choice in lists["choices"]} == {one["choices"][0]["text"]}
        await assert_settled(virtual)


async def test_defaults_and_stop_strings() -> None:
    async with server("vllm", max_model_tokens=400) as virtual:
        assert (await virtual.fetch("POST", COMPLETIONS, {"prompt": "the"})).json()["usage"]["completion_tokens"] == 16
        full = (await virtual.fetch("POST", COMPLETIONS, {"prompt": "the", "max_tokens": 60})).json()
        text = full["choices"][0]["text"]
        word = text.split()[5]
        for stream in (False, True):
            body = {"prompt": "the", "max_tokens": 60, "stop": [word], "stream": stream}
            stopped = await virtual.fetch("POST", COMPLETIONS, body)
            said = stopped.text() if stream else stopped.json()["choices"][0]["text"]
            assert said == text[: text.index(word)]
        capped = (await virtual.fetch("POST", CHAT, {"messages": [{"role": "user", "content": "hi"}]})).json()
        assert capped["usage"]["completion_tokens"] == 256
        assert capped["choices"][0]["finish_reason"] == "length"


async def test_token_ids_resume_exactly_where_a_stream_was_cut() -> None:
    async with server("vllm") as virtual:
        body = completion(40, stream=True, return_token_ids=True)
        whole = await virtual.fetch("POST", COMPLETIONS, body)
        events = [event["choices"][0] for event in whole.events[:-1]]
        prompt, tokens = events[0]["prompt_token_ids"], [token for event in events for token in event["token_ids"]]
        assert decode(prompt[1:]) == body["prompt"]
        assert len(tokens) == 40
        again = {**body, "prompt": prompt + tokens[:13], "max_tokens": 27, "add_special_tokens": False}
        rest = [event["choices"][0] for event in (await virtual.fetch("POST", COMPLETIONS, again)).events[:-1]]
        assert [token for event in rest for token in event["token_ids"]] == tokens[13:]
        streamed = await virtual.fetch("POST", CHAT, chat(9, stream=True, return_token_ids=True))
        assert streamed.events[0]["prompt_token_ids"][0] == BOS
        whole_chat = (await virtual.fetch("POST", CHAT, chat(9, return_token_ids=True))).json()
        assert len(whole_chat["choices"][0]["token_ids"]) == 9


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (chat(200, model="base:poet"), "lora"),
        (chat(200, response_format={"type": "json_object"}), "grammar"),
        (chat(200, refengine={"speculative": True}), "speculative"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "what is this"},
                            {"type": "image_url", "image_url": {"url": "data:,"}},
                        ],
                    }
                ],
                "max_tokens": 200,
            },
            "encoder",
        ),
    ],
)
async def test_slots_are_taken_and_given_back(body: dict[str, Any], kind: str) -> None:
    async with server("vllm") as virtual:
        exchange = await virtual.open("POST", CHAT, body)
        await virtual.run_until(lambda: any(kind in view.slots for view in virtual.snapshot().requests))
        await exchange.disconnect()
        await assert_settled(virtual)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b'{"messages": []}', 400, "messages"),
        (b'{"messages": [{"role": "user"}], "n": 0}', 400, "n must"),
        (b'{"messages": [{"role": "user"}], "max_tokens": true}', 400, "max_tokens"),
        (b'{"messages": [{"role": "user"}], "stop": 3}', 400, "stop"),
        (b'{"messages": [{"role": "user"}], "model": "other"}', 404, "other"),
        (b'{"messages": [{"role": "user", "content": 5}]}', 400, "content"),
    ],
)
async def test_bad_bodies_get_the_style_s_error(policy: str, body: bytes, status: int, word: str) -> None:
    async with server(policy) as virtual:
        exchange = await virtual.fetch("POST", CHAT, body=body)
        assert exchange.status == status
        assert word in exchange.body.decode()
        answer = exchange.json()
        match policy:
            case "vllm" | "llamacpp":
                assert answer["error"]["code"] == status
            case "sglang" | "trtllm":
                assert answer["object"] == "error"
                assert answer["code"] == status
            case _:
                assert isinstance(answer["error"], str)
        await assert_settled(virtual)


async def test_too_long_a_request_is_rejected_or_cut() -> None:
    async with server("vllm") as virtual:
        assert (await virtual.fetch("POST", CHAT, chat(5000))).status == 400
        assert (await virtual.fetch("POST", COMPLETIONS, {"prompt": [999_999]})).status == 400
        assert (await virtual.fetch("POST", COMPLETIONS, {"prompt": []})).status == 400
        twice = {"prompt": ["a", ["b", "c"] * 400], "max_tokens": 2}
        assert (await virtual.fetch("POST", COMPLETIONS, twice)).status == 400
        await assert_settled(virtual)
    async with server("llamacpp") as virtual:
        cut = (await virtual.fetch("POST", CHAT, chat(5000))).json()
        assert cut["usage"]["total_tokens"] == 900


async def test_one_rejected_prompt_takes_the_others_back() -> None:
    async with server("vllm") as virtual:
        long = " the" * 890
        exchange = await virtual.fetch("POST", COMPLETIONS, {"prompt": ["short", long], "max_tokens": 50})
        assert exchange.status == 400
        await assert_settled(virtual)
        assert virtual.engine.gauges().aborts_total == 1


async def test_the_same_seed_gives_the_same_bytes() -> None:
    bodies = []
    for _ in range(2):
        async with server("sglang") as virtual:
            exchanges = [await virtual.open("POST", CHAT, chat(10 + index, stream=True)) for index in range(4)]
            await virtual.run_until(all_ended(exchanges))
            bodies.append([exchange.body for exchange in exchanges])
    assert bodies[0] == bodies[1]


async def test_priority_has_the_engine_s_own_sign() -> None:
    for policy, urgent in (("vllm", -5), ("sglang", 5)):
        async with server(policy, max_running=1) as virtual:
            await virtual.open("POST", CHAT, chat(30))
            await virtual.advance(0.02)
            late = [await virtual.open("POST", CHAT, chat(4, priority=level)) for level in (0, urgent)]
            await virtual.run_until(any_ended(late))
            assert [exchange.ended for exchange in late] == [False, True], policy


async def test_headers_go_out_when_the_real_server_sends_them() -> None:
    for policy, early in (("vllm", True), ("sglang", False), ("llamacpp", False), ("trtllm", True)):
        async with server(policy) as virtual:
            exchange = await virtual.open("POST", CHAT, chat(4, stream=True))
            assert (exchange.status == 200) is early, policy
            await virtual.run_until(all_ended([exchange]))
            assert exchange.complete
