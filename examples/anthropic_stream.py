"""Stream an answer with Anthropic's own client from a running ``rowstream serve``. Needs the package ``anthropic``."""

import sys

import anthropic


def main(url: str = "http://127.0.0.1:8000", prompt: str = "What is in a row?") -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    messages: list = [{"role": "user", "content": prompt}]
    ask: dict = {"model": "any", "messages": messages, "thinking": {"type": "disabled"}}
    print(f"{client.messages.count_tokens(**ask).input_tokens} tokens")
    with client.messages.stream(**ask, max_tokens=16) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        print(f"\n{stream.get_final_message().stop_reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
