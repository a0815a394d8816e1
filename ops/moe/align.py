"""Routes grouped by expert row, in tiles of 16 that one program of an expert kernel takes.

A route is one (token, choice) pair, numbered t * A + a. Groups stand in the order of their rows, routes ascend inside a
group, and each group is filled up to a multiple of 16 with -1. The number of tiles in use is known on the device only,
so both results are as long as the worst case; what is not used is -1.

Letters: t tokens, a active experts, r expert rows, m places of routes, n tiles.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.checks import describe, expect
from ops.compile import Spec

TILE = 16
FEW = 64  # routes that one program compares with each other


class Alignment(NamedTuple):
    """Work list of the expert kernels."""

    route_m: Tensor  # int32: route at each place, -1 where a tile is not full
    row_n: Tensor  # int32: expert row of each tile of 16 places, -1 where the tile is not used


class Tiles(NamedTuple):
    rows: int
    routes: int


def tiles(n_routes: int, n_rows: int, device: str) -> Tiles:
    """Integers only, so tiles change nothing; the interpreter wants few programs."""
    rows, routes = triton.next_power_of_2(n_rows), triton.next_power_of_2(n_routes)
    return Tiles(rows, min(routes, 1024)) if device == "cpu" else Tiles(min(rows, 4), 1024)


@triton.jit
def _clear(route_ptr, row_ptr, n, n_tiles, TILE: tl.constexpr):
    """Mark tiles ``n`` as not used."""
    tl.store(row_ptr + n, -1, mask=n < n_tiles)
    tl.store(route_ptr + n[:, None] * TILE + tl.arange(0, TILE)[None, :], -1, mask=(n < n_tiles)[:, None])


@triton.jit
def _fill_up(route_ptr, first, count, TILE: tl.constexpr):
    """Put -1 behind groups of ``count`` routes that begin at tile ``first``."""
    i = tl.arange(0, TILE)[None, :]
    hole = (i >= count[:, None] % TILE) & (count[:, None] % TILE > 0)
    tl.store(route_ptr + (first + count // TILE)[:, None] * TILE + i, -1, mask=hole)


@triton.jit(do_not_specialize=["n_routes", "n_tiles"])
def _align_few_kernel(rows_ptr, route_ptr, row_ptr, n_routes, n_tiles, TILE: tl.constexpr, BLOCK_M: tl.constexpr):
    # one program: every route looks at every other
    m = tl.arange(0, BLOCK_M)
    live = m < n_routes
    row = tl.load(rows_ptr + m, mask=live, other=-1)
    same = (row[:, None] == row[None, :]) & live[:, None]
    earlier = tl.sum((same & (m[None, :] < m[:, None])).to(tl.int32), axis=1)
    count = tl.where(earlier == 0, tl.sum(same.to(tl.int32), axis=1), 0)
    # the same by columns: same is symmetric
    leads = tl.sum((same & (m[:, None] < m[None, :])).to(tl.int32), axis=0) == 0
    taken = tl.where(leads, tl.cdiv(tl.sum(same.to(tl.int32), axis=0), TILE), 0)
    first = tl.sum(tl.where(row[None, :] < row[:, None], taken[None, :], 0), axis=1)
    tl.store(route_ptr + first * TILE + earlier, m, mask=live)
    tl.store(row_ptr + first + earlier // TILE, row, mask=live & (earlier % TILE == 0))
    _fill_up(route_ptr, first, count, TILE)
    _clear(route_ptr, row_ptr, tl.sum(taken) + m, n_tiles, TILE)


@triton.jit
def _count(rows_ptr, r, n_routes, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr):
    """Number of routes of each row ``r``."""
    count = tl.full([BLOCK_R], 0, tl.int32)
    for start in range(0, n_routes, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        row = tl.load(rows_ptr + m, mask=m < n_routes, other=-1)
        count += tl.sum((row[None, :] == r[:, None]).to(tl.int32), axis=1)
    return count


@triton.jit(do_not_specialize=["n_routes"])
def _count_kernel(rows_ptr, count_ptr, n_routes, R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr):
    # one program per block of expert rows
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    tl.store(count_ptr + r, _count(rows_ptr, r, n_routes, BLOCK_R, BLOCK_M), mask=r < R)


@triton.jit(do_not_specialize=["n_routes", "n_tiles"])
def _place_kernel(
    rows_ptr, count_ptr, route_ptr, row_ptr, n_routes, n_tiles, R: tl.constexpr, TILE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_ALL: tl.constexpr,
):  # fmt: skip
    # one program per block of expert rows
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    every = tl.arange(0, BLOCK_ALL)
    taken = tl.cdiv(tl.load(count_ptr + every, mask=every < R, other=0), TILE)
    count = tl.load(count_ptr + r, mask=r < R, other=0)
    first = tl.sum(tl.where(every[None, :] < r[:, None], taken[None, :], 0), axis=1)
    used = tl.sum(taken)
    seen = tl.full([BLOCK_R], 0, tl.int32)
    for start in range(0, n_routes, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        row = tl.load(rows_ptr + m, mask=m < n_routes, other=-1)
        mine = row[None, :] == r[:, None]
        place = seen[:, None] + tl.cumsum(mine.to(tl.int32), axis=1) - 1
        tl.store(route_ptr + first[:, None] * TILE + place, m[None, :], mask=mine)
        tl.store(row_ptr + first[:, None] + place // TILE, row[None, :], mask=mine & (place % TILE == 0))
        seen += tl.sum(mine.to(tl.int32), axis=1)
    _fill_up(route_ptr, first, count, TILE)
    for start in range(used + tl.program_id(0) * BLOCK_M, n_tiles, tl.num_programs(0) * BLOCK_M):
        _clear(route_ptr, row_ptr, start + tl.arange(0, BLOCK_M), n_tiles, TILE)


def align(rows_ta: Tensor, n_rows: int) -> Alignment:
    """Group the routes by expert row, in one or two launches, without asking the host.

    Args:
        rows_ta: int32 expert row of each route, contiguous, every value in 0 .. n_rows - 1.
        n_rows: rows of the banks.

    Returns:
        min(T A, n_rows + T A // 16) tiles.

    Raises:
        ShapeError: ``rows_ta`` is not int32 or not contiguous.
    """
    expect(rows_ta.dtype == torch.int32 and rows_ta.is_contiguous(), f"rows_ta is {describe(rows_ta)}, want int32")
    n_routes = rows_ta.numel()
    n_tiles = min(n_routes, n_rows + n_routes // TILE)
    route_m = torch.empty(n_tiles * TILE, dtype=torch.int32, device=rows_ta.device)
    row_n = torch.empty(n_tiles, dtype=torch.int32, device=rows_ta.device)
    if 0 < n_routes <= FEW:
        block = triton.next_power_of_2(n_routes)
        _align_few_kernel[(1,)](rows_ta, route_m, row_n, n_routes, n_tiles, TILE=TILE, BLOCK_M=block, num_warps=4)
    elif n_routes:
        rows, routes = tiles(n_routes, n_rows, rows_ta.device.type)
        grid = (triton.cdiv(n_rows, rows),)
        blocks = {"R": n_rows, "BLOCK_R": rows, "BLOCK_M": routes, "num_warps": 4}
        count_r = torch.empty(n_rows, dtype=torch.int32, device=rows_ta.device)
        _count_kernel[grid](rows_ta, count_r, n_routes, **blocks)
        _place_kernel[grid](
            rows_ta, count_r, route_m, row_n, n_routes, n_tiles, TILE=TILE, BLOCK_ALL=triton.next_power_of_2(n_rows),
            **blocks,
        )  # fmt: skip
    return Alignment(route_m, row_n)


def compile_specs() -> list[Spec]:
    """Kimi K3: 896 rows, four tokens and a long prefill."""
    types = {"rows_ptr": "*i32", "count_ptr": "*i32", "route_ptr": "*i32", "row_ptr": "*i32"}
    types |= {"n_routes": "i32", "n_tiles": "i32"}

    def spec(name: str, kernel: Any, **constants: int) -> Spec:
        return Spec(
            name, kernel, {k: v for k, v in types.items() if k in kernel.arg_names}, constants, {"num_warps": 4}
        )

    rows, routes = tiles(131072, 896, "cuda")
    return [
        spec("align_few", _align_few_kernel, TILE=TILE, BLOCK_M=FEW),
        spec("align_count", _count_kernel, R=896, BLOCK_R=rows, BLOCK_M=routes),
        spec("align_place", _place_kernel, R=896, TILE=TILE, BLOCK_R=rows, BLOCK_M=routes, BLOCK_ALL=1024),
    ]
