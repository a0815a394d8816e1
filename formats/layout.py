"""Where tensors lie in the region of an FTW folder, and where the region lies in shard files.

The region is one logical run of bytes. Entries follow each other, each on a multiple of 4096 with zeros up to the next.
Shard files cut the region: an entry no larger than a shard stays in one file, a larger one fills the current file to
the limit and goes on in the next.

Source: FreeToken 0.1.2 (ftw.md, section 1.2).
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from formats.dtypes import DTYPES
from formats.errors import FormatError

ALIGN = 4096
SHARD_LIMIT = 8 * 2**30
ITEM_BYTES = {
    name: DTYPES[name].size
    for name in (
        *("uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
        *("float16", "bfloat16", "int16", "float32", "int32", "float64", "int64"),
    )
}


class Spec(NamedTuple):
    """A tensor to lay out: ``dtype`` is torch's name without ``torch.``."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Entry(NamedTuple):
    """A tensor of the region; ``offset`` counts from the region's start, ``nbytes`` is without padding."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Shard(NamedTuple):
    """A file that holds bytes ``offset`` to ``offset + nbytes`` of the region."""

    file: str
    offset: int
    nbytes: int


class Extent(NamedTuple):
    """A run of bytes in one shard file."""

    file: str
    offset: int
    nbytes: int


def padded(nbytes: int) -> int:
    """Round up to a whole page."""
    return -(-nbytes // ALIGN) * ALIGN


def layout(specs: Iterable[Spec], shard_limit: int = SHARD_LIMIT) -> tuple[tuple[Entry, ...], tuple[Shard, ...]]:
    """Place tensors in order.

    Args:
        specs: tensors in write order.
        shard_limit: longest shard in bytes.

    Returns:
        Entries with their offsets, and the shards they fill.

    Raises:
        FormatError: the limit is not a positive multiple of 4096.
    """
    if shard_limit <= 0 or shard_limit % ALIGN:
        raise FormatError(f"shard limit is {shard_limit} bytes, want a positive multiple of {ALIGN}")
    entries, lengths, offset = [], [0], 0
    for spec in specs:
        if spec.nbytes <= shard_limit and lengths[-1] + spec.nbytes > shard_limit:
            lengths.append(0)
        entries.append(Entry(*spec, offset, spec.nbytes))
        left = padded(spec.nbytes)
        offset += left
        while left:
            piece = min(left, shard_limit - lengths[-1])
            lengths[-1] += piece
            left -= piece
            if left:
                lengths.append(0)
    shards, begin = [], 0
    for number, length in enumerate(lengths):
        shards.append(Shard(f"freetoken-{number:05d}.ftw", begin, length))
        begin += length
    return tuple(entries), tuple(shards)


def extents(shards: Sequence[Shard], offset: int, nbytes: int) -> list[Extent]:
    """Cut a run of the region into pieces of files, in order."""
    pieces, end = [], offset + nbytes
    number = bisect_right(shards, offset, key=lambda shard: shard.offset) - 1
    while offset < end:
        shard = shards[number]
        begin = offset - shard.offset
        length = min(end - offset, shard.nbytes - begin)
        pieces.append(Extent(shard.file, begin, length))
        offset += length
        number += 1
    return pieces
