"""The inventory against the published byte counts, and the rules of fusing."""

import math
from pathlib import Path
from typing import Any

import pytest

from engine.presets import KIMI_K3
from formats.dtypes import DTYPES
from formats.errors import FormatError
from formats.inventory import Want, expert_geometry, expert_inventory, ftw_inventory, source_inventory
from formats.safetensors import Tensor

# Architecture of the published Kimi-Linear-48B-A3B (kimi-k3.md, section 9).
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "num_hidden_layers": 27,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "linear_attn_config": {
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    },
}


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype].size


def fp8_modules(config: dict[str, Any]) -> set[str]:
    return {name.removesuffix(".weight") for name in source_inventory(config) if ".self_attn." in name}


def as_stored(wants: dict[str, Want]) -> dict[str, Tensor]:
    """Tensors such as a checkpoint with exactly these would have."""
    return {name: Tensor(name, want.dtypes[0], want.shapes[0], Path("f"), 0, 0) for name, want in wants.items()}


def test_k3_residents_close_to_the_byte() -> None:
    plain = source_inventory(KIMI_K3)
    assert len(plain) == 2460
    mixed = source_inventory(KIMI_K3, fp8_modules(KIMI_K3))
    assert len(mixed) - len(plain) == 696
    residents = ftw_inventory(KIMI_K3, as_stored(mixed))
    sizes = [nbytes(resident.dtype, resident.shape) for resident in residents]
    assert (len(sizes), sum(sizes)) == (2946, 77_787_119_584)
    assert sum(-(-size // 4096) * 4096 for size in sizes) == 77_790_797_824
    # Nothing of the source is left behind, nothing is used twice, but for scales of what was dequantised.
    used = [source for resident in residents for source in resident.sources]
    assert len(used) == len(set(used)) and {name for name in mixed if not name.endswith("_scale")} <= set(used)


def test_k3_experts_close_to_the_byte() -> None:
    geometry = expert_geometry(KIMI_K3)
    assert geometry == (tuple(range(1, 93)), 896, 3072, 3584)
    for expert_format, one_expert in (("nvfp4", 18_579_456 + 24), ("mxfp4", 17_547_264)):
        wants = expert_inventory(geometry, expert_format).values()
        assert sum(nbytes(want.dtypes[0], want.shapes[0]) for want in wants) == one_expert


@pytest.mark.parametrize(
    ("expert_format", "count", "size"),
    [("mxfp4", 497_220, 1_560_860_324_864), ("nvfp4", 992_508, 1_609_777_087_808)],
)
def test_both_published_checkpoints_close_to_the_byte(expert_format: str, count: int, size: int) -> None:
    trunk = source_inventory(KIMI_K3, fp8_modules(KIMI_K3) if expert_format == "nvfp4" else ())
    experts = expert_inventory(expert_geometry(KIMI_K3), expert_format)
    sizes = [sum(nbytes(want.dtypes[0], want.shapes[0]) for want in wants.values()) for wants in (trunk, experts)]
    # 168 vision and projector tensors hold 447,358,976 bf16 values.
    assert len(trunk) + 92 * 896 * len(experts) + 168 == count
    assert sizes[0] + 92 * 896 * sizes[1] + 2 * 447_358_976 == size


def test_k3_shapes_of_scales() -> None:
    wants = source_inventory(KIMI_K3, fp8_modules(KIMI_K3))
    kda, mla = "model.layers.0.self_attn", "model.layers.92.self_attn"
    for name, shape in (
        (f"{kda}.q_proj", (96, 1, 56, 1)),
        (f"{kda}.b_proj", (1, 1, 56, 1)),
        (f"{kda}.f_b_proj", (96, 1, 1, 1)),
        (f"{mla}.kv_a_proj_with_mqa", (5, 1, 56, 1)),
        (f"{mla}.kv_b_proj", (192, 1, 4, 1)),
    ):
        assert wants[f"{name}.weight_scale"].shapes[0] == shape


def test_which_fp8_weights_stay() -> None:
    residents = {r.name: r for r in ftw_inventory(KIMI_K3, as_stored(source_inventory(KIMI_K3, fp8_modules(KIMI_K3))))}
    kda, mla = "model.layers.0.self_attn", "model.layers.3.self_attn"
    for name, dtype in (
        (f"{kda}.q_proj", "float8_e4m3fn"),
        (f"{kda}.b_proj", "bfloat16"),
        (f"{mla}.kv_a_proj_with_mqa", "bfloat16"),
        (f"{mla}.kv_b_proj", "bfloat16"),
        (f"{mla}.q_b_proj", "float8_e4m3fn"),
    ):
        resident = residents[f"{name}.weight"]
        assert (resident.dtype, resident.dequantise) == (dtype, dtype == "bfloat16")
        assert (f"{name}.weight_scale_inv" in residents) == (dtype != "bfloat16")
    assert residents[f"{kda}.q_proj.weight_scale_inv"].shape == (96, 56)
    order = list(residents)
    assert order.index(f"{kda}.q_proj.weight_scale_inv") == order.index(f"{kda}.q_proj.weight") + 1


def test_gate_and_up_are_fused_gate_first() -> None:
    residents = {r.name: r for r in ftw_inventory(KIMI_K3, as_stored(source_inventory(KIMI_K3)))}
    fused = residents["model.layers.0.mlp.gate_up_proj.weight"]
    assert fused.shape == (67584, 7168) and not fused.dequantise
    assert fused.sources == ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
    shared = residents["model.layers.1.block_sparse_moe.shared_experts.gate_up_proj.weight"]
    assert shared.shape == (12288, 7168)
    assert "model.layers.1.block_sparse_moe.routed_expert_up_proj.weight" in residents
    assert "model.layers.1.block_sparse_moe.e_score_correction_bias" in residents


def test_fp8_halves_fuse_with_their_scales() -> None:
    wants = source_inventory(KIMI_K3, {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up")})
    residents = {r.name: r for r in ftw_inventory(KIMI_K3, as_stored(wants))}
    scale = residents["model.layers.0.mlp.gate_up_proj.weight_scale_inv"]
    assert scale.shape == (528, 56) and [name.split(".")[-2] for name in scale.sources] == ["gate_proj", "up_proj"]
    # Only one half in FP8: neither can stay.
    wants = source_inventory(KIMI_K3, {"model.layers.0.mlp.gate_proj"})
    residents = {r.name: r for r in ftw_inventory(KIMI_K3, as_stored(wants))}
    fused = residents["model.layers.0.mlp.gate_up_proj.weight"]
    assert (fused.dtype, fused.dequantise) == ("bfloat16", True)


def test_halves_of_different_dtypes_are_refused() -> None:
    tensors = as_stored(source_inventory(KIMI_K3))
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name]._replace(dtype="float32")
    with pytest.raises(
        FormatError, match=r"gate_proj.weight and .*up_proj.weight are bfloat16 and float32, want one dtype"
    ):
        ftw_inventory(KIMI_K3, tensors)


def test_kimi_linear_has_its_published_parameter_count() -> None:
    wants = source_inventory(KIMI_LINEAR)
    experts = expert_inventory(expert_geometry(KIMI_LINEAR), "bf16")
    count = sum(math.prod(want.shapes[0]) for want in wants.values())
    count += 26 * 256 * sum(math.prod(want.shapes[0]) for want in experts.values())
    assert 47.5e9 < count < 49.5e9
    at = "model.layers.0.self_attn"
    assert wants[f"{at}.A_log"].shapes[0] == (1, 1, 32, 1)
    assert f"{at}.g_proj.weight" not in wants and wants[f"{at}.g_b_proj.weight"].shapes == ((4096, 128),)
    assert wants["model.layers.3.self_attn.q_proj.weight"].shapes == ((6144, 2304),)
    assert not any(part in name for name in wants for part in ("_res_", "routed_expert_", "q_a_proj"))


def test_tied_embeddings_have_no_head() -> None:
    assert "lm_head.weight" not in source_inventory(KIMI_LINEAR | {"tie_word_embeddings": True})


@pytest.mark.parametrize("value", [None, 0, -3, 2.5, "7168", True])
def test_a_size_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(FormatError, match=r"config\.json has hidden_size .*, want an integer from 1"):
        source_inventory(KIMI_LINEAR | {"hidden_size": value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama', want 'kimi_k3' or 'kimi_linear'"),
        ({"text_config": [1]}, r"text_config \[1\], want an object"),
        ({"linear_attn_config": None}, "linear_attn_config None, want an object"),
        (
            {"linear_attn_config": KIMI_LINEAR["linear_attn_config"] | {"full_attn_layers": 4}},
            "full_attn_layers 4, want",
        ),
        ({"moe_layer_freq": 0}, "moe_layer_freq 0, want an integer from 1"),
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace '1', want an integer from 1"),
    ],
)
def test_another_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        source_inventory(KIMI_LINEAR | change)


def test_columns_that_do_not_divide_into_groups_are_refused() -> None:
    geometry = expert_geometry(KIMI_LINEAR)._replace(width=40)
    with pytest.raises(FormatError, match="w1 40 columns, want a multiple of 16 for nvfp4"):
        expert_inventory(geometry, "nvfp4")
