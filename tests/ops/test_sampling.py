"""From logits to tokens: filters against numpy, draws against their distribution."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.checks import ShapeError
from ops.sampling import argmax, log_prob, sample

TOLERANCE = 2e-6  # fp32 sums of a softmax


def draw(logits_bv: Tensor, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) -> Tensor:
    """Sample with options given as numbers or as lists of one a row."""

    def column(value, dtype: torch.dtype) -> Tensor:
        values = value if isinstance(value, list | range) else [value] * len(logits_bv)
        return torch.tensor(values, dtype=dtype, device=logits_bv.device)

    return sample(
        logits_bv, column(temperature, torch.float32), column(top_k, torch.int32), column(top_p, torch.float32),
        column(min_p, torch.float32), column(seed, torch.int64), column(position, torch.int32),
    )  # fmt: skip


def kept(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that the filters leave, by sorting."""
    p = np.exp((x - x.max()) / temperature)
    order = np.sort(x)[::-1]
    keep = x >= order[top_k - 1] if 0 < top_k < len(x) else np.full(len(x), True)
    if top_p < 1:
        by_weight = sorted(set(x[keep]), reverse=True)
        held = np.cumsum([p[keep & (x == value)].sum() for value in by_weight])
        keep &= x >= by_weight[int(np.argmax(held >= top_p * p[keep].sum()))]
    return set(np.flatnonzero(keep & (p >= min_p)).tolist())


@pytest.mark.parametrize("n_rows", [0, 1, 33])
@pytest.mark.parametrize("vocab", [1, 33, 1283])
def test_argmax(device: torch.device, n_rows: int, vocab: int) -> None:
    torch.manual_seed(0)
    wide = torch.full((n_rows, vocab + 3), float("nan"), device=device)
    x = wide[:, 1 : 1 + vocab]
    x.copy_(torch.randint(-4, 4, (n_rows, vocab)))
    want = [row.index(max(row)) for row in x.tolist()]
    assert argmax(x).tolist() == want
    assert draw(x, temperature=0.0, top_k=1, top_p=0.1).tolist() == want


def test_real_vocabulary(device: torch.device) -> None:
    """163,840 logits; the largest twice, at one place of different blocks."""
    torch.manual_seed(0)
    x = torch.randn(1, 163840, device=device)
    x[0, [70001, 135537]] = 9.0
    assert argmax(x).tolist() == [70001]
    assert draw(x, top_k=2, seed=range(1)).item() in (70001, 135537)
    ids = torch.tensor([135537], dtype=torch.int32, device=device)
    assert log_prob(x, ids).item() == pytest.approx(x.double().log_softmax(1)[0, 135537].item(), rel=TOLERANCE)


@pytest.mark.parametrize("values", [[0.0, math.nan, 1.0], [math.nan] * 3, [-math.inf] * 3, [0.0, math.inf, 1.0]])
def test_no_number_gives_no_token(device: torch.device, values: list[float]) -> None:
    x = torch.tensor([values, [1.0, 3.0, 2.0]], device=device)
    assert argmax(x).tolist() == [-1, 1]
    assert draw(x, temperature=[1.0, 0.0]).tolist() == [-1, 1]


@pytest.mark.parametrize("vocab", [1, 33, 163])
def test_log_prob(device: torch.device, vocab: int) -> None:
    torch.manual_seed(vocab)
    x = torch.randn(63, vocab, device=device) * 20
    ids = torch.randint(vocab, (63,), dtype=torch.int32, device=device)
    want = x.double().log_softmax(1).gather(1, ids[:, None].long())[:, 0]
    assert torch.allclose(log_prob(x, ids).double(), want, rtol=TOLERANCE, atol=TOLERANCE * 10)
    assert log_prob(x[:0], ids[:0]).shape == (0,)


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.4},
    {"top_p": 0.0},
    {"min_p": 0.7},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.7},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.9, "temperature": 2.5},
    {"top_k": 40, "top_p": 0.8, "temperature": 0.5},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_filters(device: torch.device, filters: dict, ties: bool) -> None:
    """Nearly equal logits of few tokens: every token that may be drawn is, and no other."""
    x = np.random.default_rng(5).normal(0, 0.3, 12)
    x = (np.round(x * 4) / 4 if ties else x).astype(np.float32)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    drawn = draw(torch.tensor(x, device=device).expand(128, -1), seed=range(128), **options)
    assert set(drawn.tolist()) == kept(x.astype(np.float64), **options)


def test_draws_follow_the_distribution(device: torch.device) -> None:
    """Chi-square of 2,000 draws of 8 tokens, 40 seeds at 50 positions: 24.3 is the 0.1 % point of 7 degrees."""
    x = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, 1.5, 0.8, 0.2], device=device)
    seeds, positions = [i % 40 for i in range(2000)], [i // 40 for i in range(2000)]
    drawn = draw(x.expand(2000, -1), temperature=1.3, seed=seeds, position=positions)
    seen = torch.bincount(drawn.long().cpu(), minlength=8).double()
    want = (x.cpu().double() / 1.3).softmax(0) * 2000
    assert float(((seen - want) ** 2 / want).sum()) < 24.3


def test_seed_uses_all_64_bits_and_position_counts(device: torch.device) -> None:
    x = torch.zeros(40, 200, device=device)
    plain = draw(x, seed=range(40))
    assert not torch.equal(plain, draw(x, seed=[s + (1 << 40) for s in range(40)]))
    assert not torch.equal(plain, draw(x, seed=[-s - 1 for s in range(40)]))
    assert not torch.equal(plain, draw(x, seed=range(40), position=1))


def test_rows_are_alone(device: torch.device) -> None:
    torch.manual_seed(4)
    x = torch.randn(40, 163, device=device)
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    whole = draw(x, seed=range(40), position=range(100, 140), **options)
    assert torch.equal(draw(x, seed=range(40), position=range(100, 140), **options), whole)
    for b in (0, 17, 39):
        assert draw(x[b : b + 1], seed=b, position=100 + b, **options).item() == whole[b]


def test_refuses_other_options(device: torch.device) -> None:
    x = torch.zeros(2, 5, device=device)
    with pytest.raises(ShapeError, match=r"want torch.int32\[2\]"):
        log_prob(x, torch.zeros(2, dtype=torch.int64, device=device))
    with pytest.raises(ShapeError, match="want unit stride"):
        argmax(x.T)
