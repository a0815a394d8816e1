"""Attention over the latent cache: against float64, whatever the pages, chunks and neighbours."""

import pytest
import torch
from torch import Tensor

from ops.mla.attention import latent_attention
from ops.mla.project import absorb_queries, expand_values
from tests.reference.mla import attention
from tests.reference.numbers import relative_error

RANK, ROPE, NOPE, VALUE, HEADS, PAGE = 48, 16, 32, 24, 3, 64


def index(values: list, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(rows: Tensor, pages: list[int], device: torch.device) -> Tensor:
    """A poisoned cache in which the rows of one sequence lie in the given pages."""
    cache = torch.full((max(pages) + 2, PAGE, rows.shape[1]), float("nan"), dtype=rows.dtype)
    for i, row in enumerate(rows):
        cache[pages[i // PAGE], i % PAGE] = row
    return cache.to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "past"), [(0, 0), (1, 0), (33, 0), (3, 63), (2, 600)])
def test_absorbed_equals_expanded(device: torch.device, dtype: torch.dtype, n: int, past: int) -> None:
    """The whole path: absorb, attend over scattered pages, expand."""
    q = normal(n, HEADS, NOPE + ROPE).mul(2).to(dtype)
    rows = normal(past + n, RANK + ROPE, seed=1).to(dtype)
    w = normal(HEADS, NOPE + VALUE, RANK, seed=2).mul(RANK**-0.5).to(dtype)
    pages = list(range(11, -1, -1))[: -(-(past + n) // PAGE) or 1]
    z = latent_attention(
        absorb_queries(q.to(device), w.to(device), ROPE), filled(rows, pages, device), index([pages], device),
        index([0] * n, device), index(list(range(past, past + n)), device), (NOPE + ROPE) ** -0.5,
        rank=RANK, n_keys=past + n,
    )  # fmt: skip
    o = expand_values(z, w.to(device), NOPE)
    want = attention(q.double(), rows.double(), w.double(), NOPE)
    assert relative_error(o, want) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_bits_depend_on_the_position_alone(device: torch.device) -> None:
    """Alone or beside others, in these pages or those, in a short launch or one bounded by a longer sequence."""
    q = normal(8, HEADS, RANK + ROPE).bfloat16().to(device)
    first, second = normal(700, RANK + ROPE, seed=1).bfloat16(), normal(70, RANK + ROPE, seed=2).bfloat16()
    scale, pages = 0.1, [5, 2, 7]
    alone = latent_attention(
        q[:4], filled(second, [0, 1], device), index([[0, 1]], device), index([0] * 4, device),
        index([0, 17, 63, 69], device), scale, rank=RANK, n_keys=70,
    )  # fmt: skip
    long = list(range(20, 31))
    cache = filled(first, long, device)
    for i, row in enumerate(second):
        cache[pages[i // PAGE], i % PAGE] = row.to(device)
    table = index([long, pages + [0] * (len(long) - 3)], device)
    together = latent_attention(
        torch.cat([q[4:], q[:4]]), cache, table, index([0] * 4 + [1] * 4, device),
        index([699, 0, 511, 512, 0, 17, 63, 69], device), scale, rank=RANK, n_keys=700,
    )  # fmt: skip
    assert torch.equal(alone, together[4:])
    for t, position in enumerate([699, 0, 511, 512]):
        one = latent_attention(
            q[4 + t : 5 + t], cache, table, index([0], device), index([position], device), scale,
            rank=RANK, n_keys=position + 1,
        )  # fmt: skip
        assert torch.equal(one[0], together[t]), f"position {position}"


def test_partials_of_many_groups(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that splits may take changes how many tokens go together, not their bits."""
    q, rows = normal(5, HEADS, RANK + ROPE).to(device), normal(600, RANK + ROPE, seed=1)
    pages = list(range(10))
    arguments = (filled(rows, pages, device), index([pages], device), index([0] * 5, device))
    position_t = index([599, 3, 520, 511, 512], device)
    want = latent_attention(q, *arguments, position_t, 0.1, rank=RANK, n_keys=600)
    monkeypatch.setattr("ops.mla.attention.PARTIAL_BYTES", 2 * 2 * HEADS * RANK * 4)
    assert torch.equal(want, latent_attention(q, *arguments, position_t, 0.1, rank=RANK, n_keys=600))


def test_large_scores(device: torch.device) -> None:
    """Scores in the hundreds, of either sign, in every split."""
    q, rows = normal(2, HEADS, RANK + ROPE).to(device), normal(1100, RANK + ROPE, seed=1)
    pages = list(range(18))
    z = latent_attention(
        q, filled(rows, pages, device), index([pages], device), index([0, 0], device), index([1098, 1099], device),
        20.0, rank=RANK, n_keys=1100,
    )  # fmt: skip
    score = torch.einsum("thr,ir->thi", q.double().cpu(), rows.double()) * 20
    score[0, :, 1099] = -torch.inf
    assert relative_error(z, torch.einsum("thi,ir->thr", score.softmax(-1), rows[:, :RANK].double())) < 1e-4
