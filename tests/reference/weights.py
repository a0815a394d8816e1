"""Made-up weights of a whole model, the same on every machine: numpy's Philox keyed by seed and tensor name.

Names are a checkpoint's without ``language_model.``. Scales keep activations near one and logits a few units wide; the
decay parameters have the real models' magnitudes.
"""

import hashlib
from typing import Any

import numpy as np

from formats.inventory import expert_geometry, expert_inventory, expert_prefix, source_inventory

Weights = dict[str, np.ndarray]


def random_weights(config: dict[str, Any], seed: int) -> Weights:
    """Every tensor of the unquantised model, float32.

    Args:
        config: parsed ``config.json``.
        seed: another seed, other weights.
    """
    shapes = {name: want.shapes[0] for name, want in source_inventory(config).items()}
    geometry = expert_geometry(config)
    for layer in geometry.layers:
        for expert in range(geometry.experts):
            for name, want in expert_inventory(geometry, "bf16").items():
                shapes[expert_prefix(layer, expert) + name] = want.shapes[0]
    bounded = config.get("text_config", config)["linear_attn_config"].get("gate_lower_bound") is not None
    heads = config.get("text_config", config)["linear_attn_config"]["num_heads"]
    return {name: _values(name, shape, _stream(seed, name), bounded, heads) for name, shape in shapes.items()}


def _stream(seed: int, name: str) -> np.random.Generator:
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator, bounded: bool, heads: int) -> np.ndarray:
    if name.endswith("A_log"):
        values = np.zeros(shape)
        values.reshape(-1)[:heads] = np.log(rng.uniform(1, 16, heads))
    elif name.endswith("dt_bias"):
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape))
        values = rng.uniform(-6, 2, shape) if bounded else np.log(np.expm1(dt))
    elif name.endswith("e_score_correction_bias"):
        values = rng.normal(0, 0.1, shape)
    elif name.endswith("conv1d.weight"):
        values = rng.normal(0, 0.5, shape)
    elif "embed_tokens" in name:
        values = rng.normal(0, 1, shape)
    elif len(shape) == 1:
        values = rng.normal(1, 0.1, shape)
    else:
        values = rng.normal(0, shape[-1] ** -0.5, shape)
    return values.astype(np.float32)


def kda_inputs(bounded: bool, tokens: int = 64, heads: int = 2, keys: int = 16, values: int = 24) -> Weights:
    """Arguments of Kimi delta attention, float64: raw q, k, v, decay input, beta in (0, 1), decay parameters, state."""
    shapes = {
        "q": (tokens, heads, keys),
        "k": (tokens, heads, keys),
        "v": (tokens, heads, values),
        "a": (tokens, heads, keys),
        "beta": (tokens, heads),
        "state": (heads, keys, values),
    }
    made = {name: _stream(tokens, name).normal(0, 1, shape) for name, shape in shapes.items()}
    made["beta"] = 1 / (1 + np.exp(-made["beta"]))
    for name, key, shape in (("A_log", "a_log", (heads,)), ("dt_bias", "dt_bias", (heads, keys))):
        made[key] = _values(name, shape, _stream(tokens, name), bounded, heads).astype(np.float64)
    return made
