"""Where kernels run. Call before ``ops`` is imported: Triton decides between compiler and interpreter at import."""

import os

import torch


def open_device() -> torch.device:
    """The NVIDIA card, or the CPU through Triton's interpreter where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")
