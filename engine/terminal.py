"""A conversation in the terminal, over the server's own API."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TextIO

from engine.errors import EngineError

HELP = "/new begins again, /quit or Ctrl-D ends, Ctrl-C stops an answer"


class Terminal:
    """Owns the history."""

    def __init__(self, url: str, api_key: str | None, options: dict[str, Any], out: TextIO, *, dim: bool) -> None:
        """Talk to ``url``; ``options`` join each request; ``dim``: set reasoning apart by the terminal's means."""
        self._url = url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._options, self._out, self._dim = options, out, dim
        self._history: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Greet.

        Raises:
            EngineError: no server answers there.
        """
        with self._open("/v1/models") as answer:
            name = json.load(answer)["data"][0]["id"]
        print(f"{name} at {self._url}; {HELP}", file=self._out)

    def say(self, line: str) -> bool:
        """Take one line from the user; False when the conversation is over."""
        if line == "/quit":
            return False
        if line == "/new":
            self._history = []
        elif line:
            self._ask(line)
        return True

    def _ask(self, line: str) -> None:
        """Add a turn; a turn that failed leaves no trace, one that was stopped keeps what was said."""
        said: dict[str, list[str]] = {"reasoning_content": [], "content": []}
        turn = {"role": "user", "content": line}
        try:
            for channel, text in self._deltas([*self._history, turn]):
                said[channel].append(text)
                dim = self._dim and channel == "reasoning_content"
                print(f"\x1b[2m{text}\x1b[0m" if dim else text, end="", file=self._out, flush=True)
        except KeyboardInterrupt:
            print(" (stopped)", end="", file=self._out)
        except EngineError as error:
            print(f"\n{error}", file=self._out)
            return
        print(file=self._out)
        answer = {channel: "".join(parts) for channel, parts in said.items()}
        self._history += [turn, {"role": "assistant", **answer}]

    def _deltas(self, messages: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        body = self._options | {"messages": messages, "stream": True}
        with self._open("/v1/chat/completions", body) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise EngineError(event["error"]["message"])
                for choice in event["choices"]:
                    yield from ((key, text) for key, text in choice["delta"].items() if key != "role" and text)

    def _open(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self._url + path, data, self._headers))
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise EngineError(f"{self._url} answers {error.code}: {text}") from None
        except (OSError, ValueError) as error:
            raise EngineError(f"no server answers at {self._url}: {error}") from None
