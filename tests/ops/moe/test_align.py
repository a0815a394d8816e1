"""Routes grouped by expert row, against a plain loop."""

import pytest
import torch

from ops.checks import ShapeError
from ops.moe.align import FEW, align


def expected(rows: list[int], n_rows: int) -> tuple[list[int], list[int]]:
    route_m: list[int] = []
    row_n: list[int] = []
    for row in range(n_rows):
        group = [route for route, wanted in enumerate(rows) if wanted == row]
        padding = -len(group) % 16
        route_m += group + [-1] * padding
        row_n += [row] * ((len(group) + padding) // 16)
    return route_m, row_n


def check(rows_ta: torch.Tensor, n_rows: int) -> None:
    rows = rows_ta.flatten().tolist()
    route_m, row_n = expected(rows, n_rows)
    got = align(rows_ta, n_rows)
    assert len(got.row_n) == min(len(rows), n_rows + len(rows) // 16)
    assert len(got.route_m) == 16 * len(got.row_n)
    assert got.row_n.tolist() == row_n + [-1] * (len(got.row_n) - len(row_n))
    assert got.route_m.tolist() == route_m + [-1] * (len(got.route_m) - len(route_m))


@pytest.mark.parametrize("n_tokens", [0, 1, 2, 12, 13, 33, 63, 300, 2000])
@pytest.mark.parametrize(("n_rows", "n_active"), [(8, 5), (40, 5), (896, 3)])
def test_groups(device: torch.device, n_tokens: int, n_rows: int, n_active: int) -> None:
    torch.manual_seed(n_tokens)
    shape = (n_tokens, n_active)
    check(torch.randint(n_rows, shape, dtype=torch.int32, device=device), n_rows)


@pytest.mark.parametrize("n_routes", [1, 15, 16, 17, 32, FEW, FEW + 1, 160])
@pytest.mark.parametrize("row", [0, 3, 9])
def test_one_row_takes_all(device: torch.device, n_routes: int, row: int) -> None:
    check(torch.full((n_routes, 1), row, dtype=torch.int32, device=device), 10)


def test_worst_case_fits(device: torch.device) -> None:
    """Every row has a group of 16 n + 1: no tile more would fit."""
    rows = torch.arange(6, dtype=torch.int32, device=device).repeat(17)
    got = align(rows[:, None], 6)
    assert (got.row_n >= 0).sum() == len(got.row_n) == 12
    check(rows[:, None], 6)


def test_refuses_other_integers(device: torch.device) -> None:
    with pytest.raises(ShapeError, match="want int32"):
        align(torch.zeros(2, 2, dtype=torch.int64, device=device), 4)
