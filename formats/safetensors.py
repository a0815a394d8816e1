"""The safetensors file: a little-endian u64 header length, a JSON header, then the tensors' bytes.

    {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {str: str}}

Offsets count from the end of the header. Tensors cover the data without holes or overlaps, to the file's last byte.

Source: the safetensors format description.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from formats.dtypes import BY_SAFETENSORS, DTYPES
from formats.errors import FormatError

MAX_HEADER_BYTES = 100_000_000


class Tensor(NamedTuple):
    """Where one tensor lies. ``offset`` counts from the start of ``file``; ``dtype`` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class Spec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].size


def parse_json(text: bytes, file: Path) -> dict[str, Any]:
    """Parse one JSON object; a key that occurs twice in any object is an error.

    Raises:
        FormatError: no JSON, no object, or a repeated key; names ``file``.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        merged = dict(pairs)
        if len(merged) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise FormatError(f"{file} names {twice!r} twice, want each name once")
        return merged

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file} holds no valid JSON ({error}), want one object") from None
    if not isinstance(parsed, dict):
        raise FormatError(f"{file} holds a JSON {type(parsed).__name__}, want an object")
    return parsed


def read_header(path: Path) -> dict[str, Tensor]:
    """Read and check the header of one file.

    Args:
        path: a ``.safetensors`` file.

    Returns:
        Tensors by name, in the order of their bytes.

    Raises:
        FormatError: the header is malformed, or disagrees with itself or with the file's length.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise FormatError(
                f"{path} holds {size} bytes and states a header of {length}, want the header inside the file "
                f"and at most {MAX_HEADER_BYTES} bytes long"
            )
        header = parse_json(file.read(length), path)
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = sorted((_tensor(path, start, *item) for item in header.items()), key=lambda t: (t.offset, t.nbytes))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            what = "a hole" if tensor.offset > end else "an overlap"
            raise FormatError(f"{path} has {what} before {tensor.name}: it begins at byte {tensor.offset}, want {end}")
        end += tensor.nbytes
    if size != end:
        lack = f"{end - size} missing" if size < end else f"{size - end} too many"
        raise FormatError(f"{path} holds {size} bytes, want {end} by its header: {lack}")
    return {tensor.name: tensor for tensor in tensors}


def _tensor(path: Path, start: int, name: str, entry: Any) -> Tensor:
    """Check one header entry on its own."""
    at = f"{path}: {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise FormatError(f"{at} is {str(entry)[:80]}, want dtype, shape and data_offsets")
    dtype = BY_SAFETENSORS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise FormatError(f"{at} has dtype {entry['dtype']!r}, want one of {', '.join(BY_SAFETENSORS)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise FormatError(f"{at} has {what} {numbers!r}, want a list of integers from 0")
    nbytes = math.prod(shape) * dtype.size
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise FormatError(f"{at} has data_offsets {offsets}, want {nbytes} bytes for {entry['dtype']} {shape}")
    return Tensor(name, dtype.name, tuple(shape), path, start + offsets[0], nbytes)


def read(tensor: Tensor) -> np.ndarray:
    """Copy one tensor into memory.

    Returns:
        A new array in the storage dtype.

    Raises:
        FormatError: the file ends early.
        OSError: the file cannot be read.
    """
    out = np.empty(tensor.shape, DTYPES[tensor.dtype].storage)
    read_into(tensor, out)
    return out


def read_into(tensor: Tensor, out: np.ndarray) -> None:
    """Copy one tensor's bytes into ``out``. WRITTEN: out.

    Args:
        tensor: what to read.
        out: contiguous, ``tensor.nbytes`` long, any dtype.

    Raises:
        FormatError: the file ends early.
    """
    if out.nbytes != tensor.nbytes or not out.flags.c_contiguous:
        raise ValueError(f"out holds {out.nbytes} bytes, want {tensor.nbytes} in one piece for {tensor.name}")
    view = _as_bytes(out)
    fd = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < tensor.nbytes:
            n = os.preadv(fd, [view[done:]], tensor.offset + done)
            if n == 0:
                lack = f"{tensor.nbytes - done} more of {tensor.name}"
                raise FormatError(f"{tensor.file} ends at byte {tensor.offset + done}, want {lack}")
            done += n
    finally:
        os.close(fd)


def _as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8).data


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, np.ndarray]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a whole file at once: under a temporary name, fsynced, then renamed.

    Args:
        path: destination; replaced if it exists.
        tensors: torch's dtype name and the array in storage dtype, by tensor name.
        metadata: goes under ``__metadata__``.
    """
    specs = [Spec(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
    arrays = {name: array for name, (_, array) in tensors.items()}
    stream_safetensors(path, specs, lambda spec: [arrays[spec.name]], metadata)


def stream_safetensors(
    path: Path,
    specs: Iterable[Spec],
    make: Callable[[Spec], Iterable[np.ndarray]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file tensor by tensor, holding one piece at a time.

    Args:
        path: destination; appears only when complete.
        specs: the tensors in file order.
        make: gives the pieces of a tensor, whose bytes follow each other.
        metadata: goes under ``__metadata__``.

    Raises:
        FormatError: the pieces of a tensor are not as long as it is.
    """
    specs = list(specs)
    with _replaced(path) as temporary, temporary.open("wb") as file:
        file.write(_header(specs, metadata))
        for spec in specs:
            written = 0
            for piece in make(spec):
                written += file.write(_as_bytes(np.ascontiguousarray(piece)))
            if written != spec.nbytes:
                raise FormatError(f"{spec.name}: pieces hold {written} bytes, want {spec.nbytes}")
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Give a temporary name beside ``path``; rename it if the body succeeds, else remove it."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _header(specs: list[Spec], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for spec in specs:
        if spec.name in header:
            raise FormatError(f"{spec.name} is given twice, want each name once")
        end = begin + spec.nbytes
        header[spec.name] = {
            "dtype": DTYPES[spec.dtype].safetensors,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
