"""Appending to the latent cache: float64, untouched places, padding, strided rows."""

import pytest
import torch

from ops.checks import ShapeError
from ops.mla.cache import append_latent_
from tests.reference.mla import rms
from tests.reference.numbers import TOLERANCE, relative_error

RANK, ROPE, PAGE, EPS = 48, 16, 64, 1e-6


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rank", "rope"), [(RANK, ROPE), (33, 0), (512, 64)])
def test_rows_land_in_their_places(device: torch.device, dtype: torch.dtype, rank: int, rope: int) -> None:
    wide, gain = normal(5, 8 + rank + rope).to(dtype), normal(rank, seed=1).to(dtype)
    kv = wide[:, 8:]
    cache = torch.full((2, PAGE, rank + rope), float("nan"), dtype=dtype, device=device)
    place_t = torch.tensor([70, 3, -1, 0, 127], device=device)
    append_latent_(cache, wide.to(device)[:, 8:], gain.to(device), EPS, place_t)
    rows = cache.flatten(0, 1).cpu()
    want = rms(kv[:, :rank].double(), gain.double(), EPS)
    assert relative_error(rows[[70, 3, 0, 127], :rank], want[[0, 1, 3, 4]]) < TOLERANCE[dtype]
    assert torch.equal(rows[[70, 3, 0, 127], rank:], kv[[0, 1, 3, 4], rank:])
    assert rows.isnan().all(1).sum() == 2 * PAGE - 4


def test_a_row_is_its_own(device: torch.device) -> None:
    kv, gain = normal(33, RANK + ROPE).bfloat16().to(device), normal(RANK, seed=1).bfloat16().to(device)
    together, alone = (torch.full((1, PAGE, RANK + ROPE), float("nan")).bfloat16().to(device) for _ in range(2))
    append_latent_(together, kv, gain, EPS, torch.arange(33, device=device))
    for t in (0, 17, 32):
        append_latent_(alone, kv[t : t + 1], gain, EPS, torch.tensor([t], device=device))
        assert torch.equal(alone[0, t], together[0, t])
    append_latent_(alone, kv[:0], gain, EPS, torch.arange(0, device=device))
    assert (~alone[0].isnan().all(1)).sum() == 3


def test_refuses_32_bit_places(device: torch.device) -> None:
    cache = torch.zeros(1, PAGE, RANK + ROPE, device=device)
    with pytest.raises(ShapeError, match="place_t"):
        append_latent_(cache, cache[0, :1], cache[0, 0, :RANK], EPS, torch.zeros(1, dtype=torch.int32, device=device))
