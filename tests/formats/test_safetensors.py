"""Safetensors files: agreement with the format's own package, and every lie a header can tell."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.dtypes import DTYPES
from formats.errors import FormatError
from formats.safetensors import Spec, read, read_header, read_into, stream_safetensors, write_safetensors

RANDOM = np.random.Generator(np.random.PCG64(1))


def one_of_each() -> dict[str, tuple[str, np.ndarray]]:
    """A tensor of every dtype, odd shapes, an empty one and a scalar among them."""
    tensors = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        shape = [(3, 5), (), (0, 4), (7,), (1, 2, 3)][i % 5]
        count = int(np.prod(shape)) * dtype.size
        raw = RANDOM.integers(0, 2, count, dtype=np.uint8)
        tensors[f"t.{name}"] = (name, np.frombuffer(raw.tobytes(), dtype.storage).reshape(shape))
    return tensors


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.safetensors", one_of_each()
    write_safetensors(path, tensors, {"format": "pt"})
    found = read_header(path)
    assert set(found) == set(tensors)
    for name, (dtype, array) in tensors.items():
        got = read(found[name])
        assert (found[name].dtype, got.dtype, got.shape) == (dtype, DTYPES[dtype].storage, array.shape)
        assert got.tobytes() == array.tobytes()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_safetensors_package_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors")
    torch_files = pytest.importorskip("safetensors.torch")
    ours, theirs, tensors = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", one_of_each()
    write_safetensors(ours, tensors, {"format": "pt"})
    loaded = torch_files.load_file(ours)
    with package.safe_open(ours, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    torch_files.save_file(loaded, theirs)
    found = read_header(theirs)
    assert set(loaded) == set(found) == set(tensors)
    for name, (dtype, array) in tensors.items():
        assert str(loaded[name].dtype) == f"torch.{dtype}" and tuple(loaded[name].shape) == array.shape
        assert read(found[name]).tobytes() == array.tobytes()


def test_data_begin_at_a_multiple_of_eight(tmp_path: Path) -> None:
    for n in range(1, 9):
        write_safetensors(tmp_path / "a.safetensors", {"x" * n: ("uint8", np.zeros(3, np.uint8))})
        assert read_header(tmp_path / "a.safetensors")["x" * n].offset % 8 == 0


@pytest.mark.parametrize("cut", [1, 4096, 8000])
def test_truncation_is_found_at_once(tmp_path: Path, cut: int) -> None:
    """B13."""
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": ("float32", np.ones(10, np.float32)), "b": ("float32", np.ones(2000, np.float32))})
    size = path.stat().st_size
    os.truncate(path, size - cut)
    with pytest.raises(FormatError, match=rf"a\.safetensors holds {size - cut} bytes, want {size} .*: {cut} missing"):
        read_header(path)


def test_a_file_that_shrinks_after_opening_is_a_short_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": ("float32", np.ones(10, np.float32))})
    tensor = read_header(path)["a"]
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(FormatError, match=r"ends at byte \d+, want 4 more of a"):
        read(tensor)


def test_partial_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, array = tmp_path / "a.safetensors", np.arange(100, dtype=np.float32)
    write_safetensors(path, {"a": ("float32", array)})
    tensor, whole = read_header(path)["a"], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: whole(fd, [views[0][:7]], offset))
    assert np.array_equal(read(tensor), array)


def test_read_into_wants_the_right_room(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": ("float32", np.ones((4, 4), np.float32))})
    tensor = read_header(path)["a"]
    for out in (np.empty(15, np.float32), np.empty((8, 4), np.float32)[::2]):
        with pytest.raises(ValueError, match="want 64 in one piece"):
            read_into(tensor, out)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LIES: dict[str, tuple[Any, bytes, str]] = {
    "no json": (b"{not json", b"", "no valid JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "no valid JSON"),
    "deep": (b"[" * 100_000, b"", "no valid JSON"),
    "a list": ([1], b"", "holds a JSON list, want an object"),
    "name twice": (b'{"a": %b, "a": %b}' % ((json.dumps(ENTRY).encode(),) * 2), bytes(8), "names 'a' twice"),
    "dtype twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', b"", "names 'dtype' twice"),
    "no object": ({"a": 3}, b"", "a is 3, want dtype, shape and data_offsets"),
    "key missing": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "want dtype, shape and data_offsets"),
    "dtype unknown": ({"a": ENTRY | {"dtype": "F4"}}, bytes(8), "dtype 'F4', want one of"),
    "dtype no string": ({"a": ENTRY | {"dtype": ["F32"]}}, bytes(8), "want one of"),
    "negative shape": ({"a": ENTRY | {"shape": [-1, -2]}}, bytes(8), "shape .*want a list of integers from 0"),
    "float shape": ({"a": ENTRY | {"shape": [2.0]}}, bytes(8), "want a list of integers"),
    "boolean shape": ({"a": ENTRY | {"shape": [True, 2]}}, bytes(8), "want a list of integers"),
    "shape no list": ({"a": ENTRY | {"shape": 2}}, bytes(8), "want a list of integers"),
    "too few bytes": ({"a": ENTRY | {"shape": [3]}}, bytes(8), r"data_offsets \[0, 8\], want 12 bytes for F32 \[3\]"),
    "backwards": ({"a": ENTRY | {"data_offsets": [8, 0]}}, bytes(8), "want 8 bytes"),
    "three offsets": ({"a": ENTRY | {"data_offsets": [0, 8, 8]}}, bytes(8), "want 8 bytes"),
    "hole": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, bytes(20), "a hole before b"),
    "hole at first": ({"a": ENTRY | {"data_offsets": [4, 12]}}, bytes(12), "a hole before a"),
    "overlap": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, bytes(12), "an overlap before b"),
    "twice the same bytes": ({"a": ENTRY, "b": ENTRY}, bytes(8), "an overlap before b"),
    "too long": ({"a": ENTRY}, bytes(9), "holds .* bytes, want .* 1 too many"),
    "too short": ({"a": ENTRY}, bytes(7), "1 missing"),
}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused(tmp_path: Path, lie: str) -> None:
    header, data, message = LIES[lie]
    path = tmp_path / "bad.safetensors"
    write_raw(path, header, data)
    with pytest.raises(FormatError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("stated", [0, 100, 1 << 40, (1 << 64) - 1])
def test_header_length_beyond_the_file(tmp_path: Path, stated: int) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(stated.to_bytes(8, "little") + b"{}"[: stated and 2])
    with pytest.raises(FormatError, match=r"bad\.safetensors"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7])
def test_file_too_short_for_a_length(tmp_path: Path, size: int) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(FormatError, match=f"holds {size} bytes"):
        read_header(path)


def fail(spec: Spec) -> list[np.ndarray]:
    raise KeyboardInterrupt


def short(spec: Spec) -> list[np.ndarray]:
    return [np.zeros(3, np.float32)]


@pytest.mark.parametrize(("make", "error"), [(fail, KeyboardInterrupt), (short, FormatError)])
def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, make: Callable[[Spec], list[np.ndarray]], error: type[BaseException]
) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": ("uint8", np.zeros(3, np.uint8))})
    before = path.read_bytes()
    with pytest.raises(error):
        stream_safetensors(path, [Spec("a", "float32", (4,))], make)
    assert [file.name for file in tmp_path.iterdir()] == [path.name] and path.read_bytes() == before


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    spec = Spec("a", "float32", (3,))
    with pytest.raises(FormatError, match="a is given twice"):
        stream_safetensors(tmp_path / "a.safetensors", [spec, spec], short)
