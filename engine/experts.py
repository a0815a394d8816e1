"""Expert rows of a model that fits on the device: one bank a layer, a row read from the drive when first routed to.

The device banks have a place for every expert, so a row's place is its expert's number and ``fetch`` hands ids back
as they are. Rows come from the FTW folder through its memory map, each once.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import CapacityError
from engine.load import copy_
from engine.params import Rows
from formats.errors import FormatError
from formats.reader import FtwReader
from ops.moe.experts import Bf16Rows, Mxfp4Rows, Nvfp4Rows

KINDS: dict[str, type[Rows]] = {"nvfp4": Nvfp4Rows, "mxfp4_triton": Mxfp4Rows, "bf16": Bf16Rows}


class ExpertStore:
    """Owns the device banks and knows which of their rows hold an expert.

    Attributes:
        rows: banks of each layer with experts.
        bytes_read: bytes of expert rows read so far.
    """

    def __init__(self, cfg: ModelConfig, reader: FtwReader, device: torch.device) -> None:
        """Allocate the banks; nothing is read yet.

        Raises:
            CapacityError: the device cannot hold all experts.
            FormatError: the folder's banks do not fit the configuration.
        """
        layers = sum(map(cfg.is_moe, range(cfg.layers)))
        if (reader.layers, reader.experts) != (layers, cfg.experts if layers else 0):
            raise FormatError(
                f"{reader.index.root}: banks hold {reader.layers} layers of {reader.experts} experts, "
                f"want {layers} of {cfg.experts} by config.json"
            )
        self._reader = reader
        self._held = [set[int]() for _ in range(layers)]
        self.bytes_read = 0
        _expect_room(reader, device)
        self.rows = [_allocate(reader, layer, device) for layer in range(layers)]

    def fetch(self, layer: int, ids_ta: Tensor) -> Tensor:
        """Make sure that every routed expert's row is on the device; returns its place, which is its id."""
        missing = set(ids_ta.flatten().tolist()) - self._held[layer]
        for expert in sorted(missing):
            self._read(layer, expert)
        self._held[layer] |= missing
        return ids_ta

    def _read(self, layer: int, expert: int) -> None:
        rows = self.rows[layer]
        for bank in self._reader.banks:
            row = self._reader.expert_row(bank, layer, expert)
            self.bytes_read += row.nbytes
            if isinstance(rows, Nvfp4Rows) and bank.endswith("_global"):
                _copy_global_(rows.global_s3[expert], bank, row, f"{bank} of layer {layer}, expert {expert}")
            elif bank.endswith("_bias"):
                if np.any(row):
                    raise FormatError(
                        f"{bank} of layer {layer}, expert {expert} is not zero, want experts without biases"
                    )
            else:
                copy_(getattr(rows, bank)[expert], row)


def _copy_global_(out_3: Tensor, bank: str, row: np.ndarray, name: str) -> None:
    """Keep one scale a half; the folder repeats it for every output row. WRITTEN: out_3."""
    halves = row.view(np.float16).reshape(2 if bank.startswith("gate_up") else 1, -1)
    if np.any(halves != halves[:, :1]):
        raise FormatError(f"{name} varies inside a matrix, want one scale a matrix")
    begin = 0 if len(halves) == 2 else 2
    out_3[begin : begin + len(halves)].copy_(torch.from_numpy(halves[:, 0].astype(np.float32)))


def _allocate(reader: FtwReader, layer: int, device: torch.device) -> Rows:
    kind = KINDS[str(reader.quant_format)]

    def bank(field: str) -> Tensor:
        if field == "global_s3":
            return torch.empty(reader.experts, 3, dtype=torch.float32, device=device)
        dtype, row = reader.row_format(field, layer)
        return torch.empty(reader.experts, *row, dtype=getattr(torch, dtype), device=device)

    return kind(*map(bank, kind._fields))


def _expect_room(reader: FtwReader, device: torch.device) -> None:
    wanted = sum(entry.nbytes for entry in reader.index.entries if entry.kind == "experts_bank")
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _host_free()
    if wanted > free:
        raise CapacityError(
            f"the experts take {wanted / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free on {device}; "
            "this version holds all experts at once"
        )


def _host_free() -> int:
    with Path("/proc/meminfo").open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
