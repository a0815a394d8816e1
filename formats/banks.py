"""Expert banks: which tensors hold the experts' rows, and where one row starts.

A bank is one matrix of all experts, stored per layer as ``NAME#L00007`` [E, row] or flat as ``NAME`` [L * E, row].
Layers count those that have experts, from 0; their order in the file means nothing.

Letters: f expert hidden width, z width of an expert's input and output.
"""

import math
import re
from typing import NamedTuple

from formats.errors import FormatError
from formats.ftw import Index
from formats.layout import ITEM_BYTES, Entry

KIND = "experts_bank"
FORMATS = ("nvfp4", "mxfp4_triton", "bf16")
_PER_LAYER = re.compile(r"(.+)#L(\d{5})")


class RowFormat(NamedTuple):
    """One expert's row of a bank."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Place(NamedTuple):
    """Entry with a layer's rows of a bank, and the number of the first of them in it."""

    entry: Entry
    first_row: int


class Banks(NamedTuple):
    """All banks of a folder; ``rows`` is in the order of the schema, ``places`` is by (bank, layer)."""

    layers: int
    experts: int
    rows: dict[str, RowFormat]
    places: dict[tuple[str, int], Place]


def bank_rows(quant_format: str, z: int, f: int) -> dict[str, RowFormat]:
    """Banks of a format in schema order.

    Args:
        quant_format: one of ``FORMATS``.
        z: width of an expert's input and output.
        f: its hidden width.
    """
    if quant_format == "nvfp4":
        up, down, packed, scale, whole = (2 * f, z), (z, f), "uint8", "float8_e4m3fn", "float16"
        return {
            "gate_up_packed": RowFormat(packed, (up[0], z // 2)),
            "gate_up_scale": RowFormat(scale, (up[0], z // 16)),
            "gate_up_global": RowFormat(whole, (up[0],)),
            "down_packed": RowFormat(packed, (down[0], f // 2)),
            "down_scale": RowFormat(scale, (down[0], f // 16)),
            "down_global": RowFormat(whole, (down[0],)),
        }
    if quant_format == "mxfp4_triton":
        return {
            "gate_up_blocks": RowFormat("uint8", (z // 2, 2 * f)),
            "gate_up_scales": RowFormat("uint8", (z // 32, 2 * f)),
            "gate_up_bias": RowFormat("bfloat16", (2 * f,)),
            "down_blocks": RowFormat("uint8", (f // 2, z)),
            "down_scales": RowFormat("uint8", (f // 32, z)),
            "down_bias": RowFormat("bfloat16", (z,)),
        }
    if quant_format == "bf16":
        return {"gate_up": RowFormat("bfloat16", (2 * f, z)), "down": RowFormat("bfloat16", (z, f))}
    raise FormatError(f"quant_format is {quant_format!r}, want one of {', '.join(FORMATS)}")


def find_banks(index: Index) -> Banks:
    """Group the bank entries of an index by bank and layer, and check that none is missing or odd.

    Raises:
        FormatError: a format of another program's kernel, or banks that do not fit together.
    """
    stored = [entry for entry in index.entries if entry.kind == KIND]
    if index.quant_format is None and not stored:
        return Banks(0, 0, {}, {})
    if index.quant_format not in FORMATS:
        raise FormatError(f"{index.root}: quant_format is {index.quant_format!r}, want one of {', '.join(FORMATS)}")
    names = tuple(bank_rows(index.quant_format, 0, 0))
    places = _places(index, stored)
    layers = 1 + max((layer for _, layer in places), default=-1)
    if index.bank_layers is not None and layers != index.bank_layers:
        raise FormatError(
            f"{index.root}: banks hold {layers} layers, want expert_bank_num_layers = {index.bank_layers}"
        )
    for bank in names:
        for layer in range(layers):
            if (bank, layer) not in places:
                raise FormatError(f"{index.root}: bank {bank} has no layer {layer}, want layers 0 to {layers - 1}")
    if foreign := sorted({bank for bank, _ in places} - set(names)):
        raise FormatError(f"{index.root}: bank {foreign[0]} is not in {index.quant_format}, want {', '.join(names)}")
    if not layers:
        raise FormatError(f"{index.root}: quant_format is {index.quant_format!r} and there are no banks")
    return _uniform(index, names, layers, places)


def _places(index: Index, stored: list[Entry]) -> dict[tuple[str, int], Place]:
    places: dict[tuple[str, int], Place] = {}
    for entry in stored:
        match = _PER_LAYER.fullmatch(entry.name)
        bank = match[1] if match else entry.name
        count = 1 if match else index.bank_layers
        if not count or not entry.shape or not entry.shape[0] or entry.shape[0] % count:
            raise FormatError(
                f"{index.root}: bank {entry.name} is {list(entry.shape)}, "
                f"want rows for {count or 'a known number of'} layers"
            )
        for i in range(count):
            key = (bank, int(match[2]) if match else i)
            if key in places:
                raise FormatError(f"{index.root}: {bank} of layer {key[1]} is stored twice, want it per layer or flat")
            places[key] = Place(entry, i * (entry.shape[0] // count))
    return places


def _uniform(index: Index, names: tuple[str, ...], layers: int, places: dict[tuple[str, int], Place]) -> Banks:
    """Take the widths from the first layer and hold every entry against them."""
    first, last = (places[bank, 0].entry.shape for bank in (names[0], names[-1]))
    if len(first) != 3 or len(last) < 2:
        raise FormatError(
            f"{index.root}: {names[0]} is {list(first)} and {names[-1]} {list(last)}, want rows of an expert"
        )
    f = first[2 if index.quant_format == "mxfp4_triton" else 1] // 2
    rows = bank_rows(str(index.quant_format), last[1], f)
    flat = "#" not in places[names[0], 0].entry.name
    experts = first[0] // layers if flat else first[0]
    for (bank, layer), place in places.items():
        entry, row = place.entry, rows[bank]
        want = (experts if _PER_LAYER.fullmatch(entry.name) else layers * experts, *row.shape)
        if (entry.dtype, entry.shape) != (row.dtype, want):
            raise FormatError(
                f"{index.root}: {entry.name} (layer {layer}) is {entry.dtype}{list(entry.shape)}, "
                f"want {row.dtype}{list(want)}"
            )
    return Banks(layers, experts, rows, places)
