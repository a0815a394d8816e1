"""Feed-forward layers: gated, and a mixture of experts (kimi-k3.md, sections 2.3, 2.4 and 9)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.reference.norm import rms_norm


def activate(gate: Tensor, up: Tensor, text: Mapping[str, Any]) -> Tensor:
    if text["hidden_act"] == "silu":
        return gate * torch.sigmoid(gate) * up
    beta, linear_beta = text.get("activation_situ_beta") or 1.0, text.get("activation_situ_linear_beta")
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, text: Mapping[str, Any]) -> Tensor:
    return activate(x @ gate.T, x @ up.T, text) @ down.T


Choose = Callable[[Tensor, int], Tensor]  # selection scores [T, E] and how many; gives ids [T, A]


def highest(choice: Tensor, n_active: int) -> Tensor:
    """Descending, the lowest id first among equals."""
    return choice.argsort(dim=-1, descending=True, stable=True)[:, :n_active]


def route(
    logits: Tensor,
    bias: Tensor,
    n_active: int,
    *,
    renormalize: bool,
    scale: float,
    n_groups: int = 1,
    top_groups: int = 1,
    choose: Choose = highest,
) -> tuple[Tensor, Tensor]:
    """logits [T, E], bias [E]; gives ids and weights [T, A] in descending order of the selection score."""
    score = torch.sigmoid(logits)
    choice = score + bias
    if n_groups > 1:
        groups = choice.unflatten(-1, (n_groups, -1))
        best = groups.topk(2, -1).values.sum(-1).argsort(dim=-1, descending=True, stable=True)[:, :top_groups]
        kept = torch.zeros_like(groups, dtype=torch.bool)
        kept[torch.arange(len(logits))[:, None], best] = True
        choice = groups.masked_fill(~kept, -torch.inf).flatten(-2)
    ids = choose(choice, n_active)
    weight = score.gather(-1, ids)
    if renormalize:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    return ids, weight * scale


def layer(x: Tensor, w: Mapping[str, Tensor], text: Mapping[str, Any], choose: Choose = highest) -> Tensor:
    """x [T, D] normed; w by their names after ``block_sparse_moe.``."""
    n_active = text["num_experts_per_token"]
    ids, weight = route(
        x @ w["gate.weight"].T,
        w["gate.e_score_correction_bias"],
        n_active,
        renormalize=text.get("moe_renormalize", True) and n_active > 1,
        scale=text.get("routed_scaling_factor", 1.0),
        n_groups=text.get("num_expert_group") or 1,
        top_groups=text.get("topk_group") or 1,
        choose=choose,
    )
    z = x @ w["routed_expert_down_proj.weight"].T if "routed_expert_down_proj.weight" in w else x
    y = torch.zeros_like(z)
    for t, a in torch.cartesian_prod(torch.arange(len(x)), torch.arange(n_active)).tolist():
        gate, down, up = (w[f"experts.{ids[t, a]}.w{n}.weight"] for n in (1, 2, 3))
        y[t] += weight[t, a] * mlp(z[t], gate, up, down, text)
    if "routed_expert_norm.weight" in w:
        y = rms_norm(y, w["routed_expert_norm.weight"], text["rms_norm_eps"])
    if "routed_expert_up_proj.weight" in w:
        y = y @ w["routed_expert_up_proj.weight"].T
    if "shared_experts.gate_proj.weight" in w:
        y = y + mlp(x, *(w[f"shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down")), text)
    return y
