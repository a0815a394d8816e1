"""The server as a process, met by OpenAI's own client and by hand."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

ROOT = Path(__file__).parent.parent
TINY = ROOT / "examples" / "tiny_k3"
CHAT: dict[str, Any] = {"model": "tiny_k3", "messages": [{"role": "user", "content": "hi"}]}
QUICK: dict[str, Any] = {"max_tokens": 4, "reasoning_effort": "none", "temperature": 0}
NULLS: dict[str, Any] = dict.fromkeys(["stream", "stop", "n", "seed", "tools", "stream_options", "logit_bias", "user"])

pytestmark = pytest.mark.xdist_group("serve")


def start(*options: str) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-W", "ignore", "cli.py", "serve", "--model", str(TINY), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "listening on http://127.0.0.1:" in line, line
    url = line.split()[-1]
    for _ in range(300):
        if call(url, "/health")[0] == 200:
            return process, url
        time.sleep(0.1)
    raise AssertionError("the server did not become ready")


def call(url: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60) as answer:
            status, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
    except OSError:
        return 0, None
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode()


def idle(url: str) -> dict[str, Any]:
    """The server's numbers, once it has nothing to do."""
    for _ in range(300):
        now = call(url, "/stats")[1]
        if now["running"] == now["waiting"] == 0:
            return now
        time.sleep(0.1)
    raise AssertionError(f"the server is still at work: {now}")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process, url = start("--max-running-requests", "2", "--max-queued-requests", "2", "--num-tokens", "1024")
    yield url
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_chat_equals_the_command_line(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, **QUICK)
    assert answer.object == "chat.completion" and answer.model == "tiny_k3"
    usage = answer.usage
    assert usage and usage.completion_tokens == 4 and usage.total_tokens == usage.prompt_tokens + 4
    command = [sys.executable, "-W", "ignore", "cli.py", "generate", "--model", str(TINY), "--prompt", "hi"]
    options = ["--max-tokens", "4", "--temperature", "0", "--json"]
    alone = json.loads(subprocess.run([*command, *options], capture_output=True, text=True, cwd=ROOT).stdout)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (alone["text"], "length")
    assert usage.prompt_tokens == alone["prompt_tokens"]


