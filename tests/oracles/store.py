"""What every oracle script shares: double precision throughout, and one file format.

A stored case is an ``.npz``: ``config`` (JSON text), ``seed`` of ``tests.reference.weights``, ``ids``, ``logits``.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.reference.weights import random_weights


def compute_in_float64() -> None:
    """Turn the casts to float32 that the outside code makes into casts to float64. Call it after its import."""
    torch.Tensor.float = torch.Tensor.double
    torch.float = torch.float32 = torch.float64
    torch.set_default_dtype(torch.float64)


def weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(w).double() for name, w in random_weights(config, seed).items()}


def made_up_ids(n: int, vocab: int) -> list[int]:
    return np.random.default_rng(n).integers(vocab, size=n).tolist()


def save_case(script: str, name: str, config: dict[str, Any], seed: int, ids: list[int], logits: torch.Tensor) -> None:
    """Write ``name.npz`` beside ``script``."""
    path = Path(script).with_name(f"{name}.npz")
    np.savez_compressed(path, config=json.dumps(config), seed=seed, ids=ids, logits=logits.detach().numpy())
    print(f"{path.name}: logits {list(logits.shape)}, largest {logits.abs().max():.2f}, {path.stat().st_size} bytes")
