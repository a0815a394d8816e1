"""Second half of the experts, against float64."""

import pytest
import torch
from torch import Tensor

from ops.checks import ShapeError
from ops.moe.align import align
from ops.moe.down import expert_down
from ops.moe.experts import Mxfp4Rows, Nvfp4Rows
from tests.reference.expert_rows import E2M1, FORMATS, make_rows, pack

# relative rounding of one output, and fp32 sums as a share of the largest output
TOLERANCE = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (2.0**-8, 1e-5)}


def close(y: Tensor, want: Tensor) -> bool:
    relative, absolute = TOLERANCE[y.dtype]
    return torch.allclose(
        y.double(), want, rtol=relative * 1.01, atol=absolute * float(want.abs().max()) if len(want) else 0
    )


def choose(n_tokens: int, n_active: int, used: list[int], device: torch.device) -> Tensor:
    picks = torch.stack(
        [torch.randperm(len(used))[:n_active] for _ in range(n_tokens)] or [torch.zeros(0, dtype=torch.long)]
    )
    return torch.tensor(used)[picks].int().view(n_tokens, n_active).to(device)


@pytest.mark.parametrize("n_tokens", [0, 1, 33, 63])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_float64(device: torch.device, n_tokens: int, format: str, dtype: torch.dtype) -> None:
    used = [0, 2, 3, 6]
    made = make_rows(format, 7, 64, 96, device, used)
    rows_ta = choose(n_tokens, 3, used, device)
    wide = torch.full((3 * n_tokens, 70), float("nan"), dtype=dtype, device=device)
    h_rf = wide[:, 3:67]
    h_rf.normal_()
    y_rz = expert_down(h_rf, made.rows, align(rows_ta, 7))
    want = torch.einsum("rzf,rf->rz", made.down[rows_ta.flatten().long()], h_rf.double())
    assert y_rz.dtype == dtype and y_rz.shape == (3 * n_tokens, 96)
    assert close(y_rz, want)


@pytest.mark.parametrize("format", FORMATS)
def test_several_blocks(device: torch.device, format: str) -> None:
    """More outputs and inputs than one block, neither a multiple of it."""
    made = make_rows(format, 2, 544, 608, device)
    rows_ta = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32, device=device)
    h_rf = torch.randn(4, 544, device=device)
    want = torch.einsum("rzf,rf->rz", made.down[rows_ta.flatten().long()], h_rf.double())
    assert close(expert_down(h_rf, made.rows, align(rows_ta, 2)), want)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_alone(device: torch.device, format: str) -> None:
    """A route's bits: among 40 tokens, in another order, alone."""
    made = make_rows(format, 5, 64, 96, device)
    rows_ta = choose(40, 2, list(range(5)), device)
    h_taf = torch.randn(40, 2, 64, dtype=torch.bfloat16, device=device)

    def run(order: Tensor) -> Tensor:
        y_rz = expert_down(h_taf[order].flatten(0, 1), made.rows, align(rows_ta[order].contiguous(), 5))
        return y_rz.unflatten(0, (-1, 2))

    whole = run(torch.arange(40))
    assert torch.equal(run(torch.arange(40)), whole)
    order = torch.randperm(40)
    assert torch.equal(run(order), whole[order])
    for t in (0, 21, 39):
        assert torch.equal(run(torch.tensor([t]))[0], whole[t])


