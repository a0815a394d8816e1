"""Open an FTW folder and look at its tensors and expert rows without copying them."""

from pathlib import Path
from typing import Any

import numpy as np

from formats.banks import RowFormat, find_banks
from formats.dtypes import DTYPES
from formats.errors import FormatError
from formats.ftw import Index, read_index
from formats.layout import Entry, Extent, extents
from formats.safetensors import parse_json


class FtwReader:
    """Owns read-only maps of the shard files.

    Attributes:
        index: the checked index.
        layers: layers that have experts.
        experts: experts in each of them.
        banks: bank names in the order of the schema.
        names: names of the resident tensors.
        config: the model's config.json, empty where the folder has none.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._banks = find_banks(index)
        self.layers, self.experts = self._banks.layers, self._banks.experts
        self.banks = tuple(self._banks.rows)
        self._entries = {(entry.kind, entry.name): entry for entry in index.entries}
        self.names = frozenset(name for kind, name in self._entries if kind == "weight")
        path = index.root / "config.json"
        self.config: dict[str, Any] = parse_json(path.read_bytes(), path) if path.is_file() else {}
        self._maps = {shard.file: np.memmap(index.root / shard.file, np.uint8, "r") for shard in index.shards}

    @property
    def quant_format(self) -> str | None:
        return self.index.quant_format

    def tensor(self, name: str, kind: str = "weight") -> tuple[str, np.ndarray]:
        """Give a tensor's dtype and values.

        Returns:
            torch's name of the dtype, and a read-only array in numpy's storage type: bf16 as uint16, FP8 as uint8. It
            is a view of the file, or a copy where the tensor crosses files.

        Raises:
            FormatError: no such tensor.
        """
        entry = self._entry(name, kind)
        return entry.dtype, self._array(entry.offset, entry.nbytes, RowFormat(entry.dtype, entry.shape))

    def shape(self, name: str, kind: str = "weight") -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entry(name, kind).shape

    def row_format(self, bank: str, layer: int = 0) -> RowFormat:
        """dtype and shape of one expert's row; all layers agree."""
        self._row_offset(bank, layer, 0)
        return self._banks.rows[bank]

    def expert_row(self, bank: str, layer: int, expert: int) -> np.ndarray:
        """One expert's row of a bank: a read-only view, or a copy where it crosses files."""
        row = self.row_format(bank)
        return self._array(self._row_offset(bank, layer, expert), row.nbytes, row)

    def row_extents(self, bank: str, layer: int, expert: int) -> list[Extent]:
        """Where an expert's row lies: (file, offset, bytes), two of them where it crosses files."""
        offset = self._row_offset(bank, layer, expert)
        return extents(self.index.shards, offset, self._banks.rows[bank].nbytes)

    def _entry(self, name: str, kind: str) -> Entry:
        if (kind, name) not in self._entries:
            raise FormatError(f"{self.index.root} has no {kind} {name}")
        return self._entries[kind, name]

    def _row_offset(self, bank: str, layer: int, expert: int) -> int:
        place = self._banks.places.get((bank, layer))
        if place is None or not 0 <= expert < self.experts:
            raise FormatError(
                f"{self.index.root} has no row ({bank}, {layer}, {expert}), "
                f"want one of {self.layers} layers of {self.experts} experts and a bank of {', '.join(self.banks)}"
            )
        return place.entry.offset + (place.first_row + expert) * self._banks.rows[bank].nbytes

    def _array(self, offset: int, nbytes: int, row: RowFormat) -> np.ndarray:
        pieces = [self._maps[file][at : at + n] for file, at, n in extents(self.index.shards, offset, nbytes)]
        data = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint8), *pieces])
        data.flags.writeable = False
        return data.view(DTYPES[row.dtype].storage).reshape(row.shape)


def open_ftw(path: Path | str) -> FtwReader:
    """Check a folder's index and files, and open it.

    Raises:
        FormatError: the folder is not a finished FTW folder, or not what its index says.
    """
    return FtwReader(read_index(Path(path)))
