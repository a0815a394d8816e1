"""Attention residuals: a sublayer reads a softmax mix of closed blocks and the open one (kimi-k3.md, section 2.1)."""

import torch
from torch import Tensor


def mix(candidates: list[Tensor], gain: Tensor, proj: Tensor, eps: float) -> Tensor:
    """candidates [T, D] each, gain [D], proj [1, D]."""
    v = torch.stack(candidates)
    k = v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()
    share = (k * (gain * proj[0])).sum(-1).softmax(0)
    return (share[..., None] * v).sum(0)
