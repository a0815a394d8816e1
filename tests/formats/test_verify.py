"""Damage is found and named, down to the expert row."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from formats.convert import convert
from formats.digests import DIGESTS_NAME
from formats.errors import FormatError
from formats.ftw import INDEX_NAME
from formats.layout import extents
from formats.reader import open_ftw
from formats.verify import verify
from tests.reference.sources import make_source

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    make_source("k3", root / "source")
    convert(root / "source", root / "ftw", shard_limit=16 * 1024)
    return root / "ftw"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "copy")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_sound_folder(made: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    report = verify(made, progress=lambda *call: calls.append(call))
    index = open_ftw(made).index
    assert report.checked == "structure and digests"
    assert report.digests == sum(5 if entry.kind == "experts_bank" else 1 for entry in index.entries)
    assert report.bytes_read == calls[-1][0] == calls[-1][1] == sum(entry.nbytes for entry in index.entries)
    assert (report.fingerprint, report.warnings) == (index.fingerprint, ())


def test_every_kind_of_entry_is_watched(folder: Path) -> None:
    """One bit of each tensor, and of one row of each bank: the tensor, file and offset are named."""
    index, rng = open_ftw(folder).index, random.Random(1)
    chosen = [*rng.sample([e for e in index.entries if e.kind == "weight"], 20), *index.entries[-18:]]
    for entry in chosen:
        at = rng.randrange(entry.nbytes)
        ((file, offset, _),) = extents(index.shards, entry.offset + at, 1)
        flip(folder / file, offset)
        row = at // (entry.nbytes // entry.shape[0])
        name = f"{entry.name}, expert row {row}," if entry.kind == "experts_bank" else entry.name
        with pytest.raises(FormatError) as error:
            verify(folder)
        assert f": {name} of " in str(error.value)
        start = entry.offset + (row * (entry.nbytes // entry.shape[0]) if entry.kind == "experts_bank" else 0)
        first_file, first_offset, _ = extents(index.shards, start, 1)[0]
        assert str(error.value).startswith(f"{folder / first_file} at {first_offset}: ")
        flip(folder / file, offset)
    verify(folder)


def test_the_first_of_two_is_named(folder: Path) -> None:
    index = open_ftw(folder).index
    for number in (40, 3):
        ((file, offset, _),) = extents(index.shards, index.entries[number].offset, 1)
        flip(folder / file, offset)
    with pytest.raises(FormatError, match=f": {index.entries[3].name} of "):
        verify(folder)


def test_swapped_digests_break_the_fingerprint(folder: Path) -> None:
    digests = np.load(folder / DIGESTS_NAME)
    np.save(folder / DIGESTS_NAME, digests[::-1])
    with pytest.raises(FormatError, match=r"fingerprint is [0-9a-f]{16}, want [0-9a-f]{16} by the digests"):
        verify(folder)


@pytest.mark.parametrize("rows", [-1, 1])
def test_digests_of_another_length(rows: int, folder: Path) -> None:
    digests = np.load(folder / DIGESTS_NAME)
    np.save(folder / DIGESTS_NAME, np.resize(digests, (len(digests) + rows, 16)))
    with pytest.raises(FormatError, match=r"rowstream_digests.npy is uint8\[\d+, 16\], want uint8"):
        verify(folder)


@pytest.mark.parametrize("text", [b"", b"\x93NUMPY", b"junk"])
def test_digests_that_are_no_numpy_file(text: bytes, folder: Path) -> None:
    (folder / DIGESTS_NAME).write_bytes(text)
    with pytest.raises(FormatError, match=r"rowstream_digests.npy is not a numpy file"):
        verify(folder)


def test_a_shard_that_shrinks_while_it_is_read(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", lambda _fd, _nbytes, _offset: b"")
    with pytest.raises(FormatError, match=r"freetoken-00000.ftw ends at 0, want \d+ bytes more"):
        verify(made)


def test_structure_comes_first(folder: Path) -> None:
    os.truncate(folder / "freetoken-00001.ftw", 4096)
    with pytest.raises(FormatError, match=r"00001.ftw is 4096 bytes long"):
        verify(folder)


def test_foreign_folder_and_fingerprint(tmp_path: Path) -> None:
    """No digests, another program's fingerprint: reported, not judged."""
    root = shutil.copytree(FIXTURES / "ftw-sample-many-shards", tmp_path / "copy")
    report = verify(root)
    assert (report.checked, report.digests) == ("no digests: structure only", 0)
    assert report.fingerprint == "0123456789abcdef"
    document = json.loads((root / INDEX_NAME).read_bytes()) | {"external_artifacts": [{"file": "big", "nbytes": 9}]}
    (root / INDEX_NAME).write_text(json.dumps(document))
    assert verify(root).warnings == (f"{root / 'big'} is not a file of 9 bytes",)
