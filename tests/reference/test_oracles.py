"""The float64 reference against what other implementations computed, see ``tests/oracles``."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reference.kda import log_decay, recurrence
from tests.reference.model import logits
from tests.reference.numbers import relative_error
from tests.reference.weights import kda_inputs, random_weights

ORACLES = Path(__file__).parent.parent / "oracles"


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("kimi_k3", 1e-12), ("kimi_k3_mlx", 1e-5), ("kimi_linear", 1e-12), ("kimi_linear_groups", 1e-12)],
)
def test_logits(name: str, tolerance: float) -> None:
    with np.load(ORACLES / f"{name}.npz") as case:
        config, ids, want = json.loads(str(case["config"])), case["ids"].tolist(), torch.from_numpy(case["logits"])
        made_up = random_weights(config, int(case["seed"]))
    weights = {key: torch.from_numpy(w).double() for key, w in made_up.items()}
    error = relative_error(logits(config, weights, ids), want)
    assert error <= tolerance, f"relative error {error:.1e}"


@pytest.mark.parametrize("form", ["naive_recurrent_kda", "naive_chunk_kda"])
@pytest.mark.parametrize(("gate", "bound"), [("bounded", -5.0), ("unbounded", None)])
def test_kda(gate: str, bound: float | None, form: str) -> None:
    made = {key: torch.from_numpy(x) for key, x in kda_inputs(bound is not None).items()}
    g = log_decay(made["a"], made["a_log"], made["dt_bias"], bound)
    o, state = recurrence(made["q"], made["k"], made["v"], g, made["beta"], made["state"])
    with np.load(ORACLES / "kda.npz") as stored:
        for name, got in (("o", o), ("state", state)):
            error = relative_error(got, torch.from_numpy(stored[f"{gate}/{form}/{name}"]))
            assert error <= 1e-7, f"{name}: relative error {error:.1e}"
