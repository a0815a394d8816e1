"""Projections into and out of the latent space: float64, mixed dtypes, strided rows, row invariance."""

import pytest
import torch

from ops.checks import ShapeError
from ops.mla.project import absorb_queries, expand_values
from tests.reference.numbers import TOLERANCE, relative_error

HEADS, NOPE, ROPE, VALUE, RANK = 3, 40, 16, 24, 72


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("w_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [0, 1, 33, 63])
def test_equals_reference(device: torch.device, n: int, dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    size = HEADS * (NOPE + ROPE)
    wide = torch.full((n, 16 + size), float("nan"))
    wide[:, 16:] = normal(n, size)
    q = wide.to(dtype)[:, 16:].unflatten(1, (HEADS, NOPE + ROPE))
    z, w = normal(n, HEADS, RANK, seed=1).to(dtype), normal(HEADS, NOPE + VALUE, RANK, seed=2).to(w_dtype)
    # a card multiplies bf16 activations by weights rounded to bf16
    w64 = (w.bfloat16() if dtype == torch.bfloat16 and device.type == "cuda" else w).double()
    absorbed = absorb_queries(wide.to(dtype).to(device)[:, 16:].unflatten(1, (HEADS, NOPE + ROPE)), w.to(device), ROPE)
    want = torch.einsum("thk,hkr->thr", q[..., :NOPE].double(), w64[:, :NOPE])
    assert absorbed.dtype == dtype and relative_error(absorbed[..., :RANK], want) < TOLERANCE[dtype]
    assert torch.equal(absorbed[..., RANK:].cpu(), q[..., NOPE:])
    expanded = expand_values(z.to(device), w.to(device), NOPE)
    want = torch.einsum("thr,hpr->thp", z.double(), w64[:, NOPE:])
    assert expanded.dtype == dtype and relative_error(expanded, want) < TOLERANCE[dtype]


def test_a_row_is_its_own(device: torch.device) -> None:
    q = normal(40, HEADS, NOPE + ROPE).bfloat16().to(device)
    z = normal(40, HEADS, RANK, seed=1).bfloat16().to(device)
    w = normal(HEADS, NOPE + VALUE, RANK, seed=2).bfloat16().to(device)
    absorbed, expanded = absorb_queries(q, w, ROPE), expand_values(z, w, NOPE)
    for t in (0, 17, 39):
        assert torch.equal(absorbed[t], absorb_queries(q[t : t + 1], w, ROPE)[0])
        assert torch.equal(expanded[t], expand_values(z[t : t + 1], w, NOPE)[0])
    order = torch.arange(39, -1, -1)
    assert torch.equal(absorbed[order], absorb_queries(q[order], w, ROPE))


def test_refuses_another_number_of_heads(device: torch.device) -> None:
    with pytest.raises(ShapeError, match="heads"):
        expand_values(torch.zeros(1, 2, RANK, device=device), torch.zeros(3, NOPE + VALUE, RANK, device=device), NOPE)
