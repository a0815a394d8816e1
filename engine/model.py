"""One step of the model: tokens in, logits and the state after them out.

    x = embed[ids]
    each layer:  x += attention(rms(h));  x += ffn(rms(h))        h = x, or in Kimi K3 a mix of all earlier blocks
    logits = rms(h) W^T

Kimi K3 has no ordinary residual stream: the running sum is closed into a block each ``residual_block`` layers, and
each sublayer reads a softmax mix of the closed blocks and the open one. The blocks lie in one buffer, the open one
last, so closing a block is counting one further.

Source: kimi-k3.md, section 2.1.
"""

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.layers import Fetch, kda, mla, mlp, moe, project
from engine.params import Kda, Layer, Mix, Mlp, Params, RowFp8
from engine.plan import Plan
from engine.state import State
from ops.attention_residual import mix_rms_norm
from ops.embedding import gather_rows, gather_rows_fp8
from ops.norm import rms_norm
from ops.residual import add_, add_rms_norm_, begin_


def step(cfg: ModelConfig, params: Params, state: State, plan: Plan, fetch: Fetch) -> tuple[Tensor, State]:
    """Run the planned tokens through the model.

    Args:
        cfg: the model's shape.
        params: its weights.
        state: given up. Slots and pages that ``plan`` names are WRITTEN, all others keep their bits. The dtype of its
            latent rows, bf16 or fp32, is that of all activations.
        plan: tokens and places, see ``engine.plan``.
        fetch: brings expert rows; its hits and misses never change a bit of the result.

    Returns:
        Logits fp32 [wanted, vocab] and the state after the tokens.
    """
    run = _mixed_layers if cfg.residual_block else _plain_layers
    y_td = run(cfg, params, state, plan, fetch)
    y_wd = gather_rows(plan.wanted_w, y_td)
    logits_wv = torch.empty(len(y_wd), cfg.vocab, dtype=torch.float32, device=y_wd.device)
    return project(y_wd, params.head, logits_wv), state


def _embed(params: Params, plan: Plan, x_td: Tensor) -> Tensor:
    if isinstance(params.embed, RowFp8):
        return gather_rows_fp8(plan.ids_t, params.embed.w_nk, params.embed.scale_n, out_td=x_td)
    return gather_rows(plan.ids_t, params.embed.w_nk, out_td=x_td)


def _plain_layers(cfg: ModelConfig, params: Params, state: State, plan: Plan, fetch: Fetch) -> Tensor:
    """Ordinary pre-norm residual stream (Kimi-Linear); returns the normed output."""
    x_td = _embed(params, plan, _activations(cfg, state, plan, 1)[0])
    norms = [norm for p in params.layers for norm in (p.attention_norm_d, p.ffn_norm_d)] + [params.norm_d]
    h_td = rms_norm(x_td, norms[0], cfg.norm_eps)
    for i, p in enumerate(params.layers):
        delta_td = _attention(cfg, p, h_td, state, plan, i)
        h_td = add_rms_norm_(x_td, delta_td, norms[2 * i + 1], cfg.norm_eps)
        delta_td = _ffn(cfg, p, h_td, fetch, i)
        h_td = add_rms_norm_(x_td, delta_td, norms[2 * i + 2], cfg.norm_eps)
    return h_td


def _mixed_layers(cfg: ModelConfig, params: Params, state: State, plan: Plan, fetch: Fetch) -> Tensor:
    """Attention residuals (Kimi K3); returns the normed output."""
    assert cfg.residual_block is not None
    v_ntd = _activations(cfg, state, plan, 1 + -(-cfg.layers // cfg.residual_block))
    x_td = _embed(params, plan, v_ntd[0])
    n = 0  # the open block

    def mixed(mix: Mix | None, norm_d: Tensor) -> Tensor:
        assert mix is not None
        return mix_rms_norm(v_ntd, n + 1, mix.norm_d, mix.proj_d, norm_d, cfg.norm_eps)

    for i, p in enumerate(params.layers):
        h_td = mixed(p.attention_mix, p.attention_norm_d) if i else rms_norm(x_td, p.attention_norm_d, cfg.norm_eps)
        boundary = i % cfg.residual_block == 0
        n += boundary
        (begin_ if boundary else add_)(v_ntd[n], _attention(cfg, p, h_td, state, plan, i))
        add_(v_ntd[n], _ffn(cfg, p, mixed(p.ffn_mix, p.ffn_norm_d), fetch, i))
    return mixed(params.out_mix, params.norm_d)


def _activations(cfg: ModelConfig, state: State, plan: Plan, n: int) -> Tensor:
    """Room for ``n`` residual streams, in the dtype of the state's activations."""
    like = state.latent_lyur
    return torch.empty(n, len(plan.ids_t), cfg.width, dtype=like.dtype, device=like.device)


def _attention(cfg: ModelConfig, p: Layer, h_td: Tensor, state: State, plan: Plan, i: int) -> Tensor:
    nth = cfg.kinds[:i].count(cfg.kinds[i])
    if isinstance(p.attention, Kda):
        return kda(cfg, p.attention, h_td, state.mem_lshkp[nth], state.window_lscd[nth], plan)
    return mla(cfg, p.attention, h_td, state.latent_lyur[nth], plan)


def _ffn(cfg: ModelConfig, p: Layer, h_td: Tensor, fetch: Fetch, i: int) -> Tensor:
    if isinstance(p.ffn, Mlp):
        return mlp(cfg, p.ffn, h_td)
    return moe(cfg, p.ffn, h_td, cfg.moe_index(i), fetch)
