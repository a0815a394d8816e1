"""Kimi delta attention in float64, one token and one head at a time (kimi-k3.md, section 2.5)."""

import torch
from torch import Tensor


def causal_conv_silu(u: Tensor, w: Tensor) -> Tensor:
    """u [T, C], w [C, J]; the last tap is the current token's."""
    taps = w.shape[1]
    padded = torch.cat([u.new_zeros(taps - 1, u.shape[1]), u])
    y = sum(padded[j : j + len(u)] * w[:, j] for j in range(taps))
    return y * torch.sigmoid(y)


def log_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """a [T, H, K], a_log [H], dt_bias [H, K]."""
    x, rate = a + dt_bias, a_log.exp()[:, None]
    if lower_bound is None:
        return -rate * torch.nn.functional.softplus(x)
    return lower_bound * torch.sigmoid(rate * x)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q, k [T, H, K] raw, v [T, H, P], g [T, H, K] log decay, beta [T, H] in (0, 1); o [T, H, P] and the state."""
    heads, keys = q.shape[1:]
    q, k = unit(q) * keys**-0.5, unit(k)
    s = q.new_zeros(heads, keys, v.shape[2]) if state is None else state
    out = []
    for t in range(len(q)):
        s = g[t].exp()[:, :, None] * s
        error = v[t] - torch.einsum("hkp,hk->hp", s, k[t])
        s = s + beta[t][:, None, None] * k[t][:, :, None] * error[:, None, :]
        out.append(torch.einsum("hkp,hk->hp", s, q[t]))
    return (torch.stack(out) if out else v.new_zeros(v.shape)), s
