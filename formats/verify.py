"""Check an FTW folder: its structure, then the digest of every tensor and expert row."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from formats.banks import KIND, find_banks
from formats.digests import DIGEST_BYTES, FINGERPRINT_KIND, fingerprint, load_digests, n_digests
from formats.errors import FormatError
from formats.ftw import Index, read_index
from formats.layout import extents

BLOCK_BYTES = 16 * 2**20


class Report(NamedTuple):
    """What was checked."""

    path: str
    checked: str
    tensors: int
    digests: int
    bytes_read: int
    fingerprint: str | None
    warnings: tuple[str, ...]


class Run(NamedTuple):
    """Bytes of the region with one digest."""

    name: str
    offset: int
    nbytes: int
    digest: bytes


def verify(path: Path | str, progress: Callable[[int, int, str], None] | None = None) -> Report:
    """Read a whole folder and compare it with its digests.

    Args:
        path: FTW folder.
        progress: called with (bytes done, bytes in all, name of the tensor).

    Returns:
        What was checked; ``checked`` is ``"no digests: structure only"`` for a folder of another program.

    Raises:
        FormatError: the first thing that is wrong, with file and offset.
    """
    index = read_index(Path(path))
    find_banks(index)
    digests = load_digests(index)
    base = Report(str(path), "no digests: structure only", len(index.entries), 0, 0, index.fingerprint, index.warnings)
    if digests is None:
        return base
    if index.extra.get("fingerprint_kind") == FINGERPRINT_KIND:
        actual = fingerprint(index.entries, digests)
        if index.fingerprint != actual:
            raise FormatError(f"{path}: fingerprint is {index.fingerprint}, want {actual} by the digests")
    runs = list(_runs(index, digests))
    total = sum(run.nbytes for run in runs)
    _compare(index, runs, lambda done, name: progress(done, total, name) if progress else None)
    return base._replace(checked="structure and digests", digests=len(runs), bytes_read=total)


def _runs(index: Index, digests: np.ndarray) -> Iterator[Run]:
    row = 0
    for entry in index.entries:
        count = n_digests(entry)
        nbytes = entry.nbytes // count
        for i in range(count):
            name = f"{entry.name}, expert row {i}," if entry.kind == KIND else entry.name
            yield Run(name, entry.offset + i * nbytes, nbytes, digests[row + i].tobytes())
        row += count


def _compare(index: Index, runs: Iterable[Run], report: Callable[[int, str], None]) -> None:
    """Digest runs in threads; results are taken in order, so the first bad run is the one named."""
    files = {shard.file: os.open(index.root / shard.file, os.O_RDONLY) for shard in index.shards}
    done = 0
    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            try:
                for run, found in _in_order(pool, runs, lambda run: _digest(index, files, run)):
                    if found != run.digest:
                        raise FormatError(_blame(index, run, found))
                    done += run.nbytes
                    report(done, run.name)
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        for fd in files.values():
            os.close(fd)


def _in_order(
    pool: ThreadPoolExecutor, runs: Iterable[Run], work: Callable[[Run], bytes]
) -> Iterator[tuple[Run, bytes]]:
    """Like ``zip(runs, pool.map(work, runs))`` with few runs waiting at a time."""
    waiting = []
    for run in runs:
        waiting.append((run, pool.submit(work, run)))
        if len(waiting) > 32:
            first, future = waiting.pop(0)
            yield first, future.result()
    for run, future in waiting:
        yield run, future.result()


def _digest(index: Index, files: dict[str, int], run: Run) -> bytes:
    whole = hashlib.sha256()
    for file, offset, nbytes in extents(index.shards, run.offset, run.nbytes):
        end = offset + nbytes
        while offset < end:
            data = os.pread(files[file], min(BLOCK_BYTES, end - offset), offset)
            if not data:
                raise FormatError(f"{index.root / file} ends at {offset}, want {end - offset} bytes more")
            whole.update(data)
            offset += len(data)
    return whole.digest()[:DIGEST_BYTES]


def _blame(index: Index, run: Run, found: bytes) -> str:
    file, offset, _ = extents(index.shards, run.offset, run.nbytes)[0]
    return (
        f"{index.root / file} at {offset}: {run.name} of {run.nbytes} bytes has digest {found.hex()}, "
        f"want {run.digest.hex()}"
    )