def test_every_code_and_scale(device: torch.device) -> None:
    """All 16 codes along one group of 16, all 256 scale bytes along the outputs; one-hot inputs; exact."""
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    rows = Nvfp4Rows(
        torch.zeros(1, 32, 128, dtype=torch.uint8), torch.zeros(1, 32, 16).to(torch.float8_e4m3fn),
        pack(codes)[None], scale[None], torch.tensor([[9.0, 7.0, 0.5]]),
    )  # fmt: skip
    rows = Nvfp4Rows(*(bank.to(device) for bank in rows))
    y = expert_down(torch.eye(16, device=device), rows, align(torch.zeros(16, 1, dtype=torch.int32, device=device), 1))
    want = E2M1[:, None] * scale.double().T * 0.5
    assert torch.equal(y.cpu().double().nan_to_num(-999.0), want.nan_to_num(-999.0))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_scales_by_coordinate(device: torch.device, format: str) -> None:
    """B06: neighbouring blocks have other scales, all weights are 1, one-hot inputs; exact."""
    z, f, group = 80, 96, 16 if format == "nvfp4" else 32
    i, g = torch.arange(z)[:, None], torch.arange(f // group)[None, :]
    ones = torch.full((1, z, f // 2), 0x22, dtype=torch.uint8)
    empty = torch.zeros(1, 2 * f, z // 2, dtype=torch.uint8)
    if format == "nvfp4":
        byte = (1 + (i * 37 + g * 11) % 126).to(torch.uint8)
        scale = byte.view(torch.float8_e4m3fn)
        gate_up_scale = torch.zeros(1, 2 * f, z // 16).to(torch.float8_e4m3fn)
        rows = Nvfp4Rows(empty, gate_up_scale, ones, scale[None], torch.ones(1, 3))
        value = scale.double()
    else:
        byte = (100 + (i * 37 + g * 11) % 50).to(torch.uint8)
        scales = torch.zeros(1, z // 32, 2 * f, dtype=torch.uint8)
        rows = Mxfp4Rows(empty.mT.contiguous(), scales, ones.mT.contiguous(), byte.T.contiguous()[None])
        value = 2.0 ** (byte.double() - 127)
    rows = type(rows)(*(bank.to(device) for bank in rows))
    y = expert_down(torch.eye(f, device=device), rows, align(torch.zeros(f, 1, dtype=torch.int32, device=device), 1))
    assert torch.equal(y.cpu().double(), value.repeat_interleave(group, dim=1).T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_sums_before_the_global_scale(device: torch.device, dtype: torch.dtype) -> None:
    """B02: 3,584 products of 6 * 448 sum past 65,504 and come out to one unit in the last place."""
    k = 3584
    rows = Nvfp4Rows(
        torch.zeros(1, 2 * k, 8, dtype=torch.uint8), torch.zeros(1, 2 * k, 1).to(torch.float8_e4m3fn),
        torch.full((1, 16, k // 2), 0x77, dtype=torch.uint8),
        torch.full((1, 16, k // 16), 448.0).to(torch.float8_e4m3fn),
        torch.full((1, 3), 1e-3),
    )  # fmt: skip
    rows = Nvfp4Rows(*(bank.to(device) for bank in rows))
    alignment = align(torch.zeros(1, 1, dtype=torch.int32, device=device), 1)
    y = expert_down(torch.ones(1, k, dtype=dtype, device=device), rows, alignment)
    want = k * 6 * 448 * float(torch.tensor(1e-3))
    assert torch.allclose(
        y.double(), torch.full_like(y, want, dtype=torch.float64), rtol=torch.finfo(dtype).eps, atol=0
    )


def test_rows_may_lie_apart(device: torch.device) -> None:
    """Banks as slices of one pool of whole experts."""
    made = make_rows("nvfp4", 3, 64, 96, device)
    assert isinstance(made.rows, Nvfp4Rows)
    apart = []
    for bank in made.rows:
        pool = torch.zeros(3, 2, *bank.shape[1:], device=device).to(bank.dtype)
        pool[:, 1] = bank
        apart.append(pool[:, 1])
    rows_ta = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    h_rf = torch.randn(3, 64, device=device)
    a, b = (expert_down(h_rf, rows, align(rows_ta, 3)) for rows in (made.rows, Nvfp4Rows(*apart)))
    assert torch.equal(a, b)


def test_refuses_other_widths(device: torch.device) -> None:
    made = make_rows("bf16", 1, 64, 96, device)
    alignment = align(torch.zeros(1, 1, dtype=torch.int32, device=device), 1)
    with pytest.raises(ShapeError, match=r"want \[R, 64\]"):
        expert_down(torch.zeros(1, 63, device=device), made.rows, alignment)
