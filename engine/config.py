"""The model's shape, read from a checkpoint's ``config.json``.

Kimi K3 (``kimi_k3``, the text model inside ``text_config``) and Kimi-Linear (``kimi_linear``) are one family: every
difference between them is a value here, never a second code path by name. Source: both releases' configuration files.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError

PAGE = 64  # tokens a page of the latent cache holds


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model. Layers count from 0."""

    model_type: str
    vocab: int
    width: int
    kinds: tuple[str, ...]  # "kda" or "mla", one a layer
    norm_eps: float
    latent_eps: float  # the two norms inside MLA; not the config's, see kimi-k3.md trap 3
    # KDA
    kda_heads: int
    kda_head_dim: int
    conv_taps: int
    gate_lower_bound: float | None  # None: -exp(A) * softplus, unbounded
    # MLA
    heads: int
    q_rank: int | None  # None: one full-rank query projection
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    # feed-forward
    first_moe_layer: int
    moe_layer_freq: int
    experts: int
    active_experts: int
    expert_width: int
    expert_input: int  # width that routed experts read: the latent one, or ``width``
    renormalize: bool
    routed_scale: float
    groups: int
    top_groups: int
    situ_beta: float | None  # None: the gate is SiLU
    situ_linear_beta: float | None  # None: the up half is used as it is
    residual_block: int | None  # layers per attention-residual block; None: ordinary residual stream
    tied_embeddings: bool
    max_positions: int
    eos_ids: tuple[int, ...]
    exact: bool = True  # False: chunked KDA in prefill, so prefill and decode may differ in the last bits

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def latent_row(self) -> int:
        """Values that MLA caches per token and layer."""
        return self.kv_rank + self.rope_dim

    def is_moe(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.first_moe_layer and layer % self.moe_layer_freq == 0

    def moe_index(self, layer: int) -> int:
        """Position of a layer among the layers with experts: its number in the expert banks."""
        return sum(map(self.is_moe, range(layer)))


def load_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json``.

    Raises:
        EngineError: the file is missing, no JSON, or describes a model that this engine does not run.
    """
    path = folder / "config.json"
    try:
        return parse_config(json.loads(path.read_text()))
    except FileNotFoundError:
        raise EngineError(f"{path} is missing, want the model's config.json beside its weights") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} is no JSON ({error})") from None
    except KeyError as error:
        raise EngineError(f"{path} has no key {error}, want a kimi_k3 or kimi_linear configuration") from None


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Turn a parsed ``config.json`` into a :class:`ModelConfig`.

    Raises:
        EngineError: a value is one that this engine does not implement.
        KeyError: a key without a safe default is missing.
    """
    model_type = str(raw.get("model_type"))
    if model_type not in ("kimi_k3", "kimi_linear"):
        raise EngineError(f"model_type is {model_type!r}, want 'kimi_k3' or 'kimi_linear'")
    text = raw.get("text_config", raw)
    _refuse_unknown(text)
    linear = text["linear_attn_config"]
    full = {i - 1 for i in linear["full_attn_layers"]}
    layers = text["num_hidden_layers"]
    missing = set(range(layers)) - full - {i - 1 for i in linear["kda_layers"]}
    if missing:
        raise EngineError(f"layer {min(missing) + 1} is in neither kda_layers nor full_attn_layers, want it in one")
    eos = raw.get("eos_token_id", text.get("eos_token_id"))
    return ModelConfig(
        model_type=model_type,
        vocab=text["vocab_size"],
        width=text["hidden_size"],
        kinds=tuple("mla" if i in full else "kda" for i in range(layers)),
        norm_eps=text["rms_norm_eps"],
        latent_eps=1e-6,
        kda_heads=linear["num_heads"],
        kda_head_dim=linear["head_dim"],
        conv_taps=linear["short_conv_kernel_size"],
        gate_lower_bound=linear.get("gate_lower_bound"),
        heads=text["num_attention_heads"],
        q_rank=text.get("q_lora_rank"),
        kv_rank=text["kv_lora_rank"],
        nope_dim=text["qk_nope_head_dim"],
        rope_dim=text["qk_rope_head_dim"],
        value_dim=text["v_head_dim"],
        first_moe_layer=text.get("first_k_dense_replace", 0),
        moe_layer_freq=text.get("moe_layer_freq", 1),
        experts=text.get("num_experts") or 0,
        active_experts=text.get("num_experts_per_token") or 0,
        expert_width=text["moe_intermediate_size"],
        expert_input=text.get("routed_expert_hidden_size") or text["hidden_size"],
        renormalize=bool(text.get("moe_renormalize", True)) and (text.get("num_experts_per_token") or 0) > 1,
        routed_scale=float(text.get("routed_scaling_factor", 1.0)),
        groups=text.get("num_expert_group") or 1,
        top_groups=text.get("topk_group") or 1,
        situ_beta=float(text.get("activation_situ_beta") or 1.0) if text.get("hidden_act") == "situ" else None,
        situ_linear_beta=text.get("activation_situ_linear_beta"),
        residual_block=text.get("attn_res_block_size"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        max_positions=text.get("max_position_embeddings") or text.get("model_max_length") or 1 << 20,
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _refuse_unknown(text: dict[str, Any]) -> None:
    """Refuse switches that change the maths and that no layer here implements."""
    wanted = {
        "hidden_act": ("silu", "situ"),
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "num_nextn_predict_layers": (0, None),
    }
    for key, allowed in wanted.items():
        if text.get(key, allowed[0]) not in allowed:
            raise EngineError(f"config.json: {key} is {text[key]!r}, want one of {list(allowed)}")
