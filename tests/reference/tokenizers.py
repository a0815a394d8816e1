"""Small tokenizers in Kimi's file format, and a byte-pair encoder that is slow and plain."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import regex

from engine.tokenizer import PATTERN, Tokenizer, load_tokenizer
from examples.tiny_tokenizer import SPECIAL, train_bpe, write_tokenizer

# Kimi-Linear's names of the same slots
LINEAR_SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 9: "[EOT]"}
LINEAR_SPECIAL |= {10: "<|im_system|>", 17: "<|im_middle|>"}


@cache
def tiny_ranks() -> dict[bytes, int]:
    return train_bpe([Path(__file__).read_text(), "Привет, мир! 你好，世界。" * 3], 320)


def make_tokenizer(folder: Path, special: dict[int, str] = SPECIAL) -> Tokenizer:
    """Write a tokenizer of 320 ranks into ``folder`` and load it."""
    write_tokenizer(folder, tiny_ranks(), special)
    return load_tokenizer(folder)


def slow_encode(text: str) -> list[int]:
    """Split by the pattern, then merge the neighbours of lowest rank, leftmost first, until none merge."""
    ranks, out = tiny_ranks(), []
    for word in regex.findall(PATTERN, text, regex.V1):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            merges = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not merges:
                break
            at = min(merges)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        out += [ranks[part] for part in parts]
    return out
