"""Multi-head latent attention in float64, keys and values expanded for every head (kimi-k3.md, section 2.7)."""

import torch
from torch import Tensor


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def attention(q: Tensor, latent: Tensor, w_kv_b: Tensor, nope: int) -> Tensor:
    """q [T, H, nope + rope], latent rows [T, R + rope] with c already normed, w_kv_b [H, nope + P, R]; causal.

    The queries are the last of as many positions as there are latent rows.
    """
    n, heads, width = q.shape
    rank = w_kv_b.shape[2]
    kv = torch.einsum("tr,hxr->thx", latent[:, :rank], w_kv_b)
    keys = torch.cat([kv[..., :nope], latent[:, None, rank:].expand(-1, heads, -1)], -1)
    scores = torch.einsum("qhx,khx->hqk", q, keys) * width**-0.5
    past = len(latent) - n
    seen = torch.arange(len(latent)) <= past + torch.arange(n)[:, None]
    return torch.einsum("hqk,khp->qhp", scores.masked_fill(~seen, -torch.inf).softmax(-1), kv[..., nope:])
