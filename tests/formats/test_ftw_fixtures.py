"""Folders written by FreeToken's own writer: read to the byte, and written again to the byte.

Byte i of the raw bytes of tensor NAME is ``(i * 131 + 7 * sum(bytes of NAME) + i // 257) mod 251``.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from formats.errors import FormatError
from formats.ftw import INDEX_NAME, Index, index_bytes, read_index
from formats.layout import Spec, layout, padded
from formats.reader import open_ftw

FIXTURES = Path(__file__).parents[1] / "fixtures"
SAMPLES = ("ftw-sample-one-shard", "ftw-sample-many-shards")
READABLE = (*SAMPLES, "ftw-flat-banks", "ftw-edge-cases")


def formula(name: str, nbytes: int) -> np.ndarray:
    i = np.arange(nbytes)
    return ((i * 131 + 7 * sum(name.encode()) + i // 257) % 251).astype(np.uint8)


def raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8)


@pytest.mark.parametrize("folder", READABLE)
def test_every_tensor_holds_the_formula(folder: str) -> None:
    reader = open_ftw(FIXTURES / folder)
    for entry in reader.index.entries:
        dtype, array = reader.tensor(entry.name, entry.kind)
        assert (dtype, array.shape) == (entry.dtype, entry.shape)
        assert not array.flags.writeable
        np.testing.assert_array_equal(raw(array), formula(entry.name, entry.nbytes), err_msg=entry.name)


@pytest.mark.parametrize("folder", READABLE)
def test_expert_rows_and_their_extents(folder: str) -> None:
    reader = open_ftw(FIXTURES / folder)
    flat = folder == "ftw-flat-banks"
    split = 0
    for bank in reader.banks:
        row = reader.row_format(bank)
        for layer in range(reader.layers):
            name, first = (bank, layer * reader.experts) if flat else (f"{bank}#L{layer:05d}", 0)
            whole = formula(name, 2 * reader.experts * row.nbytes)
            for expert in range(reader.experts):
                want = whole[(first + expert) * row.nbytes :][: row.nbytes]
                got = reader.expert_row(bank, layer, expert)
                assert got.shape == row.shape
                assert not got.flags.writeable
                np.testing.assert_array_equal(raw(got), want)
                pieces = reader.row_extents(bank, layer, expert)
                split += len(pieces) > 1
                read = b"".join((FIXTURES / folder / file).read_bytes()[at : at + n] for file, at, n in pieces)
                assert read == want.tobytes()
    assert bool(split) == (folder == "ftw-edge-cases")


def test_what_the_readmes_say() -> None:
    edge = open_ftw(FIXTURES / "ftw-edge-cases")
    assert (edge.layers, edge.experts, edge.quant_format) == (2, 5, "nvfp4")
    assert edge.banks == tuple(
        f"{half}_{part}" for half in ("gate_up", "down") for part in ("packed", "scale", "global")
    )
    assert edge.names == {"scalar", "exact", "big", "tail"}
    assert edge.shape("scalar") == ()
    assert edge.config == {}
    assert edge.row_format("gate_up_scale", 1) == ("float8_e4m3fn", (96, 5))
    assert edge.row_format("gate_up_packed").nbytes == 96 * 40


def test_a_layout_of_one_card_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match=r"ftw-alpha-layout: quant_format is 'nvfp4_marlin', want one of nvfp4"):
        open_ftw(FIXTURES / "ftw-alpha-layout")


@pytest.mark.parametrize(
    ("bank", "layer", "expert"), [("gate_up_packed", 2, 0), ("down_scale", 0, 5), ("down", 0, 0), ("down_scale", 0, -1)]
)
def test_no_such_row(bank: str, layer: int, expert: int) -> None:
    reader = open_ftw(FIXTURES / "ftw-edge-cases")
    with pytest.raises(FormatError, match="has no row"):
        reader.expert_row(bank, layer, expert)


@pytest.mark.parametrize("folder", SAMPLES)
def test_a_fresh_write_is_identical(folder: str) -> None:
    """Index and shards, from names and shapes alone."""
    root = FIXTURES / folder
    document = json.loads((root / INDEX_NAME).read_bytes())
    specs = [Spec(t["name"], t["kind"], t["dtype"], tuple(t["shape"])) for t in document["tensors"]]
    entries, shards = layout(specs, document["shard_limit"])
    index = Index(root, entries, shards, document["shard_limit"], "sample", "0123456789abcdef", "nvfp4", 2)
    assert index_bytes(index) == (root / INDEX_NAME).read_bytes()
    region = b"".join(formula(e.name, e.nbytes).tobytes() + bytes(padded(e.nbytes) - e.nbytes) for e in entries)
    for shard in shards:
        assert region[shard.offset : shard.offset + shard.nbytes] == (root / shard.file).read_bytes()


@pytest.mark.parametrize("folder", READABLE)
def test_layout_of_every_fixture(folder: str) -> None:
    index = read_index(FIXTURES / folder)
    specs = [Spec(*entry[:4]) for entry in index.entries]
    assert layout(specs, index.shard_limit) == (index.entries, index.shards)


def test_unknown_keys_are_kept(tmp_path: Path) -> None:
    root = shutil.copytree(FIXTURES / "ftw-sample-one-shard", tmp_path / "copy")
    document = json.loads((root / INDEX_NAME).read_bytes()) | {
        "side_files": ["a"],
        "fingerprint": None,
        "counts": {"weight": 4},
    }
    (root / INDEX_NAME).write_text(json.dumps(document, indent=2))
    index = read_index(root)
    assert index.extra["side_files"] == ["a"]
    assert index.warnings == (
        "the index has no fingerprint",
        "counts are {'weight': 4}, found {'weight': 3, 'experts_bank': 12}",
    )
    assert json.loads(index_bytes(dataclasses.replace(index, fingerprint="x")))["side_files"] == ["a"]
