"""Train a small byte-level BPE tokenizer and write it in Kimi K3's file format."""

import base64
import json
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import regex

from engine.tokenizer import PATTERN

# Kimi K3's special tokens, counted from the first slot after the ranks
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>"}
SPECIAL |= {6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>"}
SPECIAL |= {20: "<|media_end|>", 21: "<|media_pad|>", 65: "<osagent_mode>", 254: "[UNK]", 255: "[PAD]"}


def train_bpe(texts: Iterable[str], n_ranks: int) -> dict[bytes, int]:
    """Ranks of the 256 bytes and then of the most frequent pairs; stops early when no pair occurs twice."""
    found = Counter(word for text in texts for word in regex.findall(PATTERN, text, regex.V1))
    words = [([bytes([byte]) for byte in word.encode()], count) for word, count in sorted(found.items())]
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < n_ranks:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for parts, count in words:
            for pair in pairwise(parts):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            break
        ranks.setdefault(b"".join(best), len(ranks))
        for parts, _ in words:
            for at in range(len(parts) - 2, -1, -1):
                if tuple(parts[at : at + 2]) == best:
                    parts[at : at + 2] = [b"".join(best)]
    return ranks


def write_tokenizer(folder: Path, ranks: dict[bytes, int], special: dict[int, str] = SPECIAL) -> None:
    """Write ``tiktoken.model`` and ``tokenizer_config.json``."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    folder.joinpath("tiktoken.model").write_text("".join(lines))
    added = {
        str(len(ranks) + slot): {"content": name, "special": slot not in (3, 4, 5)} for slot, name in special.items()
    }
    config = {"added_tokens_decoder": added, "bos_token": special[0], "eos_token": special[1]}
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    out, n_ranks, *files = sys.argv[1:]
    Path(out).mkdir(parents=True, exist_ok=True)
    write_tokenizer(Path(out), train_bpe([Path(file).read_text() for file in files], int(n_ranks)))


if __name__ == "__main__":
    main()
