"""Gathered rows are the table's rows."""

import pytest
import torch

from ops.checks import ShapeError
from ops.embedding import gather_rows, gather_rows_fp8

IDS = torch.tensor([4, 0, 49, 4, *range(20)], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows(device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(gather_rows(IDS.to(device), table.to(device)).cpu(), table[IDS.long()])
    wide = torch.empty(len(IDS), 40, dtype=torch.float32, device=device)
    assert torch.equal(gather_rows(IDS.to(device), table.to(device), out_td=wide).cpu(), table[IDS.long()].float())
    assert gather_rows(IDS[:0].to(device), table.to(device)).shape == (0, 40)


def test_fp8_rows_take_their_own_scale(device: torch.device) -> None:
    table = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).mul(100).to(torch.float8_e4m3fn)
    scale = torch.arange(1, 51, dtype=torch.float32) / 64
    out = torch.empty(len(IDS), 40, dtype=torch.bfloat16, device=device)
    gather_rows_fp8(IDS.to(device), table.to(device), scale.to(device), out_td=out)
    want = table.double()[IDS.long()] * scale.double()[IDS.long(), None]
    assert torch.equal(out.cpu(), want.to(torch.bfloat16))


def test_refusals(device: torch.device) -> None:
    table = torch.zeros(4, 8, device=device)
    with pytest.raises(ShapeError, match="want int32"):
        gather_rows(torch.zeros(2, dtype=torch.int64, device=device), table)
    with pytest.raises(ShapeError, match="want float8_e4m3fn"):
        gather_rows_fp8(IDS[:2].to(device), table, torch.ones(4, device=device), out_td=table[:2])
