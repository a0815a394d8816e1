"""An FTW folder's tensors in float64 under the names of the checkpoint that it was made of."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from formats.inventory import expert_geometry, expert_prefix
from formats.reader import FtwReader, open_ftw
from tests.reference.numbers import block_fp8, mxfp4, nvfp4
from tests.reference.source_weights import widen


def load_ftw(folder: Path) -> dict[str, Tensor]:
    """Every weight by its checkpoint name; scales are multiplied in, fused tensors taken apart."""
    reader = open_ftw(folder)
    weights: dict[str, Tensor] = {}
    for name in sorted(reader.names):
        if not name.endswith(("weight_scale", "weight_scale_inv")):
            weights |= _unfuse(name, _resident(reader, name))
    for bank_layer, layer in enumerate(expert_geometry(reader.config).layers):
        for expert in range(reader.experts):
            names = (f"{expert_prefix(layer, expert)}w{n}.weight" for n in (1, 3, 2))
            gate_up, down = _expert(reader, bank_layer, expert)
            weights |= zip(names, (*gate_up.chunk(2), down), strict=True)
    return weights


def _resident(reader: FtwReader, name: str) -> Tensor:
    w = widen(*reader.tensor(name))
    if f"{name}_scale_inv" in reader.names:
        return block_fp8(w, widen(*reader.tensor(f"{name}_scale_inv")))
    if f"{name}_scale" in reader.names:
        return w * widen(*reader.tensor(f"{name}_scale"))[:, None]
    return w


def _unfuse(name: str, w: Tensor) -> dict[str, Tensor]:
    if ".gate_up_proj." in name:
        gate, up = w.chunk(2)
        return {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    return {name.replace("moe.e_score", "moe.gate.e_score"): w}


def _expert(reader: FtwReader, layer: int, expert: int) -> list[Tensor]:
    """The matrices gate_up [2F, Z] and down [Z, F] of one expert."""

    def bank(name: str) -> Tensor:
        row = np.array(reader.expert_row(name, layer, expert))
        dtype = reader.row_format(name).dtype
        return torch.from_numpy(row) if dtype == "uint8" else widen(dtype, row)

    match reader.quant_format:
        case "nvfp4":
            return [
                nvfp4(bank(f"{m}_packed"), bank(f"{m}_scale"), bank(f"{m}_global")[:, None])
                for m in ("gate_up", "down")
            ]
        case "mxfp4_triton":
            return [mxfp4(bank(f"{m}_blocks").T, bank(f"{m}_scales").T) for m in ("gate_up", "down")]
        case _:
            return [bank(m) for m in ("gate_up", "down")]
