"""Convert a checkpoint into an FTW folder.

The whole layout is computed from headers first. Entries are then written in order: bytes, fsync, a line in the journal.
The index comes last, so a folder that has one is complete; until then the journal says where to go on.
"""

import hashlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from formats.checkpoint import Checkpoint, open_checkpoint
from formats.digests import (
    DIGEST_BYTES,
    DIGESTS_NAME,
    FINGERPRINT_KIND,
    RowDigests,
    fingerprint,
    n_digests,
    save_digests,
)
from formats.errors import FormatError
from formats.ftw import INDEX_NAME, Index, index_bytes
from formats.journal import JOURNAL_NAME, Journal
from formats.layout import SHARD_LIMIT, Entry, layout, padded
from formats.region import ShardWriter, sync, trim
from formats.source import QUANT_FORMATS, Item, inexact_globals, items

# Blocks made ahead of the one being written.
AHEAD = 4
Progress = Callable[[int, int, str], None]


class Report(NamedTuple):
    """What was written."""

    path: str
    fingerprint: str
    quant_format: str | None
    tensors: int
    shards: int
    total_bytes: int
    resumed_bytes: int
    inexact_globals: int
    seconds: float


class Block(NamedTuple):
    """Bytes of an entry; the last block of one is empty and has its digests."""

    entry: Entry
    data: memoryview
    digests: list[bytes] | None


