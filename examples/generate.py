"""Generate a few tokens from the bundled Kimi K3, with the engine as a library."""

from pathlib import Path

from engine.device import open_device

device = open_device()

from engine.chat import Frame, prompt_ids  # noqa: E402
from engine.generate import generate, open_model  # noqa: E402
from engine.requests import Request, Sampling  # noqa: E402
from engine.tokenizer import load_tokenizer  # noqa: E402

MODEL = Path(__file__).parent / "tiny_k3"


def main(prompt: str = "What is in a row?", tokens: int = 8) -> None:
    model = open_model(MODEL, device)
    tokenizer = load_tokenizer(MODEL)
    ids = prompt_ids(tokenizer, model.cfg.model_type, [{"role": "user", "content": prompt}], Frame(thinking=False))
    request = Request(ids, Sampling(temperature=0), tokens, tokenizer.end_ids)
    answer = list(generate(model, request))
    print(f"{len(ids)} prompt tokens, then {answer}")
    print(tokenizer.decode_bytes(answer).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
