"""What a caller may ask for, checked once, before any work."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import RequestError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits; filters apply in the order of the fields.

    The random bits depend on ``seed`` and the token's position alone, so a request repeats to the letter.
    """

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # keep the k most likely; 0: all
    top_p: float = 1.0  # keep the most likely until their probabilities reach p
    min_p: float = 0.0  # keep those at least this fraction as likely as the most likely
    seed: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature <= 100, "0 to 100")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0, at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _check("seed", self.seed, -(2**63) <= self.seed < 2**63, "a 64-bit integer")


@dataclass(frozen=True)
class Request:
    """One completion.

    Attributes:
        prompt_ids: the prompt, at least one token.
        sampling: see :class:`Sampling`.
        max_tokens: most tokens to make.
        stop_ids: tokens that end the answer and are not part of it.
        prefill_chunk: most prompt tokens in one step.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    prefill_chunk: int = 8192

    def __post_init__(self) -> None:
        _check("the prompt", f"{len(self.prompt_ids)} tokens", len(self.prompt_ids) > 0, "at least one token")
        _check("max_tokens", self.max_tokens, self.max_tokens > 0, "1 or more")
        _check("prefill_chunk", self.prefill_chunk, self.prefill_chunk > 0, "1 or more")


def sampling_for(folder: Path, chosen: dict[str, Any]) -> Sampling:
    """Sampling with the caller's choices over the model's ``generation_config.json`` over the vendor's 1.0 and 0.95.

    A choice of None is no choice.

    Raises:
        RequestError: a value is out of range, or the file is no JSON object.
    """
    path = folder / "generation_config.json"
    stored: Any = {}
    if path.exists():
        try:
            stored = json.loads(path.read_text())
        except ValueError as error:
            raise RequestError(f"{path} is no JSON ({error})") from None
    defaults = {name: stored.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    known = [{name: value for name, value in layer.items() if value is not None} for layer in (defaults, chosen)]
    return Sampling(**({"temperature": 1.0, "top_p": 0.95} | known[0] | known[1]))


def check_ids(ids: tuple[int, ...], vocab: int) -> None:
    """Raise :class:`RequestError` naming the first id outside the vocabulary."""
    for at, token in enumerate(ids):
        _check(f"token id {at + 1}", token, 0 <= token < vocab, f"0 to {vocab - 1}")


def _check(name: str, value: object, condition: bool, wanted: str) -> None:
    if not condition:
        raise RequestError(f"{name} is {value}, want {wanted}")
