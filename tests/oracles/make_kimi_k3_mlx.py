"""Logits of the Kimi K3 of ``kimi_k3.npz`` by mlx-lm in float32, which shares no code with Moonshot's.

From the repository's root, in an environment with mlx-lm 0.32.2, mlx and mlx-cpu 0.32.4:

    PYTHONPATH=. python tests/oracles/make_kimi_k3_mlx.py
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.kimi_k3 import Model, ModelArgs

from tests.reference.weights import random_weights


def main() -> None:
    folder = Path(__file__).parent
    with np.load(folder / "kimi_k3.npz") as case:
        given = {key: case[key] for key in ("config", "seed", "ids")}
    config = json.loads(str(given["config"]))
    model = Model(ModelArgs.from_dict(config))
    named = {f"language_model.{name}": mx.array(w) for name, w in random_weights(config, int(given["seed"])).items()}
    model.load_weights(list(model.sanitize(named).items()))
    model.eval()
    logits = np.array(model(mx.array(given["ids"])[None])[0].astype(mx.float32))
    path = folder / "kimi_k3_mlx.npz"
    np.savez_compressed(path, **given, logits=logits)
    print(f"{path.name}: logits {list(logits.shape)}, largest {abs(logits).max():.2f}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
