"""Choice of experts: sigmoid scores, biased selection, unbiased weights.

    s = sg(z)        c = s + bias                                  c selects, s weighs
    ids = the A largest c, descending, lowest expert on ties
    w = s[ids] / (sum s[ids] + 1e-20) * scale                      no division without renormalize

With G > 1 groups of neighbouring experts, only the ``top_groups`` groups with the largest sum of their two largest c
take part. A score that is no number selects last and stays in the weights, so it reaches the logits.

Letters: t tokens, e experts, a active experts.

Source: kimi-k3.md, section 2.4.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.checks import describe, expect
from ops.compile import Spec


class Tiles(NamedTuple):
    rows: int
    warps: int


def tiles(device: str) -> Tiles:
    """A row's rounds see that row alone, so tiles change no bit; the interpreter wants few programs."""
    return Tiles(rows=16, warps=4) if device == "cpu" else Tiles(rows=1, warps=4)


@triton.jit
def _best(c, free, e, NONE: tl.constexpr):
    """Largest ``c`` among ``free`` of each row and its lowest index; NONE where nothing is free."""
    top = tl.max(tl.where(free, c, float("-inf")), axis=1)[:, None]
    return top, tl.min(tl.where(free & (c == top), e, NONE), axis=1)[:, None]


@triton.jit
def _in_top_groups(
    c, e, E: tl.constexpr, G: tl.constexpr, TOP_G: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Whether an expert's group is among the best."""
    group = e // (E // G)
    g = tl.arange(0, BLOCK_G)[None, :]
    score = tl.full([BLOCK_T, BLOCK_G], float("-inf"), tl.float32)
    for i in range(G):
        first, at = _best(c, group == i, e, BLOCK_E)
        second, at = _best(c, (group == i) & (e != at), e, BLOCK_E)
        score = tl.where(g == i, first + second, score)
    inside = e < 0
    free = (g < G) & (score == score)
    for _ in range(TOP_G):
        _, best = _best(score, free, g, BLOCK_G)
        inside = inside | (group == best)
        free = free & (g != best)
    return inside


@triton.jit(do_not_specialize=["n_tokens"])
def _route_kernel(
    z_ptr, bias_ptr, ids_ptr, weight_ptr, stride_z, n_tokens, scale, E: tl.constexpr, A: tl.constexpr,
    RENORMALIZE: tl.constexpr, G: tl.constexpr, TOP_G: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    # one program per block of tokens
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    a = tl.arange(0, BLOCK_A)[None, :]
    live = t < n_tokens
    z = tl.load(z_ptr + t * stride_z + e, mask=live & (e < E), other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    s = tl.sigmoid(z)
    c = s + bias
    c = tl.where(c == c, c, float("-inf"))
    free = (e < E) & live
    if G > 1:
        free = free & _in_top_groups(c, e, E, G, TOP_G, BLOCK_T, BLOCK_E, BLOCK_G)
    ids = tl.full([BLOCK_T, BLOCK_A], 0, tl.int32)
    weights = tl.full([BLOCK_T, BLOCK_A], 0, tl.float32)
    total = tl.full([BLOCK_T, 1], 0, tl.float32)
    for i in range(A):
        _, best = _best(c, free, e, BLOCK_E)
        chosen = e == best
        w = tl.sum(tl.where(chosen, s, 0.0), axis=1)[:, None]
        ids = tl.where(a == i, best, ids)
        weights = tl.where(a == i, w, weights)
        total += w
        free = free & (e != best)
    if RENORMALIZE:
        weights = weights / (total + 1e-20)
    out = live & (a < A)
    tl.store(ids_ptr + t * A + a, ids, mask=out)
    tl.store(weight_ptr + t * A + a, weights * scale, mask=out)


def route(
    logits_te: Tensor,
    bias_e: Tensor,
    n_active: int,
    *,
    renormalize: bool,
    scale: float,
    n_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and their weights.

    Args:
        logits_te: router outputs, unit stride along e, at most 1,024 experts.
        bias_e: added to the scores for the selection only, any float dtype.
        n_active: experts a token.
        renormalize: whether a token's weights sum to ``scale``.
        scale: factor of all weights, applied once either way.
        n_groups: equal groups of neighbouring experts.
        top_groups: groups that take part.

    Returns:
        ids_ta int32, descending by selection score, distinct; weight_ta fp32.

    Raises:
        ShapeError: shapes disagree, or the groups hold fewer than ``n_active`` experts.
    """
    n_tokens, n_experts = logits_te.shape
    expect(
        n_experts <= 1024 and logits_te.stride(1) == 1,
        f"logits_te is {describe(logits_te)}, want unit stride, E <= 1024",
    )
    expect(bias_e.shape == (n_experts,) and bias_e.is_contiguous(), f"bias_e is {describe(bias_e)}, want [{n_experts}]")
    expect(n_experts % n_groups == 0, f"{n_experts} experts are not {n_groups} equal groups")
    per_group = n_experts // n_groups
    expect(n_groups == 1 or per_group > 1, f"a group holds {per_group} expert, want at least two")
    expect(1 <= top_groups <= n_groups, f"top_groups is {top_groups}, want 1 to {n_groups}")
    expect(1 <= n_active <= top_groups * per_group, f"n_active is {n_active}, want 1 to {top_groups * per_group}")
    ids_ta = torch.empty(n_tokens, n_active, dtype=torch.int32, device=logits_te.device)
    weight_ta = torch.empty(n_tokens, n_active, dtype=torch.float32, device=logits_te.device)
    rows, warps = tiles(logits_te.device.type)
    if n_tokens:
        _route_kernel[(triton.cdiv(n_tokens, rows),)](
            logits_te, bias_e, ids_ta, weight_ta, logits_te.stride(0), n_tokens, float(scale),
            E=n_experts, A=n_active, RENORMALIZE=renormalize, G=n_groups, TOP_G=top_groups, BLOCK_T=rows,
            BLOCK_E=triton.next_power_of_2(n_experts), BLOCK_A=triton.next_power_of_2(n_active),
            BLOCK_G=triton.next_power_of_2(n_groups), num_warps=warps,
        )  # fmt: skip
    return ids_ta, weight_ta


def compile_specs() -> list[Spec]:
    """Kimi K3: 16 of 896 experts in one group; and eight groups."""
    types = {"z_ptr": "*fp32", "bias_ptr": "*fp32", "ids_ptr": "*i32", "weight_ptr": "*fp32"}
    types |= {"stride_z": "i32", "n_tokens": "i32", "scale": "fp32"}
    rows, warps = tiles("cuda")
    one = {"E": 896, "A": 16, "RENORMALIZE": True, "G": 1, "TOP_G": 1}
    one |= {"BLOCK_T": rows, "BLOCK_E": 1024, "BLOCK_A": 16, "BLOCK_G": 1}
    return [
        Spec("route", _route_kernel, types, one, {"num_warps": warps}),
        Spec("route_groups", _route_kernel, types, one | {"G": 8, "TOP_G": 4, "BLOCK_G": 8}, {"num_warps": warps}),
    ]
