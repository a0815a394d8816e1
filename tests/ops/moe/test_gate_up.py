"""First half of the experts, against float64."""

import pytest
import torch
from torch import Tensor

from ops.activation import Situ
from ops.checks import ShapeError
from ops.moe.align import align
from ops.moe.experts import Nvfp4Rows
from ops.moe.gate_up import expert_gate_up
from tests.reference.expert_rows import FORMATS, make_rows

# relative rounding of one output, and fp32 sums as a share of the largest output
TOLERANCE = {torch.float32: (2e-6, 4e-6), torch.bfloat16: (2.0**-8, 2e-5)}
SITU = Situ(4.0, 25.0)


def close(h: Tensor, want: Tensor) -> bool:
    relative, absolute = TOLERANCE[h.dtype]
    return torch.allclose(
        h.double(), want, rtol=relative * 1.01, atol=absolute * float(want.abs().max()) if len(want) else 0
    )


def expected(x_tz: Tensor, w: Tensor, rows_ta: Tensor, situ: Situ | None) -> Tensor:
    x_rz = x_tz.double().repeat_interleave(rows_ta.shape[1], dim=0)
    g, u = torch.einsum("rnz,rz->rn", w[rows_ta.flatten().long()], x_rz).chunk(2, dim=1)
    if situ is None:
        return g * g.sigmoid() * u
    if situ.linear_beta is not None:
        u = situ.linear_beta * (u / situ.linear_beta).tanh()
    return situ.beta * (g / situ.beta).tanh() * g.sigmoid() * u


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
    wide = torch.full((n_tokens, 101), float("nan"), dtype=dtype, device=device)
    x_tz = wide[:, 3:99]
    x_tz.normal_()
    h_rf = expert_gate_up(x_tz, made.rows, align(rows_ta, 7), 3, SITU)
    assert h_rf.dtype == dtype and h_rf.shape == (3 * n_tokens, 64)
    assert close(h_rf, expected(x_tz, made.gate_up, rows_ta, SITU))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("situ", [None, SITU, Situ(1.0, None)])
def test_activations_and_several_blocks(device: torch.device, format: str, situ: Situ | None) -> None:
    """More hidden units and inputs than one block, neither a multiple of it."""
    made = make_rows(format, 2, 544, 608, device)
    rows_ta = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32, device=device)
    x_tz = torch.randn(2, 608, device=device)
    h_rf = expert_gate_up(x_tz, made.rows, align(rows_ta, 2), 2, situ)
    assert close(h_rf, expected(x_tz, made.gate_up, rows_ta, situ))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_alone(device: torch.device, format: str) -> None:
    """A route's bits: among 40 tokens, in another order, alone."""
    made = make_rows(format, 5, 64, 96, device)
    rows_ta = choose(40, 2, list(range(5)), device)
    x_tz = torch.randn(40, 96, dtype=torch.bfloat16, device=device)

    def run(order: Tensor) -> Tensor:
        h_rf = expert_gate_up(x_tz[order], made.rows, align(rows_ta[order].contiguous(), 5), 2, SITU)
        return h_rf.unflatten(0, (-1, 2))

    whole = run(torch.arange(40))
    assert torch.equal(run(torch.arange(40)), whole)
    order = torch.randperm(40)
    assert torch.equal(run(order), whole[order])
    for t in (0, 21, 39):
        assert torch.equal(run(torch.tensor([t]))[0], whole[t])


def test_gate_and_up_have_their_own_global_scale(device: torch.device) -> None:
    """B01: the up half's scale is four times the gate's; swapped, the output is another."""
    made = make_rows("nvfp4", 1, 64, 96, device)
    assert isinstance(made.rows, Nvfp4Rows)
    scales = made.rows.global_s3
    scales[0, 0], scales[0, 1] = 0.01, 0.04
    alignment = align(torch.zeros(1, 1, dtype=torch.int32, device=device), 1)
    x_tz = torch.randn(1, 96, device=device)
    h_rf = expert_gate_up(x_tz, made.rows, alignment, 1, None)
    swapped = made.rows._replace(global_s3=scales[:, [1, 0, 2]].contiguous())
    other = expert_gate_up(x_tz, swapped, alignment, 1, None)
    assert (other - h_rf).abs().max() > 0.1 * h_rf.abs().max()


@pytest.mark.parametrize("half", [0, 1])
def test_scales_by_coordinate(device: torch.device, half: int) -> None:
    """B06: neighbouring blocks have other scales, weights are 1, one-hot inputs; exact.

    A gate past 64 leaves sg(g) = 1, so the output is gate times up.
    """
    f, z = 48, 112
    byte = torch.full((2 * f, z // 16), 0x38, dtype=torch.uint8)  # 1
    i, g = torch.arange(f)[:, None], torch.arange(z // 16)[None, :]
    byte[half * f : (half + 1) * f] = (1 + (i * 37 + g * 11) % 126).to(torch.uint8)
    scales_s3 = torch.tensor([[2.0**15 if half == 0 else 64.0, 1.0, float("nan")]])
    rows = Nvfp4Rows(
        torch.full((1, 2 * f, z // 2), 0x22, dtype=torch.uint8), byte[None].view(torch.float8_e4m3fn),
        torch.zeros(1, z, f // 2, dtype=torch.uint8), torch.zeros(1, z, f // 16).to(torch.float8_e4m3fn), scales_s3,
    )  # fmt: skip
    rows = Nvfp4Rows(*(bank.to(device) for bank in rows))
    alignment = align(torch.zeros(z, 1, dtype=torch.int32, device=device), 1)
    h_rf = expert_gate_up(torch.eye(z, device=device), rows, alignment, 1, None)
    value = byte[half * f : (half + 1) * f].view(torch.float8_e4m3fn).double() * scales_s3[0, 0].double()
    assert torch.equal(h_rf.cpu().double(), value.repeat_interleave(16, dim=1).T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_sums_before_the_global_scale(device: torch.device, dtype: torch.dtype) -> None:
    """B02: up sums 3,584 products of 6 * 448, past 65,504, and comes out to two units in the last place."""
    z = 3584
    up = torch.tensor([[448.0]] * 16).expand(16, z // 16)
    gate = torch.full((16, z // 16), 2.0**-6)  # 3584 * 6 / 64 = 336, so sg(g) = 1
    rows = Nvfp4Rows(
        torch.full((1, 32, z // 2), 0x77, dtype=torch.uint8), torch.cat([gate, up])[None].to(torch.float8_e4m3fn),
        torch.zeros(1, z, 8, dtype=torch.uint8), torch.zeros(1, z, 1).to(torch.float8_e4m3fn),
        torch.tensor([[1.0, 1e-3, 1.0]]),
    )  # fmt: skip
    rows = Nvfp4Rows(*(bank.to(device) for bank in rows))
    alignment = align(torch.zeros(1, 1, dtype=torch.int32, device=device), 1)
    h_rf = expert_gate_up(torch.ones(1, z, dtype=dtype, device=device), rows, alignment, 1, None)
    want = 336.0 * z * 6 * 448 * float(torch.tensor(1e-3))
    assert torch.allclose(
        h_rf.double(), torch.full_like(h_rf, want, dtype=torch.float64), rtol=2 * torch.finfo(dtype).eps, atol=0
    )


def test_refuses_other_widths(device: torch.device) -> None:
    made = make_rows("mxfp4", 1, 64, 96, device)
    alignment = align(torch.zeros(1, 1, dtype=torch.int32, device=device), 1)
    with pytest.raises(ShapeError, match=r"want \[T, 96\]"):
        expert_gate_up(torch.zeros(1, 64, device=device), made.rows, alignment, 1, None)
