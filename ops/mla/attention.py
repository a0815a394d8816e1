"""Causal attention of absorbed queries over the latent cache.

    s[i] = scale q . row[i]          z = sum_i softmax_i(s) row[i][:R]          i = 0 .. position of the token

Keys are taken in splits of 512 positions, tiles of 32 inside a split, always from position 0 on: splits are partial
softmaxes, merged in ascending order. Where a token's splits and tiles lie depends on positions alone, so its bits do
not depend on the chunk it came in, on its neighbours, or on where its pages are.

Letters: t tokens, h heads, r latent columns, b sequences, y pages, u places in a page, s splits.

Source: kimi-k3.md, section 2.7; Milakov and Gimelshein 2018 (online softmax).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.bits import cast, dot_dtype
from ops.checks import describe, expect
from ops.compile import Spec

SPLIT = 512  # key positions
PARTIAL_BYTES = 1 << 28  # most that unmerged splits may take


class Tiles(NamedTuple):
    heads: int
    keys: int
    warps: int


def tiles(fp32: bool, device: str) -> Tiles:
    """A function of the dtype and of where it runs. The tile of keys is part of the summation order."""
    if device == "cpu":
        return Tiles(16, 64, 4)
    return Tiles(16, 16, 8) if fp32 else Tiles(16, 32, 4)


@triton.jit(do_not_specialize=["stride_pages", "splits"])
def _split_kernel(
    q_ptr, cache_ptr, pages_ptr, seq_ptr, position_ptr, o_ptr, top_ptr, total_ptr, stride_pages, scale, splits,
    H: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr, U: tl.constexpr, MERGED: tl.constexpr, SPAN: tl.constexpr,
    DOT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    # one program per token, block of heads and split of key positions
    t, s = tl.program_id(0).to(tl.int64), tl.program_id(2)
    position = tl.load(position_ptr + t)
    if s * SPAN > position:
        return
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    r, x = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_ROPE)
    pages = pages_ptr + tl.load(seq_ptr + t).to(tl.int64) * stride_pages
    q_at = q_ptr + (t * H + h[:, None]) * (R + ROPE)
    live_h = (h < H)[:, None]
    q = tl.load(q_at + r[None, :], mask=live_h & (r < R)[None, :], other=0.0).to(tl.float32).to(DOT)
    q_rope = tl.load(q_at + R + x[None, :], mask=live_h & (x < ROPE)[None, :], other=0.0).to(tl.float32).to(DOT)
    top = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
    for i0 in range(s * SPAN, tl.minimum((s + 1) * SPAN, position + 1), BLOCK_U):
        i = i0 + tl.arange(0, BLOCK_U)
        seen = i <= position
        page = tl.load(pages + i // U, mask=seen, other=0).to(tl.int64)
        row = cache_ptr + (page * U + i % U)[:, None] * (R + ROPE)
        c = tl.load(row + r[None, :], mask=seen[:, None] & (r < R)[None, :], other=0.0).to(tl.float32).to(DOT)
        rope = tl.load(row + R + x[None, :], mask=seen[:, None] & (x < ROPE)[None, :], other=0.0).to(tl.float32).to(DOT)
        score = tl.dot(q, tl.trans(c), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(rope), score, input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        keep = tl.exp(top - new_top)
        weight = tl.exp(score - new_top[:, None])
        total = total * keep + tl.sum(weight, axis=1)
        acc = acc * keep[:, None] + tl.dot(cast(weight, DOT), c, input_precision="ieee")
        top = new_top
    at = (t * splits + s) * H + h
    if MERGED:
        acc = acc / total[:, None]
    else:
        tl.store(top_ptr + at, top, mask=h < H)
        tl.store(total_ptr + at, total, mask=h < H)
    out = cast(acc, o_ptr.dtype.element_ty)
    tl.store(o_ptr + at.to(tl.int64)[:, None] * R + r[None, :], out, mask=live_h & (r < R)[None, :])


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    o_ptr, top_ptr, total_ptr, position_ptr, z_ptr, splits,
    H: tl.constexpr, R: tl.constexpr, SPAN: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # one program per token and head
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = tl.arange(0, BLOCK_R)
    at = t * splits * H + h
    top, total = tl.load(top_ptr + at), tl.load(total_ptr + at)
    acc = tl.load(o_ptr + at * R + r, mask=r < R, other=0.0)
    for _ in range(tl.load(position_ptr + t) // SPAN):
        at += H
        split_top = tl.load(top_ptr + at)
        new_top = tl.maximum(top, split_top)
        keep, weight = tl.exp(top - new_top), tl.exp(split_top - new_top)
        total = total * keep + tl.load(total_ptr + at) * weight
        acc = acc * keep + tl.load(o_ptr + at * R + r, mask=r < R, other=0.0) * weight
        top = new_top
    tl.store(z_ptr + (t * H + h) * R + r, cast(acc / total, z_ptr.dtype.element_ty), mask=r < R)


def latent_attention(
    q_thr: Tensor, cache_yur: Tensor, pages_by: Tensor, seq_t: Tensor, position_t: Tensor, scale: float,
    *, rank: int, n_keys: int,
) -> Tensor:  # fmt: skip
    """Attend from each token to all positions of its sequence up to its own.

    Args:
        q_thr: absorbed queries [T, H, rank + rope], bf16 or fp32, contiguous.
        cache_yur: latent rows [pages, places, rank + rope], contiguous; the tokens' own rows are already there.
        pages_by: int32, page of each run of U positions of a sequence.
        seq_t: int32, sequence of a token.
        position_t: int32, position of a token.
        scale: factor of the scores.
        rank: columns of a row that are values.
        n_keys: largest position + 1, on the host; it bounds the launch and does not show in the bits.

    Returns:
        [T, H, rank], contiguous, in the dtype of ``q_thr``.

    Raises:
        ShapeError: shapes, strides or dtypes disagree.
    """
    n_tokens, heads, width = q_thr.shape
    places = cache_yur.shape[1]
    expect(q_thr.is_contiguous(), f"q_thr is {describe(q_thr)}, want it contiguous")
    expect(
        cache_yur.shape[2] == width and cache_yur.is_contiguous() and 0 < rank <= width,
        f"cache_yur is {describe(cache_yur)}, want [pages, places, {width}] with rank {rank} inside",
    )
    expect(
        pages_by.shape[1] * places >= n_keys, f"pages_by is {describe(pages_by)}, want {n_keys} keys, {places} a page"
    )
    expect(pages_by.stride(1) == 1 or n_keys <= places, f"pages_by is {describe(pages_by)}, want unit stride along y")
    z_thr = torch.empty(n_tokens, heads, rank, dtype=q_thr.dtype, device=q_thr.device)
    splits = max(1, triton.cdiv(n_keys, SPLIT))
    if splits == 1:
        _attend(q_thr, cache_yur, pages_by, seq_t, position_t, scale, z_thr, None, None, splits)
        return z_thr
    group = max(1, PARTIAL_BYTES // (splits * heads * rank * 4))
    for t in range(0, n_tokens, group):
        some = slice(t, t + group)
        shape = (min(group, n_tokens - t), splits, heads)
        o_tshr = torch.empty(*shape, rank, dtype=torch.float32, device=q_thr.device)
        top_tsh, total_tsh = torch.empty(2, *shape, dtype=torch.float32, device=q_thr.device).unbind()
        _attend(
            q_thr[some], cache_yur, pages_by, seq_t[some], position_t[some], scale, o_tshr, top_tsh, total_tsh, splits
        )
        _merge_kernel[(shape[0], heads)](
            o_tshr, top_tsh, total_tsh, position_t[some], z_thr[some], splits, H=heads, R=rank, SPAN=SPLIT,
            BLOCK_R=triton.next_power_of_2(rank), num_warps=4,
        )  # fmt: skip
    return z_thr


def _attend(
    q_thr: Tensor, cache_yur: Tensor, pages_by: Tensor, seq_t: Tensor, position_t: Tensor, scale: float,
    o: Tensor, top: Tensor | None, total: Tensor | None, splits: int,
) -> None:  # fmt: skip
    n_tokens, heads, width = q_thr.shape
    dot = dot_dtype(q_thr)
    tile = tiles(dot == tl.float32, q_thr.device.type)
    rank = o.shape[-1]
    if n_tokens:
        _split_kernel[(n_tokens, triton.cdiv(heads, tile.heads), splits)](
            q_thr, cache_yur, pages_by, seq_t, position_t, o, o if top is None else top, o if total is None else total,
            pages_by.stride(0), scale, splits,
            H=heads, R=rank, ROPE=width - rank, U=cache_yur.shape[1], MERGED=splits == 1, SPAN=SPLIT, DOT=dot,
            BLOCK_H=tile.heads, BLOCK_R=max(16, triton.next_power_of_2(rank)),
            BLOCK_ROPE=max(16, triton.next_power_of_2(width - rank)), BLOCK_U=tile.keys,
            num_warps=tile.warps, num_stages=1,
        )  # fmt: skip


def compile_specs() -> list[Spec]:
    """Kimi K3: 96 heads, rank 512, rope 64, at 8,192 keys."""
    types = dict.fromkeys(("q_ptr", "cache_ptr", "z_ptr"), "*bf16")
    types |= dict.fromkeys(("pages_ptr", "seq_ptr", "position_ptr"), "*i32")
    types |= dict.fromkeys(("o_ptr", "top_ptr", "total_ptr"), "*fp32")
    types |= {"stride_pages": "i32", "scale": "fp32", "splits": "i32"}
    merge = {"H": 96, "R": 512, "SPAN": SPLIT, "BLOCK_R": 512}
    specs = [Spec("latent_merge", _merge_kernel, types, merge, {"num_warps": 4})]
    for name, dot in (("latent_attention", tl.bfloat16), ("latent_attention_fp32", tl.float32)):
        tile = tiles(dot == tl.float32, "cuda")
        blocks = {"BLOCK_H": tile.heads, "BLOCK_ROPE": 64, "BLOCK_U": tile.keys}
        sizes = merge | blocks | {"ROPE": 64, "U": 64, "MERGED": False, "DOT": dot}
        specs.append(Spec(name, _split_kernel, types, sizes, {"num_warps": tile.warps, "num_stages": 1}))
    return specs
