"""Every lie of a folder is one FormatError at open, at once, that names the thing."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.errors import FormatError
from formats.ftw import INDEX_NAME
from formats.layout import Spec, layout
from formats.reader import open_ftw

FIXTURES = Path(__file__).parents[1] / "fixtures"
Document = dict[str, Any]


def refuse(root: Path, message: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(FormatError, match=message):
        open_ftw(root)
    assert time.perf_counter() - begin < 1


def copy(name: str, tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / name, tmp_path / name)


def without(document: Document, name: str) -> None:
    document["tensors"] = [t for t in document["tensors"] if t["name"] != name]


LIES: dict[str, tuple[Callable[[Document], object], str]] = {
    "format": (lambda d: d.update(format="gguf"), "format is 'gguf', want 'freetoken_weight'"),
    "version": (lambda d: d.update(version=2), "version is 2, want 1"),
    "version as text": (lambda d: d.update(version="1"), "version is '1', want int"),
    "version as bool": (lambda d: d.update(version=True), "version is True, want int"),
    "align": (lambda d: d.update(align=512), "align is 512, want 4096"),
    "no tensors": (lambda d: d.pop("tensors"), "tensors is None, want list"),
    "tensors no list": (lambda d: d.update(tensors={}), "tensors is {}, want list"),
    "tensor no object": (lambda d: d["tensors"].append(3), "tensor 16: name is None, want str"),
    "quant_format no text": (lambda d: d.update(quant_format=4), "quant_format is 4, want str"),
    "total": (lambda d: d.update(total_bytes=188417), "hold 188416 bytes, want total_bytes = 188417"),
    "no shards": (lambda d: d.update(shards=[]), "no shards"),
    "gap": (lambda d: d["shards"][1].update(global_off=36864), "00001.ftw starts at 36864, want 32768"),
    "odd shard": (lambda d: d["shards"][1].update(nbytes=16383), "nbytes is 16383, want a positive multiple"),
    "longer shard": (lambda d: d["shards"][6].update(nbytes=24576), "00006.ftw is 20480 bytes long, want 24576"),
    "absent shard": (lambda d: d["shards"][2].update(file="freetoken-00009.ftw"), "00009.ftw is missing"),
    "same shard twice": (
        lambda d: d["shards"][2].update(file="freetoken-00000.ftw"),
        "lists freetoken-00000.ftw twice",
    ),
    "parent": (lambda d: d["shards"][0].update(file="../secret.ftw"), "'../secret.ftw', want a name inside"),
    "parent inside": (lambda d: d["shards"][0].update(file="a/../../b.ftw"), "want a name inside"),
    "absolute": (lambda d: d["shards"][0].update(file="/etc/passwd"), "'/etc/passwd', want a name inside"),
    "empty file name": (lambda d: d["shards"][0].update(file=""), "file is '', want a name inside"),
    "unlisted shard": (
        lambda d: d.update(shards=d["shards"][:-1], total_bytes=167936),
        "00006.ftw is not in the index",
    ),
    "duplicate": (
        lambda d: d["tensors"][3].update(name="model.embed_tokens.weight", shape=[1]),
        "embed_tokens.weight twice",
    ),
    "empty name": (lambda d: d["tensors"][0].update(name=""), "tensor 0 has an empty name"),
    "empty kind": (lambda d: d["tensors"][0].update(kind=""), "tensor 0 has an empty name or kind"),
    "dtype": (lambda d: d["tensors"][0].update(dtype="bf16"), "embed_tokens.weight: dtype is 'bf16', want one of"),
    "shape": (lambda d: d["tensors"][0].update(shape=[300, 81]), "nbytes is 48000, want 48600"),
    "negative shape": (lambda d: d["tensors"][0].update(shape=[-300, -80]), "want a list of sizes"),
    "fractional shape": (lambda d: d["tensors"][0].update(shape=[300.0, 80]), "want a list of sizes"),
    "misaligned": (lambda d: d["tensors"][2].update(global_off=81928), "starts at 81928, want a multiple of 4096"),
    "negative offset": (lambda d: d["tensors"][2].update(global_off=-4096), "starts at -4096"),
    "overlap": (lambda d: d["tensors"][2].update(global_off=77824), "q_proj.weight and .*scale_inv overlap at 77824"),
    "out of range": (lambda d: d["tensors"][15].update(global_off=188416), "ends at 189216 of 188416"),
    "missing bank": (lambda d: without(d, "down_scale#L00001"), "bank down_scale has no layer 1, want layers 0 to 1"),
    "missing layer": (lambda d: d["tensors"][-1].update(name="down_global#L00002"), "hold 3 layers, want .* = 2"),
    "layers": (lambda d: d.update(expert_bank_num_layers=3), "hold 2 layers, want expert_bank_num_layers = 3"),
    "foreign bank": (
        lambda d: d["tensors"][3].update(kind="experts_bank", name="alpha#L00000"),
        "bank alpha is not in nvfp4",
    ),
    "flat and per layer": (
        lambda d: d["tensors"][0].update(kind="experts_bank", name="down_scale"),
        "down_scale of layer 0 is stored twice",
    ),
    "experts": (
        lambda d: d["tensors"][10].update(shape=[4, 96, 50]),
        r"gate_up_packed#L00001 .* want uint8\[5, 96, 40\]",
    ),
    "bank dtype": (lambda d: d["tensors"][5].update(dtype="uint8"), "gate_up_scale#L00000 .* is uint8"),
    "widths": (lambda d: d["tensors"][4].update(shape=[5, 40, 96]), r"want float8_e4m3fn\[5, 40, 5\]|gate_up_packed"),
    "banks without format": (lambda d: d.update(quant_format=None), "quant_format is None, want one of"),
    "format without banks": (
        lambda d: d.update(tensors=d["tensors"][:4], expert_bank_num_layers=None),
        "has no layer|there are no banks",
    ),
    "format of another": (lambda d: d.update(quant_format="nvfp4_b12x"), "quant_format is 'nvfp4_b12x'"),
    "format swapped": (lambda d: d.update(quant_format="bf16"), "bank gate_up has no layer 0"),
}


@pytest.mark.parametrize("lie", LIES)
def test_index_lies(lie: str, tmp_path: Path) -> None:
    root = copy("ftw-sample-many-shards", tmp_path)
    document = json.loads((root / INDEX_NAME).read_bytes())
    change, message = LIES[lie]
    change(document)
    (root / INDEX_NAME).write_text(json.dumps(document))
    refuse(root, message)


@pytest.mark.parametrize("cut", [1, 4096, 16384])
@pytest.mark.parametrize("shard", [0, 3, 6])
def test_truncated_shard(shard: int, cut: int, tmp_path: Path) -> None:
    """B13: never read as zeros."""
    root = copy("ftw-sample-many-shards", tmp_path)
    path = root / f"freetoken-{shard:05d}.ftw"
    length = path.stat().st_size
    os.truncate(path, length - cut)
    refuse(root, f"{path.name} is {length - cut} bytes long, want {length}")


def test_longer_shard(tmp_path: Path) -> None:
    root = copy("ftw-sample-many-shards", tmp_path)
    with (root / "freetoken-00001.ftw").open("ab") as file:
        file.write(b"\0")
    refuse(root, "00001.ftw is 16385 bytes long, want 16384")


def test_missing_and_stale_files(tmp_path: Path) -> None:
    """B14."""
    root = copy("ftw-sample-many-shards", tmp_path)
    (root / "freetoken-00007.ftw").write_bytes(bytes(4096))
    refuse(root, "00007.ftw is not in the index")
    (root / "freetoken-00007.ftw").unlink()
    (root / "freetoken-00003.ftw").unlink()
    refuse(root, "00003.ftw is missing, want a file of 32768 bytes")
    (root / INDEX_NAME).unlink()
    refuse(root, f"has no {INDEX_NAME}")
    refuse(tmp_path / "nowhere", f"has no {INDEX_NAME}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "holds no valid JSON"),
        (b"[1]", "holds a JSON list"),
        (b'{"format": "freetoken_weight"', "holds no valid JSON"),
        (b"\xff\xfe", "holds no valid JSON"),
        (b"[" * 100_000, "holds no valid JSON"),
        (b'{"a": 1, "a": 2}', "names 'a' twice"),
    ],
)
def test_broken_index_file(text: bytes, message: str, tmp_path: Path) -> None:
    root = copy("ftw-sample-one-shard", tmp_path)
    (root / INDEX_NAME).write_bytes(text)
    refuse(root, message)


def test_broken_config(tmp_path: Path) -> None:
    root = copy("ftw-sample-one-shard", tmp_path)
    (root / "config.json").write_text("{")
    refuse(root, "config.json holds no valid JSON")


def test_flat_banks_need_a_layer_count(tmp_path: Path) -> None:
    root = copy("ftw-flat-banks", tmp_path)
    document = json.loads((root / INDEX_NAME).read_bytes())
    for layers, message in ((None, "a known number of layers"), (3, "want rows for 3 layers"), (0, "a known number")):
        (root / INDEX_NAME).write_text(json.dumps(document | {"expert_bank_num_layers": layers}))
        refuse(root, message)


@pytest.mark.parametrize("limit", [0, -4096, 4095, 5000])
def test_shard_limit(limit: int) -> None:
    with pytest.raises(FormatError, match=f"shard limit is {limit} bytes"):
        layout([Spec("a", "weight", "uint8", (1,))], limit)
