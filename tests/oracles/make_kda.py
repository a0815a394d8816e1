"""Kimi delta attention by fla-core's plain recurrent and chunked references, for both gates, with K != V.

From the repository's root, in an environment with torch 2.13.0, triton 3.9.0, einops and fla-core 0.6.0:

    PYTHONPATH=. python tests/oracles/make_kda.py
"""

from pathlib import Path

import numpy as np
import torch
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda

from tests.oracles.store import compute_in_float64
from tests.reference.weights import kda_inputs


def main() -> None:
    compute_in_float64()
    out: dict[str, np.ndarray] = {}
    for name, bound in (("bounded", -5.0), ("unbounded", None)):
        made = {key: torch.from_numpy(x)[None] for key, x in kda_inputs(bound is not None).items()}
        q, k, v, a, beta, state = (made[key] for key in ("q", "k", "v", "a", "beta", "state"))
        a_log, dt_bias = made["a_log"][0], made["dt_bias"][0].flatten()
        if bound is None:
            g = naive_kda_gate(a, a_log, dt_bias, output_dtype=torch.float64)
        else:
            g = naive_kda_lowerbound_gate(a, a_log, dt_bias, bound, output_dtype=torch.float64)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        for form in (naive_recurrent_kda, naive_chunk_kda):
            o, last = form(q, k, v, g, beta, initial_state=state, output_final_state=True)
            out |= {f"{name}/{form.__name__}/o": o[0].numpy(), f"{name}/{form.__name__}/state": last[0].numpy()}
    path = Path(__file__).with_name("kda.npz")
    np.savez_compressed(path, **{key: x.astype(np.float32) for key, x in out.items()})
    print(path.name, path.stat().st_size, {key: float(abs(x).max()) for key, x in out.items()})


if __name__ == "__main__":
    main()
