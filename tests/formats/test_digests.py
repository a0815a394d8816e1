"""The content fingerprint and the rows that digests belong to."""

from pathlib import Path

import numpy as np
import pytest

from formats.digests import RowDigests, fingerprint, load_digests, n_digests, save_digests
from formats.ftw import Index
from formats.layout import Entry, Shard, Spec, layout

SPECS = (
    Spec("a", "weight", "uint8", (4, 8)),
    Spec("b", "weight", "bfloat16", (3,)),
    Spec("down#L00000", "experts_bank", "bfloat16", (5, 2, 2)),
    Spec("c", "weight", "float32", ()),
)


def entries(*specs: Spec) -> tuple[Entry, ...]:
    return layout(specs)[0]


def table() -> np.ndarray:
    return np.arange(8 * 16, dtype=np.uint8).reshape(8, 16)


def test_one_digest_a_weight_and_one_a_row() -> None:
    assert [n_digests(entry) for entry in entries(*SPECS)] == [1, 1, 5, 1]


def test_fingerprint_sees_every_digest_bit() -> None:
    made = entries(*SPECS)
    seen = {fingerprint(made, table())}
    for i in range(8):
        for j in (0, 15):
            digests = table()
            digests[i, j] ^= 1
            seen.add(fingerprint(made, digests))
    assert len(seen) == 17
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in seen)


@pytest.mark.parametrize("field", [{"name": "z"}, {"kind": "other"}, {"dtype": "int8"}, {"shape": (8, 4)}])
def test_fingerprint_sees_what_the_digests_are_of(field: dict[str, object]) -> None:
    changed = (SPECS[0]._replace(**field), *SPECS[1:])
    assert fingerprint(entries(*changed), table()) != fingerprint(entries(*SPECS), table())


def test_fingerprint_does_not_see_order_or_offsets() -> None:
    digests = table()
    turned = np.concatenate([digests[7:], digests[2:7], digests[1:2], digests[:1]])
    moved = [entry._replace(offset=entry.offset + 8192) for entry in entries(*SPECS[::-1])]
    assert fingerprint(moved, turned) == fingerprint(entries(*SPECS), digests)


def test_side_file(tmp_path: Path) -> None:
    index = Index(tmp_path, entries(*SPECS), (Shard("freetoken-00000.ftw", 0, 16384),))
    assert load_digests(index) is None
    save_digests(tmp_path, table())
    np.testing.assert_array_equal(load_digests(index), table())
    raw = (tmp_path / "rowstream_digests.npy").read_bytes()
    assert raw.startswith(b"\x93NUMPY")
    assert raw.endswith(table().tobytes())


@pytest.mark.parametrize("step", [1, 7, 64, 1000])
def test_row_digests_do_not_depend_on_the_blocks(step: int) -> None:
    data = bytes(range(240))
    whole = RowDigests(240, 5)
    whole.update(memoryview(data))
    cut = RowDigests(240, 5)
    for i in range(0, 240, step):
        cut.update(memoryview(data[i : i + step]))
    assert cut.done == whole.done
    assert len(set(whole.done)) == 5