def test_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT, **QUICK)
    chunks = list(client.chat.completions.create(**CHAT, **QUICK, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []


def test_null_is_absent(url: str) -> None:
    assert call(url, "/v1/chat/completions", CHAT | QUICK | NULLS)[0] == 200


def test_stream_on_the_wire(url: str) -> None:
    _, raw = call(url, "/v1/chat/completions", CHAT | QUICK | {"stream": True})
    events = [line for line in raw.split("\n\n") if line and not line.startswith(":")]
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
    assert "usage" not in raw


def test_thinking_goes_to_reasoning_content(url: str) -> None:
    _, answer = call(url, "/v1/chat/completions", CHAT | {"max_tokens": 3, "seed": 1, "temperature": 0})
    message = answer["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning_content"]


def test_completions(client: openai.OpenAI) -> None:
    first = client.completions.create(model="tiny_k3", prompt="A row", max_tokens=3, seed=7)
    again = client.completions.create(model="tiny_k3", prompt="A row", max_tokens=3, seed=7, stream=True)
    assert first.choices[0].text and "".join(chunk.choices[0].text for chunk in again) == first.choices[0].text


def test_neighbours_do_not_change_an_answer(client: openai.OpenAI) -> None:
    """Four at once on two slots, each as it is alone."""

    def ask(text: str) -> str:
        return client.completions.create(model="tiny_k3", prompt=text, max_tokens=4, seed=3).choices[0].text

    prompts = ["A row", "The licence says that", "x", "Once more"]
    alone = [ask(prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, prompts)) == alone


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (CHAT | {"max_tokens": "x"}, "max_tokens"),
        (CHAT | {"temperature": 3}, "temperature"),
        (CHAT | {"n": 2}, "n"),
        (CHAT | {"logprobs": True}, "logprobs"),
        (CHAT | {"reasoning_effort": "huge"}, "reasoning_effort"),
        (CHAT | {"tool_choice": "required"}, "tool_choice"),
        (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, None),
        ({}, "messages"),
        (b"{", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
    ],
)
def test_wrong_fields_are_400(url: str, body: Any, param: str | None) -> None:
    status, answer = call(url, "/v1/chat/completions", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param and answer["error"]["message"]


def test_typed_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt is too long: "):
        client.chat.completions.create(**CHAT, max_tokens=5000)
    with pytest.raises(openai.NotFoundError, match="'other' is not here"):
        client.models.retrieve("other")
    assert client.models.retrieve("tiny_k3").id == client.models.list().data[0].id


def test_anthropic_messages(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    ask: dict[str, Any] = {"model": "tiny_k3", "messages": CHAT["messages"], "thinking": {"type": "disabled"}}
    counted = client.messages.count_tokens(**ask).input_tokens
    whole = client.messages.create(**ask, max_tokens=4, extra_body={"temperature": 0})
    assert whole.usage.input_tokens == counted and whole.usage.output_tokens == 4
    assert whole.stop_reason == "max_tokens" and whole.content[0].type == "text"
    with client.messages.stream(**ask, max_tokens=4, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage == whole.usage
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**ask, max_tokens=5000)


def test_routes_and_methods(url: str) -> None:
    assert call(url, "/nowhere")[0] == 404 and "error" in call(url, "/nowhere")[1]
    assert call(url, "/health", b"x")[0] == 405


def test_openapi_describes_every_route_that_takes_a_body(url: str) -> None:
    document = call(url, "/openapi.json")[1]
    assert set(document["paths"]["/v1/chat/completions"]) == {"post"}
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert {"max_tokens", "messages"} <= set(schemas["MessagesRequest"]["required"])
    for path, methods in document["paths"].items():
        status = call(url, path, {} if "post" in methods else None)[0]
        assert status in (200, 400), path


def test_tokenize(url: str) -> None:
    _, answer = call(url, "/tokenize", {"prompt": "A row, 100 %"})
    assert answer["count"] == len(answer["tokens"])
    assert call(url, "/detokenize", {"tokens": answer["tokens"]})[1] == {"prompt": "A row, 100 %"}
    assert call(url, "/tokenize", {"messages": CHAT["messages"]})[1]["count"] > 40
    assert call(url, "/detokenize", {"tokens": [99999]})[0] == 400


def test_clients_that_leave_and_a_full_queue(url: str) -> None:
    """Those who leave free their slots; the queue refuses a fifth; health answers at once meanwhile."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "max_tokens": 400, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    before = idle(url)
    clients = []
    for _ in range(4):
        client = socket.create_connection((host, int(port)))
        client.sendall(head + body)
        clients.append(client)
        time.sleep(0.1)
    status, answer = call(url, "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert status == 429 and "waiting" in answer["error"]["message"]
    begin = time.perf_counter()
    assert call(url, "/health")[0] == 200
    assert time.perf_counter() - begin < 1
    for client in clients:
        client.close()
    assert idle(url)["cancelled"] == before["cancelled"] + 4
    assert call(url, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_terminal_chat(url: str) -> None:
    """Two turns, the second with the first in its prompt; a refused turn leaves no trace."""
    command = [sys.executable, "-W", "ignore", "cli.py", "chat", "--url", url, "--no-thinking", "--max-tokens", "3"]
    before = idle(url)
    lines = "hi\n\n" + "again and " * 2000 + "\nso\n/new\nhi\n/quit\nnever\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "tiny_k3 at" in done.stdout and "answers 400: prompt is too long" in done.stdout
    assert idle(url)["requests"] == before["requests"] + 3


def test_terminal_chat_ctrl_c_stops_the_answer_alone(url: str) -> None:
    command = [sys.executable, "-W", "ignore", "cli.py", "chat", "--url", url, "--no-thinking", "--max-tokens", "900"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, cwd=ROOT, **pipes)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("hi\n")
    process.stdin.flush()
    assert "tiny_k3 at" in process.stdout.readline() and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate("/quit\n", timeout=30)
    assert process.returncode == 0 and "(stopped)" in rest and not errors


def test_terminal_chat_without_a_server_is_one_line() -> None:
    command = [sys.executable, "-W", "ignore", "cli.py", "chat", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "127.0.0.1:9" in done.stderr


@pytest.mark.parametrize("name", ["openai_stream.py", "anthropic_stream.py"])
def test_client_examples(url: str, name: str) -> None:
    path = ROOT / "examples" / name
    assert len(path.read_text().splitlines()) <= 40
    done = subprocess.run([sys.executable, path, url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "tokens" in done.stdout and len(done.stdout.splitlines()) >= 2


def test_metrics(url: str) -> None:
    idle(url)
    status, text = call(url, "/metrics")
    assert status == 200 and "rowstream_running 0" in text and "# TYPE rowstream_steps_total counter" in text


def test_key_and_origin_and_a_signal_lets_answers_end() -> None:
    process, url = start("--api-key", "secret", "--cors", "*", "--drain-seconds", "20")
    body = {"prompt": "x", "max_tokens": 3}
    assert call(url, "/v1/completions", body)[0] == 401
    assert call(url, "/v1/completions", body, authorization="Bearer wrong")[0] == 401
    assert call(url, "/v1/models", authorization="Bearer secret")[0] == 200
    assert call(url, "/v1/models", **{"x-api-key": "secret"})[0] == 200
    preflight = urllib.request.Request(f"{url}/v1/models", method="OPTIONS")
    with urllib.request.urlopen(preflight, timeout=10) as answer:
        assert answer.status == 204 and answer.headers["access-control-allow-origin"] == "*"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        last = pool.submit(call, url, "/v1/completions", body | {"max_tokens": 8}, authorization="Bearer secret")
        time.sleep(0.7)
        os.kill(process.pid, signal.SIGTERM)
        status, answer = last.result(30)
    assert status == 200 and answer["usage"]["completion_tokens"] == 8
    assert process.wait(30) == 0


def test_a_model_that_is_missing_is_one_line() -> None:
    command = [sys.executable, "-W", "ignore", "cli.py", "serve", "--model", "/nowhere", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "/nowhere" in done.stderr
