"""Anthropic's bodies as conversations, and deltas as both APIs' events."""

import json
from typing import Any

import pytest

from engine.answer import Transcript
from engine.api import ApiError, Reply, Usage, decode
from engine.chat import k3_segments
from engine.messages import CountRequest, MessagesReply, MessagesRequest
from engine.parser import Delta

WEATHER = {"name": "get_weather", "description": "Now.", "input_schema": {"properties": {"city": {"type": "string"}}}}
RESULT = {
    "type": "tool_result",
    "tool_use_id": "toolu_1",
    "content": [{"type": "text", "text": "no"}],
    "is_error": True,
}
IMAGE = {"type": "image", "source": {}}


def body(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]} | fields).encode()


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def test_conversation() -> None:
    said = [
        {"type": "thinking", "thinking": "Ask.", "signature": "x"},
        {"type": "redacted_thinking", "data": "y"},
        {"type": "text", "text": "Checking."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}},
    ]
    messages = [
        *user({"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}),
        {"role": "assistant", "content": said},
        *user(RESULT, {"type": "text", "text": "And now?"}),
    ]
    system = [{"type": "text", "text": "Be brief."}]
    request = decode(body(messages=messages, system=system, tools=[WEATHER]), MessagesRequest)
    assert request.conversation() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Checking.",
            "reasoning_content": "Ask.",
            "tool_calls": [{"id": "toolu_1", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no"},
        {"role": "user", "content": "And now?"},
    ]
    text = "".join(text for text, _ in k3_segments(request.conversation(), request.frame()))
    assert 'role="tool" tool="get_weather" index="1"' in text and '"type":"object"' in text


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"messages": user(IMAGE)}, r"content\[0\] is a 'image' block"),
        ({"messages": user({"type": "tool_use", "id": "a"})}, "'tool_use' block that user"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot', want user or assistant"),
        ({"messages": [{"role": "user", "content": 3}]}, "of type 'int', want text"),
        ({"tools": [{}]}, r"tools\[0\].name is missing"),
        ({"tool_choice": {"type": "any"}}, "cannot force a call"),
        ({"max_tokens": 0}, "max_tokens: Expected `int` >= 1"),
        ({"system": 3}, "system: Expected"),
    ],
)
def test_refusals(fields: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ApiError, match=wanted) as refused:
        request = decode(body(**fields), MessagesRequest)
        request.conversation(), request.frame()
    assert refused.value.status == 400


def test_count_tokens_needs_no_max_tokens() -> None:
    assert decode(b'{"messages": [{"role": "user", "content": "x"}]}', CountRequest).frame().thinking
    assert not decode(body(thinking={"type": "disabled"}), MessagesRequest).frame().thinking


DELTAS = [
    Delta("reasoning", "Hm"),
    Delta("reasoning", "."),
    Delta("content", "So"),
    Delta("tool_name", "f", 0),
    Delta("tool_arguments", '{"a": ', 0),
    Delta("tool_arguments", "1}", 0),
    Delta("tool_name", "g", 1),
    Delta("tool_arguments", "{}", 1),
]


class Fixed:
    """A parser that says one thing."""

    def feed(self, token: int) -> list[Delta]:
        return DELTAS

    def finish(self) -> list[Delta]:
        return []


@pytest.fixture
def transcript() -> Transcript:
    said = Transcript(Fixed(), ())
    said.feed(0)
    return said


def events(frames: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in frames.splitlines() if line.startswith("data: {")]


def test_anthropic_events(transcript: Transcript) -> None:
    reply, usage = MessagesReply("m"), Usage(7, 3)
    frames = reply.begin(usage) + "".join(map(reply.delta, DELTAS)) + reply.end("tool_calls", transcript, usage)
    names = [line[7:] for line in frames.splitlines() if line.startswith("event: ")]
    found = events(frames)
    assert names == [event["type"] for event in found]
    assert found[0]["message"]["usage"] == {"input_tokens": 7, "output_tokens": 0}
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2, 3]
    assert [start["content_block"]["type"] for start in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert [start["content_block"].get("name") for start in starts[2:]] == ["f", "g"]
    stops = [event["index"] for event in found if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    partial = [e["delta"]["partial_json"] for e in found if e.get("delta", {}).get("type") == "input_json_delta"]
    assert partial == ['{"a": ', "1}", "{}"]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == {"input_tokens": 7, "output_tokens": 3} and found[-1] == {"type": "message_stop"}


def test_anthropic_whole(transcript: Transcript) -> None:
    whole = MessagesReply("m").whole(transcript, "tool_calls", Usage(7, 3))
    kinds = [(block["type"], block.get("input")) for block in whole["content"]]
    assert kinds == [("thinking", None), ("text", None), ("tool_use", {"a": 1}), ("tool_use", {})]
    assert whole["stop_reason"] == "tool_use"


def test_openai_tool_deltas(transcript: Transcript) -> None:
    reply = Reply("m", chat=True)
    calls = [
        event["choices"][0]["delta"]["tool_calls"][0]
        for event in events("".join(map(reply.delta, DELTAS)))
        if "tool_calls" in event["choices"][0]["delta"]
    ]
    assert [call["index"] for call in calls] == [0, 0, 0, 1, 1]
    assert calls[0]["type"] == "function" and calls[0]["function"] == {"name": "f", "arguments": ""}
    assert calls[1] == {"index": 0, "function": {"arguments": '{"a": '}}
    whole = reply.whole(transcript, "tool_calls", Usage(7, 3))["choices"][0]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "So"
    made = whole["message"]["tool_calls"]
    assert [call["id"] for call in made] == [calls[0]["id"], calls[3]["id"]] and made[0]["id"] != made[1]["id"]
    functions = [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}]
    assert [call["function"] for call in made] == functions


def test_stop_sequence_is_named() -> None:
    said = Transcript(Fixed(), ["o"])
    said.feed(0)
    assert said.text("content") == "S"
    whole = MessagesReply("m").whole(said, "stop", Usage(1, 1))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "o")
