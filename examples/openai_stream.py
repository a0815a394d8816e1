"""Stream an answer with OpenAI's own client from a running ``rowstream serve``. Needs the package ``openai``."""

import sys

import openai


def main(url: str = "http://127.0.0.1:8000", prompt: str = "What is in a row?") -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list = [{"role": "user", "content": prompt}]
    options: dict = {"max_tokens": 16, "reasoning_effort": "low", "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True, **options):
        for choice in chunk.choices:
            thought = getattr(choice.delta, "reasoning_content", None)
            print(thought or choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
