"""Gates against float64, where they are linear and where they saturate."""

import pytest
import torch
from torch import Tensor

from ops.activation import sigmoid_gate, silu_gate, situ_gate
from ops.checks import ShapeError
from tests.reference.moe import activate
from tests.reference.numbers import TOLERANCE, relative_error

DTYPES = [torch.bfloat16, torch.float32]


def inputs(t: int, n: int, dtype: torch.dtype, scale: float) -> Tensor:
    return torch.randn(t, n, generator=torch.Generator().manual_seed(n)).mul(scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-2, 1.0, 50.0])
@pytest.mark.parametrize(("t", "f"), [(0, 8), (1, 64), (19, 50)])
def test_glu(device: torch.device, dtype: torch.dtype, scale: float, t: int, f: int) -> None:
    x = inputs(t, 2 * f, dtype, scale)
    gate, up = x.double().chunk(2, 1)
    silu = {"hidden_act": "silu"}
    assert relative_error(silu_gate(x.to(device)), activate(gate, up, silu)) < TOLERANCE[dtype]
    for linear_beta in (None, 25.0):
        text = {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": linear_beta}
        y = situ_gate(x.to(device), 4.0, linear_beta)
        assert y.dtype == dtype and relative_error(y, activate(gate, up, text)) < TOLERANCE[dtype]


def test_extremes_stay_finite(device: torch.device) -> None:
    x = torch.tensor([[3e38, -3e38, 0.0, 3e38, -3e38, 3e38]])
    y = situ_gate(x.to(device), 4.0, 25.0).cpu()
    assert torch.equal(y, torch.tensor([[100.0, 0.0, 0.0]])) and torch.equal(y, y.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gate(device: torch.device, dtype: torch.dtype) -> None:
    x, wide = inputs(19, 50, dtype, 1.0), inputs(19, 57, dtype, 4.0)
    y = sigmoid_gate(x.to(device), wide.to(device)[:, 7:])
    want = x.double() * wide[:, 7:].double().sigmoid()
    assert y.dtype == dtype and relative_error(y, want) < TOLERANCE[dtype]


def test_refusals(device: torch.device) -> None:
    with pytest.raises(ShapeError, match="even last axis"):
        silu_gate(torch.zeros(2, 7, device=device))
    with pytest.raises(ShapeError, match="gate_tn is"):
        sigmoid_gate(torch.zeros(2, 8, device=device), torch.zeros(2, 9, device=device))
