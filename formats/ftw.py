"""The index of an FTW folder: one JSON object that names entries and shards; its presence says "complete".

    {"format": "freetoken_weight", "version": 1, "align": 4096, "shard_limit": BYTES, "total_bytes": BYTES,
     "tensors": [{"name", "kind", "dtype", "shape", "global_off", "nbytes"}, ...],
     "shards": [{"file", "global_off", "nbytes"}, ...], "source_model_path", "fingerprint", "quant_format", ...}

Source: FreeToken 0.1.2 and SparkLab 0.1.3, whose files this reads and writes to the byte.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from formats.errors import FormatError
from formats.layout import ALIGN, ITEM_BYTES, SHARD_LIMIT, Entry, Shard
from formats.safetensors import parse_json

INDEX_NAME = "freetoken_weight.json"
_KNOWN_KEYS = {
    *("format", "version", "align", "shard_limit", "total_bytes", "tensors", "shards"),
    *("source_model_path", "fingerprint", "quant_format", "expert_bank_num_layers"),
}


@dataclass(frozen=True)
class Index:
    """A validated index.

    Attributes:
        root: the folder.
        extra: keys beyond the named ones, as found.
        warnings: what is odd and harmless, one sentence each.
    """

    root: Path
    entries: tuple[Entry, ...]
    shards: tuple[Shard, ...]
    shard_limit: int = SHARD_LIMIT
    source_model_path: str | None = None
    fingerprint: str | None = None
    quant_format: str | None = None
    bank_layers: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def index_bytes(index: Index) -> bytes:
    """Spell an index as SparkLab's writer does: one line, its key order; other keys of ``extra`` follow."""
    counts = Counter(entry.kind for entry in index.entries)
    entry_keys = ("name", "kind", "dtype", "shape", "global_off", "nbytes")
    document = {
        "format": "freetoken_weight",
        "version": 1,
        "align": ALIGN,
        "shard_limit": index.shard_limit,
        "total_bytes": index.total_bytes,
        "tensors": [dict(zip(entry_keys, entry, strict=True)) for entry in index.entries],
        "shards": [dict(zip(("file", "global_off", "nbytes"), shard, strict=True)) for shard in index.shards],
        "source_model_path": index.source_model_path,
        "fingerprint": index.fingerprint,
        "quant_format": index.quant_format,
        "expert_quantization": None,
        "expert_bank_num_layers": index.bank_layers,
        "counts": dict(counts),
        "copied_metadata": [],
        "external_artifacts": [],
    }
    return json.dumps(document | index.extra).encode()


def read_index(root: Path) -> Index:
    """Parse and check the index of a folder, and the lengths of its files.

    Raises:
        FormatError: no index, or one that contradicts itself or the files beside it.
    """
    path = root / INDEX_NAME
    if not path.is_file():
        raise FormatError(f"{root} has no {INDEX_NAME}, want a finished FTW folder")
    document = parse_json(path.read_bytes(), path)
    for key, want in (("format", "freetoken_weight"), ("version", 1), ("align", ALIGN)):
        if _get(document, key, type(want), path) != want:
            raise FormatError(f"{path}: {key} is {document[key]!r}, want {want!r}")
    index = Index(
        root=root,
        entries=tuple(
            _entry(item, f"{path}: tensor {i}") for i, item in enumerate(_get(document, "tensors", list, path))
        ),
        shards=tuple(_shard(item, f"{path}: shard {i}") for i, item in enumerate(_get(document, "shards", list, path))),
        shard_limit=_get(document, "shard_limit", int, path),
        source_model_path=_maybe(document, "source_model_path", str, path),
        fingerprint=_maybe(document, "fingerprint", str, path),
        quant_format=_maybe(document, "quant_format", str, path),
        bank_layers=_maybe(document, "expert_bank_num_layers", int, path),
        extra={key: value for key, value in document.items() if key not in _KNOWN_KEYS},
        warnings=tuple(_warnings(document, root)),
    )
    _check_shards(index, _get(document, "total_bytes", int, path), path)
    _check_entries(index, path)
    return index


def _get(item: dict[str, Any], key: str, kind: type, where: object) -> Any:
    value = item.get(key) if isinstance(item, dict) else None
    if type(value) is not kind:
        raise FormatError(f"{where}: {key} is {value!r}, want {kind.__name__}")
    return value


def _maybe(item: dict[str, Any], key: str, kind: type, where: object) -> Any:
    return None if item.get(key) is None else _get(item, key, kind, where)


