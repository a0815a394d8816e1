"""SHA-256 digests of tensors and expert rows, in a file beside the shards.

``rowstream_digests.npy`` is uint8 [n, 16]: in index order one digest per weight, and one per row of a bank entry. A
digest is the first 16 bytes of SHA-256 over the unpadded bytes. The index's fingerprint is then a hash of what the
folder holds, whatever the size of its shards; ``fingerprint_kind`` says so.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from formats.banks import KIND
from formats.errors import FormatError
from formats.ftw import Index
from formats.layout import Entry

DIGESTS_NAME = "rowstream_digests.npy"
DIGEST_BYTES = 16
FINGERPRINT_KIND = "rowstream-content-sha256"


class RowDigests:
    """Cuts a stream of bytes into runs of equal length and digests each; it owns the hash in progress."""

    def __init__(self, nbytes: int, rows: int) -> None:
        self._row_bytes = nbytes // rows
        self._left = self._row_bytes
        self._hash = hashlib.sha256()
        self.done: list[bytes] = []

    def update(self, data: memoryview) -> None:
        """Take the next bytes, a flat view of bytes."""
        while len(data):
            self._hash.update(data[: self._left])
            taken = min(self._left, len(data))
            self._left -= taken
            data = data[taken:]
            if not self._left:
                self.done.append(self._hash.digest()[:DIGEST_BYTES])
                self._hash, self._left = hashlib.sha256(), self._row_bytes


def n_digests(entry: Entry) -> int:
    """Digests of an entry: one per expert row, or one in all."""
    return entry.shape[0] if entry.kind == KIND else 1


def fingerprint(entries: Sequence[Entry], digests: np.ndarray) -> str:
    """Hash names, kinds, dtypes, shapes and digests, in the order of (kind, name).

    Args:
        entries: in index order.
        digests: uint8 [n, 16] in the same order.

    Returns:
        16 hexadecimal digits.
    """
    ends = np.cumsum([n_digests(entry) for entry in entries])
    parts = []
    for entry, end in zip(entries, ends, strict=True):
        head = repr((entry.kind, entry.name, entry.dtype, list(entry.shape)))
        parts.append((entry.kind, entry.name, head.encode() + digests[end - n_digests(entry) : end].tobytes()))
    whole = hashlib.sha256()
    for _, _, part in sorted(parts):
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()[:16]


def save_digests(root: Path, digests: np.ndarray) -> None:
    """Write the side file; it is on the drive when this returns."""
    with (root / DIGESTS_NAME).open("wb") as file:
        np.save(file, digests)
        file.flush()
        os.fsync(file.fileno())


def load_digests(index: Index) -> np.ndarray | None:
    """Read the side file; ``None`` where the folder has none.

    Raises:
        FormatError: the file is no such table, or one of another length.
    """
    path = index.root / DIGESTS_NAME
    if not path.is_file():
        return None
    try:
        digests: np.ndarray[Any, Any] = np.load(path)
    except (ValueError, EOFError, OSError) as error:
        raise FormatError(f"{path} is not a numpy file: {error}") from error
    want = (sum(map(n_digests, index.entries)), DIGEST_BYTES)
    if digests.dtype != np.uint8 or digests.shape != want:
        raise FormatError(f"{path} is {digests.dtype}{list(digests.shape)}, want uint8{list(want)}")
    return digests
