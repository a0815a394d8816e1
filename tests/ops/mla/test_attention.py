"""The latent cache and attention over it: against float64, whatever the pages, chunks and neighbours."""

import pytest
import torch
from torch import Tensor

from ops.mla.attention import latent_attention
from ops.mla.cache import append_latent_
from ops.mla.project import absorb_queries, expand_values
from tests.reference.mla import attention, rms
from tests.reference.numbers import TOLERANCE, relative_error

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
def test_append(device: torch.device, dtype: torch.dtype) -> None:
    kv, gain = normal(5, RANK + ROPE).to(dtype), normal(RANK, seed=1).to(dtype)
    cache = torch.full((2, PAGE, RANK + ROPE), float("nan"), dtype=dtype, device=device)
    append_latent_(cache, kv.to(device), gain.to(device), 1e-6, index([70, 3, -1, 0, 127], device, torch.int64))
    rows = cache.flatten(0, 1).cpu()
    want = rms(kv[:, :RANK].double(), gain.double(), 1e-6)
    assert relative_error(rows[[70, 3, 0, 127], :RANK], want[[0, 1, 3, 4]]) < 2 * TOLERANCE[dtype]
    assert torch.equal(rows[[70, 3, 0, 127], RANK:], kv[[0, 1, 3, 4], RANK:])
    assert rows.isnan().all(1).sum() == 2 * PAGE - 4


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


def test_projections_of_a_row_are_its_own(device: torch.device) -> None:
    q = normal(20, HEADS, NOPE + ROPE).bfloat16().to(device)
    w = normal(HEADS, NOPE + VALUE, RANK, seed=1).bfloat16().to(device)
    together = absorb_queries(q, w, ROPE)
    assert torch.equal(together[..., RANK:], q[..., NOPE:])
    assert torch.equal(together[17:18], absorb_queries(q[17:18].contiguous(), w, ROPE))
    z = together[..., :RANK].contiguous()
    assert torch.equal(expand_values(z, w, NOPE)[19], expand_values(z[19:], w, NOPE)[0])
