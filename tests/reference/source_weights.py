"""A source checkpoint's tensors in float64, dequantised by the formats' definitions."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from formats.checkpoint import open_checkpoint
from formats.safetensors import read
from tests.reference.numbers import block_fp8, mxfp4, nvfp4


def widen(dtype: str, array: np.ndarray) -> Tensor:
    """Stored bits as float64; ``dtype`` is torch's name."""
    bits = torch.from_numpy(np.array(array))
    return bits.view(getattr(torch, dtype)).double()


def load_source(path: Path) -> dict[str, Tensor]:
    """Every weight by its checkpoint name without ``language_model.``; scales are multiplied in."""
    checkpoint = open_checkpoint(path)

    def stored(name: str) -> Tensor:
        tensor = checkpoint.tensors[name]
        if tensor.dtype == "uint8":
            return torch.from_numpy(np.array(read(tensor)))
        return widen(tensor.dtype, read(tensor))

    weights: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        scale = name.removesuffix("_packed") + "_scale"
        if name.endswith(("_scale", "_scale_2")):
            continue
        if name.endswith("_packed"):
            weights[name.removesuffix("_packed")] = mxfp4(stored(name), _bytes(stored(scale)))
        elif tensor.dtype == "uint8":
            weights[name] = nvfp4(stored(name), stored(scale), stored(f"{name}_scale_2").item())
        elif scale in checkpoint.tensors:
            grid = stored(scale)
            weights[name] = block_fp8(stored(name), grid[:, 0, :, 0] if grid.ndim == 4 else grid)
        else:
            weights[name] = stored(name)
    return weights


def _bytes(scale: Tensor) -> Tensor:
    """Exponent bytes of E8M0 scales, which a checkpoint may also call values."""
    return scale if scale.dtype == torch.uint8 else (scale.log2() + 127).to(torch.uint8)
