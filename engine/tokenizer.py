"""Kimi's tokenizer: byte-level BPE in tiktoken's file format, then 256 special slots.

``tiktoken.model`` holds one token a line, base64 and rank. The slots after the last rank are special tokens, named by
``added_tokens_decoder`` in ``tokenizer_config.json``, else ``<|reserved_token_N|>``. Text never becomes a special
token: markup is encoded by name, token by token.

Source: kimi-k3.md, section 6.
"""

import base64
import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from engine.errors import EngineError

SPECIAL_SLOTS = 256
END_TOKENS = ("[EOS]", "[EOT]", "<|end_of_msg|>", "<|im_end|>")

_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_WORD}{_UPPER}*{_LOWER}+{_SUFFIX}",
        f"{_WORD}{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
MOST_CHARACTERS = 400_000  # longest slice given to BPE
MOST_RUN = 25_000  # longest run of only whitespace, or of none


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back."""

    encoding: tiktoken.Encoding
    special: dict[str, int]

    @property
    def vocab(self) -> int:
        return self.encoding.n_vocab

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens after which nothing of an answer follows."""
        return frozenset(self.special[name] for name in END_TOKENS if name in self.special)

    def encode_text(self, text: str) -> list[int]:
        """Encode ordinary text; the names of special tokens in it are ordinary text too."""
        return [token for part in _cut(text) for token in self.encoding.encode_ordinary(part)]

    def encode_markup(self, name: str) -> int:
        """Id of one special token.

        Raises:
            EngineError: this tokenizer has no such token.
        """
        if name not in self.special:
            raise EngineError(f"the tokenizer has no token {name!r}, want one of a Kimi tokenizer's special tokens")
        return self.special[name]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of the tokens, one after the other; a special token gives its name."""
        return b"".join(self.encoding.decode_single_token_bytes(token) for token in ids)


def load_tokenizer(folder: Path, vocab: int | None = None) -> Tokenizer:
    """Read ``tiktoken.model`` and ``tokenizer_config.json``.

    Args:
        folder: where they lie.
        vocab: tokens of the model; the tokenizer must have as many.

    Raises:
        EngineError: a file is missing or malformed, or made for another model.
    """
    ranks = _read_ranks(folder / "tiktoken.model")
    base = len(ranks)
    if vocab is not None and base + SPECIAL_SLOTS != vocab:
        raise EngineError(f"{folder / 'tiktoken.model'} makes {base + SPECIAL_SLOTS} tokens, the model has {vocab}")
    names = _read_names(folder / "tokenizer_config.json", base)
    special = {names.get(slot, f"<|reserved_token_{slot}|>"): slot for slot in range(base, base + SPECIAL_SLOTS)}
    return Tokenizer(tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special), special)


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except FileNotFoundError:
        raise EngineError(f"{path} is missing, want the tokenizer beside the weights") from None
    except ValueError as error:
        raise EngineError(f"{path} is no tiktoken file ({error}), want lines of base64 and rank") from None
    if sorted(ranks.values()) != list(range(len(lines))):
        raise EngineError(f"{path} holds {len(lines)} lines with other ranks, want 0 to {len(lines) - 1} once each")
    return ranks


def _read_names(path: Path, base: int) -> dict[int, str]:
    try:
        added = json.loads(path.read_text())["added_tokens_decoder"]
        names = {int(slot): token["content"] for slot, token in added.items()}
    except FileNotFoundError:
        raise EngineError(f"{path} is missing, want the names of the special tokens") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{path} is malformed ({error!r}), want added_tokens_decoder with a content a slot") from None
    outside = [slot for slot in names if not base <= slot < base + SPECIAL_SLOTS]
    if outside:
        raise EngineError(f"{path} names slot {outside[0]}, want {base} to {base + SPECIAL_SLOTS - 1}")
    if len(set(names.values())) < len(names):
        raise EngineError(f"{path} gives two slots one name, want a name of its own for each")
    return names


def _cut(text: str) -> Iterator[str]:
    """Cut text where the released tokenizer cuts it before BPE; only pathological text is cut at all."""
    for begin in range(0, len(text), MOST_CHARACTERS):
        part = text[begin : begin + MOST_CHARACTERS]
        at = 0
        for run in re.finditer(r"\s+|\S+", part):
            for end in range(run.start() + MOST_RUN, run.end(), MOST_RUN):
                yield part[at:end]
                at = end
        yield part[at:]


class StreamDecoder:
    """Tokens to text without ever splitting a character: an incomplete tail waits for the next token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Text that has become complete."""
        return self._utf8.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """What is left; bytes that never became a character are replaced."""
        return self._utf8.decode(b"", final=True)
