"""What the recurrent and the chunked form of Kimi delta attention share: decay, unit vectors, checks.

    g = lower_bound * sg(exp(A_log[h]) (a + dt_bias))         Kimi K3, bounded
    g = -exp(A_log[h]) softplus(a + dt_bias)                  Kimi-Linear
    unit(x) = x / sqrt(sum x^2 + 1e-6)

Source: kimi-k3.md, section 2.5.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.checks import describe, expect


@triton.jit
def log_decay(a, a_log, dt_bias, LOWER: tl.constexpr):
    """Logarithm of the decay, negative. LOWER None: unbounded."""
    x = a + dt_bias
    if LOWER is None:
        g = -tl.exp(a_log) * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    else:
        g = LOWER * tl.sigmoid(tl.exp(a_log) * x)
    return g


def expect_kda(
    mem_shkp: Tensor, q_thk: Tensor, k_thk: Tensor, v_thp: Tensor, decay_thk: Tensor, beta_th: Tensor,
    a_log_h: Tensor, dt_bias_hk: Tensor,
) -> None:  # fmt: skip
    """Raise ShapeError where the operands of Kimi delta attention disagree."""
    _, heads, keys, values = mem_shkp.shape
    tokens = len(q_thk)
    expect(mem_shkp.is_contiguous() and mem_shkp.dtype == torch.float32, f"mem_shkp is {describe(mem_shkp)}, want fp32")
    for name, x, size in (("q", q_thk, keys), ("k", k_thk, keys), ("v", v_thp, values), ("decay", decay_thk, keys)):
        want = (tokens, heads, size)
        expect(x.shape == want and x.stride()[1:] == (size, 1), f"{name} is {describe(x)}, want {list(want)} packed")
    expect(
        beta_th.shape == (tokens, heads) and beta_th.stride(1) == 1,
        f"beta_th is {describe(beta_th)}, want [T, {heads}]",
    )
    expect(len(a_log_h) >= heads and a_log_h.dim() == 1, f"a_log_h is {describe(a_log_h)}, want [{heads}] or longer")
    expect(dt_bias_hk.shape == (heads, keys), f"dt_bias_hk is {describe(dt_bias_hk)}, want [{heads}, {keys}]")
    expect(dt_bias_hk.is_contiguous(), f"dt_bias_hk is {describe(dt_bias_hk)}, want it contiguous")