def convert(
    source: Path | str,
    out: Path | str,
    *,
    shard_limit: int = SHARD_LIMIT,
    resume: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write an FTW folder from a checkpoint.

    Args:
        source: folder with config.json and safetensors.
        out: new or empty folder; with ``resume`` also one that a conversion left unfinished.
        shard_limit: longest shard file in bytes, a multiple of 4096.
        resume: go on at the first unfinished entry; the result is the same to the byte.
        progress: called with (bytes done, bytes in all, name of the tensor).

    Raises:
        FormatError: the source is no checkpoint, or ``out`` is not a folder to write to.
        OSError: the drive is too small or fails.
    """
    begin_s = time.monotonic()
    source, out = Path(source).resolve(), Path(out).resolve()
    _check_folders(source, out, resume)
    checkpoint = open_checkpoint(source)
    inexact = inexact_globals(checkpoint)
    todo = items(checkpoint)
    entries, shards = layout([item.spec for item in todo], shard_limit)
    banks = bool(checkpoint.geometry.layers)
    index = Index(
        out,
        entries,
        shards,
        shard_limit,
        str(source),
        quant_format=QUANT_FORMATS[checkpoint.expert_format] if banks else None,
        bank_layers=len(checkpoint.geometry.layers) if banks else None,
        extra={"copied_metadata": _metadata(source), "fingerprint_kind": FINGERPRINT_KIND},
    )
    _expect_room(source, index)
    out.mkdir(parents=True, exist_ok=True)
    resumed, index = _write(checkpoint, todo, index, progress or (lambda *_: None))
    return Report(
        str(out),
        str(index.fingerprint),
        index.quant_format,
        len(entries),
        len(shards),
        index.total_bytes,
        resumed,
        inexact,
        round(time.monotonic() - begin_s, 3),
    )


def _check_folders(source: Path, out: Path, resume: bool) -> None:
    if (source / INDEX_NAME).exists():
        raise FormatError(f"{source} is an FTW folder already, want a checkpoint in safetensors")
    if out.is_relative_to(source):
        raise FormatError(f"{out} lies in the source {source}, want a folder outside")
    if out.exists() and not out.is_dir():
        raise FormatError(f"{out} is a file, want a new folder")
    held = {path.name for path in out.iterdir()} if out.exists() else set()
    if not held or (resume and JOURNAL_NAME in held):
        return
    if JOURNAL_NAME in held:
        raise FormatError(f"{out} holds an unfinished conversion, want --resume to go on or an empty folder")
    raise FormatError(f"{out} is not empty and holds no unfinished conversion, want a new or empty folder")


def _write(checkpoint: Checkpoint, todo: list[Item], index: Index, progress: Progress) -> tuple[int, Index]:
    """Write what is missing; returns the bytes that were there, and the finished index."""
    root = index.root
    journal = Journal(root, _identity(checkpoint, index), [n_digests(entry) for entry in index.entries])
    try:
        done = len(journal.done)
        begin = index.entries[done].offset if done < len(index.entries) else index.total_bytes
        if done < len(index.entries):
            (root / INDEX_NAME).unlink(missing_ok=True)
            sync(root)
        trim(index, begin)
        _write_entries(todo, index, journal, progress)
        return begin, _finish(checkpoint.root, index, journal)
    finally:
        journal.close()


def _expect_room(source: Path, index: Index) -> None:
    held = sum(path.stat().st_size for path in index.root.glob("*") if path.is_file())
    copied = sum((source / name).stat().st_size for name in index.extra["copied_metadata"])
    # The side file, and the journal, which holds digests as hexadecimal text.
    digests = 3 * DIGEST_BYTES * sum(map(n_digests, index.entries))
    wanted = index.total_bytes + copied + digests + 512 * len(index.entries) - held
    free = shutil.disk_usage(next(path for path in (index.root, *index.root.parents) if path.exists())).free
    if wanted > free:
        raise FormatError(f"{index.root} has {free / 2**30:.2f} GiB free, want {wanted / 2**30:.2f} GiB more")


def _identity(checkpoint: Checkpoint, index: Index) -> str:
    """Hash of all that decides the bytes: the source's headers, sizes and times, the layout."""
    files = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(
        b"|".join(
            (
                repr(sorted((name, *map(str, tensor[1:])) for name, tensor in checkpoint.tensors.items())).encode(),
                repr(state).encode(),
                index_bytes(index),
                (checkpoint.root / "config.json").read_bytes(),
            )
        )
    ).hexdigest()


def _write_entries(todo: list[Item], index: Index, journal: Journal, progress: Progress) -> None:
    writer = ShardWriter(index.root, index.shards)
    done = len(journal.done)
    offset = index.entries[done].offset if done < len(index.entries) else index.total_bytes
    try:
        for entry, data, digests in _ahead(_blocks(todo[done:], index.entries[done:])):
            writer.write(offset, data)
            offset += len(data)
            progress(offset, index.total_bytes, entry.name)
            if digests is not None:
                assert offset == entry.offset + entry.nbytes, entry.name
                writer.write(offset, memoryview(bytes(padded(offset) - offset)))
                offset = padded(offset)
                writer.sync()
                journal.add(digests)
    finally:
        writer.close()


def _blocks(todo: list[Item], entries: Sequence[Entry]) -> Iterator[Block]:
    for item, entry in zip(todo, entries, strict=True):
        digests = RowDigests(entry.nbytes, n_digests(entry))
        for array in item.blocks():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            digests.update(data)
            yield Block(entry, data, None)
        yield Block(entry, memoryview(b""), digests.done)


def _ahead(blocks: Iterator[Block]) -> Iterator[Block]:
    """Make blocks in a thread: reading and hashing go on while the drive writes."""
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(pool.submit(next, blocks, None) for _ in range(AHEAD))
        while (block := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, blocks, None))
            yield block


def _finish(source: Path, index: Index, journal: Journal) -> Index:
    """Everything but the shards; the index last, by a rename."""
    root = index.root
    for name in index.extra["copied_metadata"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, root / name)
        sync(root / name)
    digests = np.frombuffer(b"".join(b"".join(rows) for rows in journal.done), np.uint8).reshape(-1, DIGEST_BYTES)
    save_digests(root, digests)
    index = replace(index, fingerprint=fingerprint(index.entries, digests))
    temporary = root / f"{INDEX_NAME}.tmp"
    temporary.write_bytes(index_bytes(index))
    sync(temporary)
    temporary.replace(root / INDEX_NAME)
    sync(root)
    journal.remove()
    sync(root)
    return index


def _metadata(source: Path) -> list[str]:
    """Files to copy: all but weights, indexes, caches and names of our own."""
    suffixes = (".safetensors", ".gguf", ".ftw")
    names = {"model.safetensors.index.json", DIGESTS_NAME, JOURNAL_NAME, INDEX_NAME}
    folders = {".git", ".cache", ".freetoken_expert_cache", ".sparklab_expert_cache"}
    return sorted(
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file()
        and not path.name.endswith(suffixes)
        and path.name not in names
        and not folders.intersection(path.relative_to(source).parent.parts)
    )
