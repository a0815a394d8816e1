"""The convolution and its window: against float64, split, frame, neighbours."""

import pytest
import torch
from torch import Tensor

from ops.kda.conv import causal_conv_silu, conv_window_
from tests.reference.kda import causal_conv_silu as reference
from tests.reference.numbers import TOLERANCE, relative_error


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def run(x: Tensor, w: Tensor, window: Tensor, lengths: list[int], slots: list[int], past: list[int]) -> Tensor:
    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=x.device)

    start = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    seq = [b for b, n in enumerate(lengths) for _ in range(n)]
    y = causal_conv_silu(x, w, window, index(seq), index(start), index(slots), index(past))
    conv_window_(window, x, index(start), index(slots), index(past))
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "channels"), [(0, 24), (1, 24), (2, 33), (63, 96)])
def test_equals_reference(device: torch.device, dtype: torch.dtype, n: int, channels: int) -> None:
    wide, w = normal(n, 8 + channels).to(dtype), normal(channels, 4)
    x = wide[:, 8:]
    window = torch.full((2, 3, channels), float("nan"), dtype=dtype, device=device)
    y = run(wide.to(device)[:, 8:], w.to(device), window, [n], [1], [0])
    assert relative_error(y, reference(x.double(), w.double())) < TOLERANCE[dtype]
    if n:
        assert torch.equal(window[1].cpu(), torch.cat([torch.zeros(3, channels, dtype=dtype), x])[-3:])
    assert window[0].isnan().all()


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunks_do_not_change_a_bit(device: torch.device, chunk: int) -> None:
    x, w = normal(23, 40).bfloat16().to(device), normal(40, 4).to(device)
    whole, parts = (torch.full((1, 3, 40), float("nan"), dtype=x.dtype, device=device) for _ in range(2))
    want = run(x, w, whole, [23], [0], [0])
    got = [run(x[t : t + chunk], w, parts, [len(x[t : t + chunk])], [0], [t]) for t in range(0, 23, chunk)]
    assert torch.equal(want, torch.cat(got)) and torch.equal(whole, parts)


def test_sequences_side_by_side(device: torch.device) -> None:
    x, w = normal(12, 40).bfloat16().to(device), normal(40, 4).to(device)
    window = normal(4, 3, 40).bfloat16().to(device)
    before = window.clone()
    y = run(x, w, window, [5, 0, 7], [2, 3, 0], [0, 9, 4])
    alone = before.clone()
    assert torch.equal(y[5:], run(x[5:], w, alone, [7], [0], [4])) and torch.equal(window[0], alone[0])
    assert torch.equal(y[:5], run(x[:5], w, alone, [5], [2], [0])) and torch.equal(window[2], alone[2])
    assert torch.equal(window[[1, 3]], before[[1, 3]])


@pytest.mark.parametrize("taps", [2, 3])
def test_other_numbers_of_taps(device: torch.device, taps: int) -> None:
    x, w = normal(9, 24).to(device), normal(24, taps).to(device)
    window = torch.full((1, taps - 1, 24), float("nan"), device=device)
    y = torch.cat([run(x[:1], w, window, [1], [0], [0]), run(x[1:], w, window, [8], [0], [1])])
    assert relative_error(y, reference(x.double().cpu(), w.double().cpu())) < TOLERANCE[torch.float32]
    assert torch.equal(window[0], x[1 - taps :])