def _entry(item: dict[str, Any], where: str) -> Entry:
    name, kind, dtype = (_get(item, key, str, where) for key in ("name", "kind", "dtype"))
    shape, offset, nbytes = (
        _get(item, key, want, where) for key, want in (("shape", list), ("global_off", int), ("nbytes", int))
    )
    if not name or not kind:
        raise FormatError(f"{where} has an empty name or kind")
    if dtype not in ITEM_BYTES:
        raise FormatError(f"{where}, {name}: dtype is {dtype!r}, want one of {', '.join(ITEM_BYTES)}")
    if any(type(size) is not int or size < 0 for size in shape):
        raise FormatError(f"{where}, {name}: shape is {shape}, want a list of sizes")
    if nbytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise FormatError(
            f"{where}, {name}: nbytes is {nbytes}, want {math.prod(shape) * ITEM_BYTES[dtype]} for {dtype}{shape}"
        )
    return Entry(name, kind, dtype, tuple(shape), offset, nbytes)


def _shard(item: dict[str, Any], where: str) -> Shard:
    file, offset, nbytes = (
        _get(item, key, want, where) for key, want in (("file", str), ("global_off", int), ("nbytes", int))
    )
    parts = PurePosixPath(file).parts
    if not parts or ".." in parts or file.startswith("/") or "\\" in file or "\0" in file:
        raise FormatError(f"{where}: file is {file!r}, want a name inside the folder")
    if nbytes <= 0 or nbytes % ALIGN:
        raise FormatError(f"{where}: nbytes is {nbytes}, want a positive multiple of {ALIGN}")
    return Shard(file, offset, nbytes)


def _check_shards(index: Index, total_bytes: int, path: Path) -> None:
    if not index.shards:
        raise FormatError(f"{path} lists no shards, want at least one")
    end = 0
    for shard in index.shards:
        file = index.root / shard.file
        if shard.offset != end:
            raise FormatError(f"{path}: {shard.file} starts at {shard.offset}, want {end}")
        end += shard.nbytes
        if not file.is_file():
            raise FormatError(f"{file} is missing, want a file of {shard.nbytes} bytes")
        if (length := file.stat().st_size) != shard.nbytes:
            raise FormatError(f"{file} is {length} bytes long, want {shard.nbytes}")
    if end != total_bytes:
        raise FormatError(f"{path}: shards hold {end} bytes, want total_bytes = {total_bytes}")
    files = [str(PurePosixPath(shard.file)) for shard in index.shards]
    if twice := sorted(file for file, count in Counter(files).items() if count > 1):
        raise FormatError(f"{path} lists {twice[0]} twice, want each shard once")
    if stale := sorted({file.name for file in index.root.glob("*.ftw")} - set(files)):
        raise FormatError(f"{index.root / stale[0]} is not in the index, want no other .ftw file in the folder")


def _check_entries(index: Index, path: Path) -> None:
    seen: set[tuple[str, str]] = set()
    for entry in index.entries:
        if (entry.kind, entry.name) in seen:
            raise FormatError(f"{path} lists {entry.kind} {entry.name} twice, want each once")
        seen.add((entry.kind, entry.name))
        if entry.offset % ALIGN or entry.offset < 0:
            raise FormatError(f"{path}: {entry.name} starts at {entry.offset}, want a multiple of {ALIGN}")
        if entry.offset + entry.nbytes > index.total_bytes:
            raise FormatError(
                f"{path}: {entry.name} ends at {entry.offset + entry.nbytes} of {index.total_bytes} bytes"
            )
    filled = sorted((entry for entry in index.entries if entry.nbytes), key=lambda entry: entry.offset)
    for before, after in pairwise(filled):
        if before.offset + before.nbytes > after.offset:
            raise FormatError(f"{path}: {before.name} and {after.name} overlap at {after.offset}")


def _warnings(document: dict[str, Any], root: Path) -> Iterable[str]:
    kinds = Counter(item.get("kind") for item in document["tensors"] if isinstance(item, dict))
    if not document.get("fingerprint"):
        yield "the index has no fingerprint"
    if "counts" in document and document["counts"] != kinds:
        yield f"counts are {document['counts']}, found {dict(kinds)}"
    for item in document.get("external_artifacts") or []:
        file = root / str(item.get("file"))
        if not file.is_file() or file.stat().st_size != item.get("nbytes"):
            yield f"{file} is not a file of {item.get('nbytes')} bytes"
