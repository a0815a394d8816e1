"""Quantise a small tensor with NVIDIA Model Optimizer's own NVFP4 code and store what it gives.

Run with nvidia-modelopt 0.47.0, torch 2.13.0 on a CPU:
    python tests/oracles/make_modelopt.py tests/formats/data/modelopt_nvfp4.npz
"""

import sys

import numpy as np
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor


def main() -> None:
    random = np.random.Generator(np.random.PCG64(20261201))
    weights = random.standard_normal((48, 96)).astype(np.float32) * np.float32(0.02)
    weights *= np.exp2(random.integers(-14, 1, (48, 1))).astype(np.float32)
    weights[5, 16:48] = 0
    weights[6, 0] = 0.4
    # Whole multiples of half a code's distance: every kind of tie.
    weights[7, :32] = np.arange(-16, 16, dtype=np.float32) / 4 * weights.max() / 6
    stored = {"weights": weights}
    for name, scale_2 in (("own", None), ("given", torch.tensor(2.0**-13))):
        quantised, scale, scale_2 = NVFP4QTensor.quantize(torch.from_numpy(weights.copy()), 16, None, scale_2)
        values = quantised.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        stored |= {
            f"{name}_packed": quantised._quantized_data.numpy(),
            f"{name}_scale": scale.view(torch.uint8).numpy(),
            f"{name}_scale_2": scale_2.numpy(),
            f"{name}_values": values.numpy(),
        }
    np.savez_compressed(sys.argv[1], **stored)


if __name__ == "__main__":
    main()
