"""Root-mean-square normalisation (kimi-k3.md, section 2.2)."""

from torch import Tensor


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
