"""Every tensor of an FTW folder, and how its bytes are made from a checkpoint.

Residents come first in the model's order, then layer by layer the banks of the experts. Bytes are made in blocks of a
few MB, read from the source when they are asked for.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from formats.banks import KIND, bank_rows
from formats.checkpoint import Checkpoint
from formats.dtypes import DTYPES, e4m3_to_f32, f32_to_bf16
from formats.errors import FormatError
from formats.inventory import FP8_BLOCK, Resident, expert_prefix, ftw_inventory
from formats.layout import Spec
from formats.safetensors import Tensor, read

BLOCK_BYTES = 16 * 2**20
QUANT_FORMATS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4_triton", "bf16": "bf16"}
# Last part of a bank's name to last part of a source tensor's; "bias" has none.
PARTS = {
    **{"packed": "weight", "scale": "weight_scale", "global": "weight_scale_2"},
    **{"blocks": "weight_packed", "scales": "weight_scale"},
}


class Item(NamedTuple):
    """A tensor to write; ``blocks`` makes its bytes in order."""

    spec: Spec
    blocks: Callable[[], Iterator[np.ndarray]]


def items(source: Checkpoint) -> list[Item]:
    """All tensors of the folder in write order."""
    residents = [
        Item(Spec(resident.name, "weight", resident.dtype, resident.shape), partial(_resident, source, resident))
        for resident in ftw_inventory(source.config, source.tensors)
    ]
    return [*residents, *_banks(source)]


def inexact_globals(source: Checkpoint) -> int:
    """Count the NVFP4 global scales that change when rounded to float16, as the banks store them.

    Raises:
        FormatError: one becomes zero or infinite, or is no positive number.
    """
    if source.expert_format != "nvfp4":
        return 0
    count = 0
    for layer in source.geometry.layers:
        for expert in range(source.geometry.experts):
            for matrix in ("w1", "w3", "w2"):
                scale, stored = _global(source, f"{expert_prefix(layer, expert)}{matrix}.weight_scale_2")
                count += scale != float(stored)
    return count


def _global(source: Checkpoint, name: str) -> tuple[float, np.float16]:
    scale = float(read(source.tensors[name]).reshape(())[()])
    with np.errstate(over="ignore"):
        stored = np.float16(scale)
    if not 0 < stored < np.inf:
        raise FormatError(f"{source.tensors[name].file}: {name} is {scale:g}, want a number that float16 holds")
    return scale, stored


def _banks(source: Checkpoint) -> Iterator[Item]:
    geometry = source.geometry
    rows = bank_rows(QUANT_FORMATS[source.expert_format], geometry.width, geometry.hidden)
    for number, layer in enumerate(geometry.layers):
        for bank, row in rows.items():
            spec = Spec(f"{bank}#L{number:05d}", KIND, row.dtype, (geometry.experts, *row.shape))
            make = _global_rows if bank.endswith("_global") else _bias_rows if bank.endswith("_bias") else _matrix_rows
            yield Item(spec, partial(make, source, bank, layer))


def _matrices(source: Checkpoint, bank: str, layer: int) -> Iterator[list[str]]:
    """Source names of each expert's matrices in a bank: gate and up, or down."""
    for expert in range(source.geometry.experts):
        names = ("w1", "w3") if bank.startswith("gate_up") else ("w2",)
        part = PARTS.get(bank.rpartition("_")[2], "weight")
        yield [f"{expert_prefix(layer, expert)}{name}.{part}" for name in names]


def _matrix_rows(source: Checkpoint, bank: str, layer: int) -> Iterator[np.ndarray]:
    transposed = source.expert_format == "mxfp4"
    for names in _matrices(source, bank, layer):
        parts = [read(source.tensors[name]) for name in names]
        if transposed:
            yield np.ascontiguousarray(np.concatenate(parts).T)
        else:
            yield from parts


def _global_rows(source: Checkpoint, bank: str, layer: int) -> Iterator[np.ndarray]:
    """The scale of each matrix, once for every row of it."""
    rows = source.geometry.hidden if bank.startswith("gate_up") else source.geometry.width
    for names in _matrices(source, bank, layer):
        yield np.repeat([_global(source, name)[1] for name in names], rows)


def _bias_rows(source: Checkpoint, bank: str, _layer: int) -> Iterator[np.ndarray]:
    """Zeros: the layout has biases, the models here have none."""
    rows = 2 * source.geometry.hidden if bank.startswith("gate_up") else source.geometry.width
    for _ in range(source.geometry.experts):
        yield np.zeros(rows, np.uint16)


def _resident(source: Checkpoint, resident: Resident) -> Iterator[np.ndarray]:
    for name in resident.sources:
        tensor = source.tensors[name]
        if resident.dequantise and tensor.dtype == "float8_e4m3fn":
            yield from _dequantised(tensor, source.tensors[f"{name}_scale"])
        elif resident.dequantise and tensor.dtype == "float32":
            yield f32_to_bf16(read(tensor))
        else:
            for begin in range(0, tensor.nbytes, BLOCK_BYTES):
                yield read(_cut(tensor, "uint8", (min(BLOCK_BYTES, tensor.nbytes - begin),), begin))


def _dequantised(tensor: Tensor, scale: Tensor) -> Iterator[np.ndarray]:
    """FP8 times the scale of its 128 x 128 block, rounded to bf16, one row of blocks at a time."""
    rows, columns = tensor.shape
    blocks = -(-columns // FP8_BLOCK)
    scales = read(scale).reshape(-1, blocks)
    for begin in range(0, rows, FP8_BLOCK):
        part = read(_cut(tensor, tensor.dtype, (min(FP8_BLOCK, rows - begin), columns), begin * columns))
        yield f32_to_bf16(e4m3_to_f32(part) * np.repeat(scales[begin // FP8_BLOCK], FP8_BLOCK)[:columns])


def _cut(tensor: Tensor, dtype: str, shape: tuple[int, ...], begin: int) -> Tensor:
    """Part of a tensor's bytes, from ``begin`` on."""
    nbytes = int(np.prod(shape)) * DTYPES[dtype].size
    return tensor._replace(dtype=dtype, shape=shape, offset=tensor.offset + begin, nbytes=nbytes)
