"""Inputs of Kimi delta attention at real decay magnitudes, and both ways to run them: a kernel's and float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.kda import log_decay, recurrence


class Case:
    """Random inputs of some tokens; keys and values differ in size (B07), all are column slices of wider rows."""

    def __init__(
        self, device: torch.device, tokens: int, heads: int = 3, keys: int = 32, values: int = 48, strength: float = 3
    ) -> None:
        random = torch.Generator().manual_seed(tokens)

        def slices(*sizes: int) -> tuple[Tensor, ...]:
            wide = torch.full((tokens, 8 + heads * sum(sizes)), float("nan"))
            wide[:, 8:] = torch.randn(tokens, heads * sum(sizes), generator=random)
            parts = wide.bfloat16().to(device)[:, 8:].split([heads * size for size in sizes], dim=1)
            return tuple(x.unflatten(1, (heads, size)) for x, size in zip(parts, sizes, strict=True))

        self.q, self.k, self.v = slices(keys, keys, values)
        decay, beta = slices(keys, 1)
        self.decay, self.beta = decay.mul_(strength), beta[..., 0]
        # A from 1 to 16 as in trained models, padded past the heads as Kimi K3 stores it
        rates = torch.rand(heads, generator=random) * 15 + 1
        self.a_log = torch.cat([rates.log(), torch.full((5,), float("nan"))]).to(device)
        self.dt_bias = (torch.randn(heads, keys, generator=random) * 2 - 3).to(device)
        self.shape = (heads, keys, values)

    def state(self, slots: int) -> Tensor:
        """A poisoned state."""
        return torch.full((slots, *self.shape), float("nan"), device=self.q.device)

    def run(
        self, form: Callable[..., Tensor], mem: Tensor, tokens: slice, lower: float | None,
        lengths: list[int], slots: list[int], past: list[int],
    ) -> Tensor:  # fmt: skip
        """The kernel's output for some tokens; its state goes to ``mem``."""

        def index(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=mem.device)

        start = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
        parts = (x[tokens] for x in (self.q, self.k, self.v, self.decay, self.beta))
        return form(mem, *parts, self.a_log, self.dt_bias, lower, index(start), index(slots), index(past))

    def reference(self, lower: float | None) -> tuple[Tensor, Tensor]:
        """Output and final state of all tokens as one sequence."""
        q, k, v, decay, beta = (x.double().cpu() for x in (self.q, self.k, self.v, self.decay, self.beta))
        a_log, dt_bias = self.a_log[: self.shape[0]].double().cpu(), self.dt_bias.double().cpu()
        return recurrence(q, k, v, log_decay(decay, a_log, dt_bias, lower), torch.sigmoid(beta))
