"""The layers as functions of activations, parameters and state. Nothing here computes: a line is a kernel of ``ops``.

Source of every formula: kimi-k3.md, sections 2.3 to 2.7 and 9.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.params import BlockFp8, Dense, Kda, Mla, Mlp, Moe, RowFp8, Stack, Weight
from engine.plan import Plan
from ops.activation import Situ, sigmoid_gate, silu_gate, situ_gate
from ops.kda.chunk import kda_chunk_
from ops.kda.conv import causal_conv_silu, conv_window_
from ops.kda.recurrent import kda_recurrent_
from ops.linear import linear, linear_block_fp8, linear_row_fp8
from ops.mla.attention import latent_attention
from ops.mla.cache import append_latent_
from ops.mla.project import absorb_queries, expand_values
from ops.moe.align import align
from ops.moe.combine import combine
from ops.moe.down import expert_down
from ops.moe.gate_up import expert_gate_up
from ops.moe.router import route
from ops.norm import gated_rms_norm, rms_norm
from ops.residual import add_

Fetch = Callable[[int, Tensor], Tensor]  # (MoE layer, expert ids [t, a]) -> their rows [t, a] in the layer's ``rows``


def project(x_tk: Tensor, weight: Weight, out_tn: Tensor | None = None) -> Tensor:
    """``x W^T`` for a weight of any format."""
    match weight:
        case Dense(w_nk):
            return linear(x_tk, w_nk, out_tn=out_tn)
        case BlockFp8(w_nk, scale_nk):
            return linear_block_fp8(x_tk, w_nk, scale_nk, out_tn=out_tn)
        case RowFp8(w_nk, scale_n):
            return linear_row_fp8(x_tk, w_nk, scale_n, out_tn=out_tn)


def project_all(x_tk: Tensor, stack: Stack) -> list[Tensor]:
    """Outputs of stacked weights, as column slices of one tensor a format."""
    parts: list[Tensor] = []
    for weight, split in zip(stack.weights, stack.splits, strict=True):
        parts += project(x_tk, weight).split(split, dim=1)
    return parts


def kda(cfg: ModelConfig, p: Kda, x_td: Tensor, mem_shkp: Tensor, window_scd: Tensor, plan: Plan) -> Tensor:
    """Kimi delta attention. WRITTEN: rows ``plan.slot_b`` of the memory and the window."""
    heads = (-1, cfg.kda_heads, cfg.kda_head_dim)
    size = cfg.kda_heads * cfg.kda_head_dim
    q, _, _, gate, decay_in, beta_th = project_all(x_td, p.entry)
    # q, k and v are neighbours in one tensor: the convolution takes them as one slice
    qkv_tc = q.as_strided((len(x_td), 3 * size), q.stride(), q.storage_offset())
    y_tc = causal_conv_silu(qkv_tc, p.conv_cj, window_scd, plan.seq_t, plan.start_b, plan.slot_b, plan.past_b)
    conv_window_(window_scd, qkv_tc, plan.start_b, plan.slot_b, plan.past_b)
    q_thk, k_thk, v_thp = (y.unflatten(1, heads[1:]) for y in y_tc.split(size, dim=1))
    decay_thk = project(decay_in, p.decay).view(heads)
    remember_ = kda_recurrent_ if cfg.exact or plan.longest == 1 else kda_chunk_
    o_thp = remember_(
        mem_shkp, q_thk, k_thk, v_thp, decay_thk, beta_th, p.a_log_h, p.dt_bias_hk, cfg.gate_lower_bound,
        plan.start_b, plan.slot_b, plan.past_b,
    )  # fmt: skip
    gate_thp = (gate if p.gate is None else project(gate, p.gate)).unflatten(1, heads[1:])
    return project(gated_rms_norm(o_thp, gate_thp, p.norm_p, cfg.norm_eps, x_td.dtype).flatten(1), p.out)


def mla(cfg: ModelConfig, p: Mla, x_td: Tensor, latent_yur: Tensor, plan: Plan) -> Tensor:
    """Latent attention over the cache, absorbed. WRITTEN: places ``plan.place_t`` of the cache."""
    q_tn, *gate, latent_tr = project_all(x_td, p.entry)
    append_latent_(latent_yur, latent_tr, p.kv_norm_r, cfg.latent_eps, plan.place_t)
    if p.q is not None and p.q_norm_r is not None:
        q_tn = project(rms_norm(q_tn, p.q_norm_r, cfg.latent_eps), p.q)
    q_thx = q_tn.unflatten(1, (cfg.heads, cfg.nope_dim + cfg.rope_dim))
    z_thr = latent_attention(
        absorb_queries(q_thx, p.kv_hxr, cfg.rope_dim), latent_yur, plan.pages_by, plan.seq_t, plan.position_t,
        (cfg.nope_dim + cfg.rope_dim) ** -0.5, rank=cfg.kv_rank, n_keys=plan.n_keys,
    )  # fmt: skip
    o_tn = expand_values(z_thr, p.kv_hxr, cfg.nope_dim).flatten(1)
    return project(sigmoid_gate(o_tn, gate[0]) if gate else o_tn, p.out)


def glu(cfg: ModelConfig, gate_up_t2f: Tensor) -> Tensor:
    """Activate the gate half and multiply by the up half."""
    if cfg.situ_beta is None:
        return silu_gate(gate_up_t2f)
    return situ_gate(gate_up_t2f, cfg.situ_beta, cfg.situ_linear_beta)


def mlp(cfg: ModelConfig, p: Mlp, x_td: Tensor) -> Tensor:
    """Dense feed-forward."""
    return project(glu(cfg, project(x_td, p.gate_up)), p.down)


def moe(cfg: ModelConfig, p: Moe, x_td: Tensor, layer: int, fetch: Fetch) -> Tensor:
    """Shared expert plus the routed ones. ``layer`` counts the layers with experts."""
    logits_te = torch.empty(len(x_td), cfg.experts, dtype=torch.float32, device=x_td.device)
    ids_ta, weight_ta = route(
        project(x_td, p.router, logits_te), p.bias_e, cfg.active_experts, renormalize=cfg.renormalize,
        scale=cfg.routed_scale, n_groups=cfg.groups, top_groups=cfg.top_groups,
    )  # fmt: skip
    rows_ta = fetch(layer, ids_ta)
    *latent, shared_t2f = project_all(x_td, p.entry)
    x_tz = latent[0] if latent else x_td
    batch = align(rows_ta, p.rows[0].shape[0])
    situ = None if cfg.situ_beta is None else Situ(cfg.situ_beta, cfg.situ_linear_beta)
    h_rf = expert_gate_up(x_tz, p.rows, batch, cfg.active_experts, situ)
    y_td = combine(expert_down(h_rf, p.rows, batch), weight_ta)
    if p.norm_z is not None and p.up is not None:
        y_td = project(rms_norm(y_td, p.norm_z, cfg.norm_eps), p.up)
    return add_(y_td, project(glu(cfg, shared_t2f), p.shared_down))
